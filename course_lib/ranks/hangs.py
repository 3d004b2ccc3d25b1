"""Detection of hangs and of lost or swapped messages, from the call board.

A rank can proceed if it computes, or if every rank that its call needs has made that call. A rank
that waits for one that can still proceed may be released later. When no rank can proceed, none ever
will: that is a hang. It is a deadlock where the ranks wait for each other in a cycle.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from course_lib.ranks.call_board import CallBoard, Flag, Post
from course_lib.ranks.source_lines import Line

IDLE_IN_TORCH_S = 1.0  # no CPU time for that long: a wait deep in C++
CERTAIN_AFTER_S = 0.7


@dataclass(frozen=True)
class Wait:
    """Wait of one rank: the kind of call, the ranks it waits for, and the learner's line."""

    rank: int
    kind: str
    waits_for: tuple[int, ...]
    source: Line

    @property
    def where(self) -> str:
        """Text of the learner's line, with where it is."""
        return str(self.source)

    @property
    def line(self) -> int:
        """Number of the line in its cell or file."""
        return self.source.number


def find_wait(call_board: CallBoard, rank: int) -> Wait | None:
    """Return the wait of a rank, or None if it computes or its call is under way."""
    state = call_board.state(rank)
    key = state.blocked or (state.oldest if state.idle_s > IDLE_IN_TORCH_S else None)
    if key is None:
        return None
    post = call_board.find(rank, *key)
    if post is None or Flag.ARRIVED in post.flags:
        return None
    missing = tuple(other for other in post.members if not _has_called(call_board, other, post))
    waits_for = missing or _cut_off(call_board, rank, post)
    return _wait(rank, post, waits_for) if waits_for else None


def find_lost_wait(call_board: CallBoard, rank: int, gone: Iterable[int]) -> Wait | None:
    """Return the wait in which a rank lost its connection to the ranks in `gone`, or None."""
    calls = [post for post in call_board.history(rank) if Flag.DONE not in post.flags]
    return _wait(rank, calls[0], tuple(gone)) if calls else None


def _wait(rank: int, post: Post, missing: tuple[int, ...]) -> Wait:
    return Wait(rank, post.kind, missing, post.line)


def find_hang(call_board: CallBoard, unfinished: Iterable[int]) -> list[Wait] | None:
    """Return the waits of all unfinished ranks if none of them can ever proceed, else None."""
    waits = {rank: find_wait(call_board, rank) for rank in unfinished}
    if not waits or any(wait is None for wait in waits.values()):
        return None
    return [wait for wait in waits.values() if wait is not None]


def _has_called(call_board: CallBoard, rank: int, post: Post) -> bool:
    found = call_board.find(rank, post.channel, post.seq)
    if found is None or Flag.REFUSED in found.flags:
        return False
    return found.kind == "recv" or Flag.DROPPED not in found.flags


def _cut_off(call_board: CallBoard, rank: int, post: Post) -> tuple[int, ...]:
    """Return the members between which nothing moves any more, as gloo still looks for a send."""
    pairs = [
        {sender, lost.peer} for sender in post.members for lost in _in_doubt(call_board, sender)
    ]
    stuck = set().union(*(pair for pair in pairs if pair <= set(post.members)))
    return tuple(sorted(stuck - {rank}))


def _in_doubt(call_board: CallBoard, rank: int) -> list[Post]:
    """Return the sends whose handle was not kept and whose receive, though posted, has not ended.

    They may have left before their handle was garbage-collected. If not, gloo's thread looks for
    them for ever, at full load.
    """
    sends = (p for p in call_board.history(rank, Flag.DROPPED) if p.kind == "send")
    ends = ((send, call_board.find(send.peer, send.channel, send.seq)) for send in sends)
    return [send for send, end in ends if end and not end.flags & (Flag.DONE | Flag.ARRIVED)]


def find_dropped(call_board: CallBoard, waits: Iterable[Wait]) -> list[tuple[int, Post]]:
    """Return (rank, call) of messages that may explain the waits, as their handle was not kept.

    They are sends to a rank that waits, which were lost, and receives on either side, which took
    the message that another receive waits for.
    """
    pairs = {(wait.rank, other) for wait in waits for other in wait.waits_for}
    sides = {(rank, tuple(sorted(pair))) for pair in pairs for rank in pair}
    return [
        (rank, post)
        for rank, members in sorted(sides)
        for post in call_board.history(rank, Flag.DROPPED)
        if post.members == members and (post.kind == "recv" or (post.peer, rank) in pairs)
    ]


