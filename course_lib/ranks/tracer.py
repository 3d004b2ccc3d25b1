"""The call tracer: announces, compares, records and, on an emulated link, delays every call.

`TracedGroup` (process_group.py) wraps gloo, and NCCL where each rank has a GPU. PyTorch sends every
call through it, whoever makes it: the learner, this course, DDP's C++ reducer, FSDP, DTensor. The
tracer posts the call on the call board with the learner's line, compares it with the calls of the
other ranks, and records it when it ends.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink
from course_lib.ranks.call_board import CallBoard, Flag, Post, channel_of, unfit_split
from course_lib.ranks.emulated_links import LinkEmulator
from course_lib.ranks.recorder import Recorder
from course_lib.ranks.source_lines import caller

if TYPE_CHECKING:
    from course_lib.ranks.work_handle import TrackedWork


class MismatchError(CourseError):
    """Two ranks made calls that do not match."""


class CallTracer:
    """Tracer of one rank, shared by all its process groups: call board, recorder, emulated link."""

    def __init__(
        self, rank: int, call_board: CallBoard, link: Link | TwoLevelLink | None = None
    ) -> None:
        self.rank = rank
        self.call_board = call_board
        self.recorder = Recorder(rank)
        self.link_emulator = LinkEmulator(rank, call_board, link) if link else None
        self.outstanding: dict[int, Post] = {}
        self.noting = threading.Lock()
        self._unkept: dict[int, TrackedWork] = {}
        self._settling = threading.Lock()
        self._next_seq: dict[int, int] = defaultdict(int)
        self._num_posts = 0

    def announce_new_groups(self) -> None:
        """Announce `new_group`, which all ranks have to call, like any collective."""
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
        sends: tuple[int, ...] = (),
        expects: tuple[int, ...] = (),
    ) -> Post:
        """Announce a call on the call board and compare it with the other ranks' calls.

        Raises: MismatchError, before this call starts, if one of another rank does not match.
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
            sends=sends,
            expects=expects,
        )
        self.call_board.post(self.rank, post)
        self._compare(post)
        self.outstanding[post.number] = post
        if self.link_emulator is not None:
            self.link_emulator.enqueue(post)
        return post

    def count(self, channel: int) -> int:
        """Return the number of this call among the rank's calls on a channel, and count it."""
        self._next_seq[channel] += 1
        return self._next_seq[channel] - 1

    def _compare(self, post: Post) -> None:
        """Raise MismatchError for a call that does not match one another rank has announced."""
        others = [rank for rank in post.members if rank != self.rank]
        if not post.sends and all(self.call_board.agrees(rank, post) for rank in others):
            return
        for rank, other in self.call_board.matching(
            post
        ):  # read again, now that it is surely whole
            sizes = unfit_split([(self.rank, post), (rank, other)]) if rank != self.rank else ""
            if other.signature != post.signature or sizes:
                self.call_board.mark(self.rank, post, Flag.REFUSED)
                raise MismatchError(
                    f"rank {self.rank} calls {post.call}{post.sizes} ({post.line}), but rank "
                    f"{rank} calls {other.call}{other.sizes} ({other.line}). "
                    + (sizes or "All ranks have to make the same calls in the same order")
                    + "."
                )

    @contextmanager
    def blocked(self, post: Post) -> Iterator[None]:
        """Mark on the call board that the main thread waits for this call."""
        on_main = threading.current_thread() is threading.main_thread()
        if on_main:
            self.call_board.block(self.rank, post.channel, post.seq)
        try:
            yield
        finally:
            if on_main:
                self.call_board.block(self.rank, 0, 0)

    def finish(self, post: Post) -> bool:
        """Mark a call as completed; return False if it was marked before."""
        if self.outstanding.pop(post.number, None) is not None:
            flags = Flag.DONE
        elif self._unkept.pop(post.number, None) is not None:
            flags = Flag.DONE | Flag.DROPPED
        else:
            return False
        self.call_board.mark(self.rank, post, flags)
        return True

    def drop(self, work: "TrackedWork") -> None:
        """Mark a message whose handle was garbage-collected.

        A send that has not left yet is lost. A receive is kept under way: gloo's thread would use
        all of a core for ever if a message arrived for a receive whose handle is gone.
        """
        post = work.post
        if self.outstanding.pop(post.number, None) is None or work.failed:
            return
        self.call_board.drop(self.rank, post, time.perf_counter())
        if post.kind == "recv":
            self._unkept[post.number] = work

    def settle(self, last: Post) -> None:
        """Record the receives before `last` on its channel although their handles were not kept.

        Messages arrive in order, so those of the receives before `last`, which has completed, are
        here.
        """
        with self._settling:  # a thread that waits for a future may come here too
            for number in sorted(self._unkept):
                work = self._unkept[number]
                if work.post.channel == last.channel and work.post.seq < last.seq:
                    with self.blocked(work.post):
                        work.settle()
                    self._unkept.pop(number, None)

    def forget_unkept(self) -> None:
        """Let go of the receives that never arrived, before their process group ends."""
        self._unkept.clear()
