"""The tracer: a process group that announces, records and, if asked, slows down every call.

It stands in front of gloo (and NCCL where each rank has a GPU). PyTorch sends every call through
it, whoever makes it: the learner, this course, DDP's C++ reducer, FSDP, DTensor. A call is posted
on the board with the learner's line, compared with what the other ranks posted, handed on, and
recorded when it ends.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink
from course_lib.ranks.call_board import CallBoard, Flag, Post, channel_of
from course_lib.ranks.emulated_links import LinkEmulator
from course_lib.ranks.recorder import Recorder
from course_lib.ranks.source_lines import caller


class MismatchError(CourseError):
    """Two ranks made calls that do not fit together."""


class CallTracer:
    """What all process groups of one rank share: its board, recorder, and emulated link."""

    def __init__(
        self, rank: int, board: CallBoard, link: Link | TwoLevelLink | None = None
    ) -> None:
        self.rank = rank
        self.board = board
        self.recorder = Recorder(rank)
        self.link_emulator = LinkEmulator(rank, board, link) if link else None
        self.outstanding: dict[int, Post] = {}
        self.noting = threading.Lock()
        self._next_seq: dict[int, int] = defaultdict(int)
        self._num_posts = 0

    def announce_new_groups(self) -> None:
        """Put `new_group`, which all ranks have to call, on the board like any collective."""
        core = dist.distributed_c10d
        make_group = core._new_group_with_tag

        def announced(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
            everyone = tuple(range(dist.get_world_size()))
            local_only = kwargs.get("use_local_synchronization", False)
            members = tuple(sorted(ranks)) if local_only and ranks else everyone
            name = ",".join(map(str, ranks)) if ranks is not None else "all"
            post = self.post("new_group", members, f"new_group({name})")
            with self.blocked(post):
                group = make_group(ranks, *args, **kwargs)
            self.finish(post)
            return group

        core._new_group_with_tag = announced

    def post(
        self,
        kind: str,
        members: tuple[int, ...],
        signature: str,
        *,
        channel: tuple[object, ...] | None = None,
        num_bytes: int = 0,
        peer: int = -1,
    ) -> Post:
        """Announce a call on the board and compare it with what the others announced.

        Raises: MismatchError, before anything is sent, if another rank's call does not fit.
        """
        number = channel_of(*(channel or (kind, members)))
        seq = self.count(number)
        self._num_posts += 1
        now_s, arrive_s = time.perf_counter(), 0.0
        if self.link_emulator is not None and kind == "send":
            arrive_s = self.link_emulator.message_arrival_s(now_s, num_bytes, peer)
        post = Post(
            number=self._num_posts,
            channel=number,
            seq=seq,
            kind=kind,
            members=members,
            signature=signature,
            line=caller(),
            post_s=now_s,
            arrive_s=arrive_s,
            num_bytes=num_bytes,
            peer=peer,
        )
        self.board.post(self.rank, post)
        self._compare(post)
        self.outstanding[post.number] = post
        if self.link_emulator is not None:
            self.link_emulator.enqueue(post)
        return post

    def count(self, channel: int) -> int:
        """The number of this call among the rank's calls on a channel."""
        self._next_seq[channel] += 1
        return self._next_seq[channel] - 1

    def _compare(self, post: Post) -> None:
        """Refuse a call that does not fit what another rank has announced."""
        others = [rank for rank in post.members if rank != self.rank]
        if all(self.board.agrees(rank, post) for rank in others):
            return
        for rank, other in self.board.matching(post):  # read again, now that it is surely whole
            if other.signature != post.signature:
                self.board.mark(self.rank, post, Flag.REFUSED)
                raise MismatchError(
                    f"rank {self.rank} calls {post.call} ({post.line}), but rank {rank} calls "
                    f"{other.call} ({other.line}). All ranks have to make the same calls in "
                    "the same order."
                )

    @contextmanager
    def blocked(self, post: Post) -> Iterator[None]:
        """Say on the board that the main thread waits for this call to end."""
        on_main = threading.current_thread() is threading.main_thread()
        if on_main:
            self.board.block(self.rank, post.channel, post.seq)
        try:
            yield
        finally:
            if on_main:
                self.board.block(self.rank, 0, 0)

    def finish(self, post: Post) -> bool:
        """Note that a call has come to its end; False if somebody noted it before."""
        if self.outstanding.pop(post.number, None) is None:
            return False
        self.board.mark(self.rank, post, Flag.DONE)
        return True

    def drop(self, post: Post) -> None:
        """Note that the handle of a message is gone: what has not left by now, never will."""
        if self.outstanding.pop(post.number, None) is not None:
            self.board.mark(self.rank, post, Flag.DROPPED)