def find_orphans(
    call_board: CallBoard, ranks: Iterable[int], since_s: float
) -> list[tuple[int, Post]]:
    """Return (rank, call) of messages that were never received, or receives never sent to.

    They have to be reported: the next message of the same pair would be taken for them. Their
    handles were garbage-collected since `since_s`; they may have been called in an earlier job.
    """
    return [
        (rank, post)
        for rank in ranks
        for post in call_board.history(rank, Flag.DROPPED)
        if post.drop_s >= since_s and not _has_met(call_board, post)
    ]


def find_unkept(
    call_board: CallBoard, ranks: Iterable[int], since_s: float
) -> list[tuple[int, Post]]:
    """Return (rank, call) of messages of which both sides were called, but a handle was not kept.

    They are receives that nothing waited for, and sends that may be lost.
    """
    received = [
        (rank, post)
        for rank in ranks
        for post in call_board.history(rank, Flag.DROPPED)
        if post.kind == "recv" and post.drop_s >= since_s and _has_met(call_board, post)
    ]
    return received + [(rank, post) for rank in ranks for post in _in_doubt(call_board, rank)]


def _has_met(call_board: CallBoard, post: Post) -> bool:
    """Return whether a call has completed, or every member has made its side of it."""
    return Flag.DONE in post.flags or len(list(call_board.matching(post))) == len(post.members)


@dataclass(frozen=True)
class Swap:
    """Two collectives that two ranks called in opposite orders; `lines` as the first did."""

    kind: str
    ranks: tuple[int, int]
    lines: tuple[Line, Line]

    def __str__(self) -> str:
        first, second = self.ranks
        return (
            f"swapped: ranks {first} and {second} made two calls of {self.kind} in opposite "
            f"orders; nothing failed, but the numbers are mixed up\n    {self.lines[0]}\n"
            f"    {self.lines[1]}"
        )


def find_swap(call_board: CallBoard, ranks: Iterable[int], since_s: float = 0.0) -> Swap | None:
    """Return two collectives of one group that two ranks called in opposite orders, or None.

    They have the same kind, dtype and shape, so nothing failed; the numbers are wrong all the same.
    A call is identified by the text of its line, so the branches of an `if` may differ.
    """
    calls = {rank: _collectives(call_board, rank, since_s) for rank in ranks}
    for first, second in combinations(sorted(calls), 2):
        seen = set()
        for key, mine in calls[first].items():
            other = calls[second].get(key)
            if other is None or mine.line.text == other.line.text:
                continue
            if (key[0], other.line.text, mine.line.text) in seen:
                return Swap(mine.kind, (first, second), (other.line, mine.line))
            seen.add((key[0], mine.line.text, other.line.text))
    return None


def _collectives(call_board: CallBoard, rank: int, since_s: float) -> dict[tuple[int, int], Post]:
    history = call_board.history(rank, since_s=since_s)
    return {(p.channel, p.seq): p for p in history if p.kind not in ("send", "recv")}


class HangWatch:
    """Watch for a hang; it is certain once no rank could proceed, and none did, for 0.7 s.

    waits   those of a hang that is certain; a later look may take a rank that was idle for one that
            computes
    """

    def __init__(self, call_board: CallBoard) -> None:
        self._call_board = call_board
        self._since_s: float | None = None
        self._seen: tuple[int, ...] = ()
        self.waits: list[Wait] = []

    def is_certain(self, unfinished: Iterable[int], is_current: bool = True) -> bool:
        """Look at the call board again; return True once a hang has lasted for 0.7 s.

        A call board that is not current may lack the call that releases a rank.
        """
        unfinished, now_s = list(unfinished), time.perf_counter()
        seen = (*unfinished, *(self._call_board.state(rank).num_posts for rank in unfinished))
        waits = find_hang(self._call_board, unfinished)
        if waits is None or not is_current:
            self._since_s = None
        elif self._since_s is None or seen != self._seen:
            self._since_s = now_s
        self._seen = seen
        lasts = self._since_s is not None and now_s - self._since_s > CERTAIN_AFTER_S
        self.waits = waits if waits and lasts else []
        return lasts
