"""Emulated links: a call ends when a link of that latency and bandwidth would have delivered it.

The bytes are really sent, over gloo; then the receiver sleeps until alpha + bytes / beta seconds
have passed since the message left. No rank uses the CPU while a message is on its way, so overlap
can be measured even on two cores. A rank has one port per kind of link, through which its messages
leave one after another. A link cannot be made faster than the machine itself.
"""

import threading
import time
from collections import defaultdict

from course_lib.core.links import Link, TwoLevelLink
from course_lib.cost.network import collective_s
from course_lib.ranks.call_board import CallBoard, Post

POLL_S = 0.0005


class LinkEmulator:
    """Emulator of a link on one rank: computes when its messages arrive, and waits until then."""

    def __init__(self, rank: int, call_board: CallBoard, link: Link | TwoLevelLink) -> None:
        self.rank, self.call_board, self.link = rank, call_board, link
        self._port_free_s: dict[Link, float] = defaultdict(float)
        self._due_s: dict[int, float] = {}
        self._queue: list[Post] = []
        self._lock = threading.Lock()

    def message_arrival_s(self, now_s: float, num_bytes: int, receiver: int) -> float:
        """Return when a message sent at `now_s` arrives, after those sent before it (seconds)."""
        link = self.link.between(self.rank, receiver)
        start_s = max(now_s, self._port_free_s[link])
        self._port_free_s[link] = start_s + num_bytes / link.bytes_per_s
        return start_s + link.time_s(num_bytes)

    def enqueue(self, post: Post) -> None:
        """Queue a collective; collectives leave in the order in which the rank calls them."""
        if post.kind not in ("send", "recv", "new_group"):
            self._queue.append(post)

    def delivery_s(self, post: Post) -> float | None:
        """Return when the call ends in seconds, or None while another rank has not made it yet."""
        if post.kind == "send":
            return post.arrive_s
        if post.kind == "recv":
            if post.peer < 0:
                return post.post_s
            return self.call_board.arrival_s(post.peer, post.channel, post.seq)
        with self._lock:  # a thread waits for each of DDP's buckets
            while self._queue and post.number not in self._due_s:
                if not self._schedule(self._queue[0]):
                    return None
                self._queue.pop(0)
            return self._due_s.get(post.number, post.post_s)

    def deliver(self, post: Post) -> float:
        """Sleep until the call ends; return the time at which it was due, in seconds."""
        while (due_s := self.delivery_s(post)) is None:
            time.sleep(POLL_S)
        self._due_s.pop(post.number, None)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return due_s

    def _schedule(self, post: Post) -> bool:
        """Schedule the oldest collective if every member has called it; return whether it is."""
        arrivals = [self.call_board.arrival_s(r, post.channel, post.seq) for r in post.members]
        called = [time_s for time_s in arrivals if time_s is not None]
        if len(called) < len(arrivals):
            return False
        link = self._slowest_link(post.members)
        start_s = max(*called, self._port_free_s[link])
        end_s = start_s + collective_s(post.kind, post.num_bytes, post.members, self.link)
        self._port_free_s[link] = self._due_s[post.number] = end_s
        return True

    def _slowest_link(self, members: tuple[int, ...]) -> Link:
        links = [self.link.between(self.rank, other) for other in members if other != self.rank]
        return min(links, key=lambda link: link.bytes_per_s, default=self.link.between(0, 0))
