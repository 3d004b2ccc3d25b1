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
    return _wait(rank, post, missing) if missing else None


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
    return found is not None and not found.flags & (Flag.REFUSED | Flag.DROPPED)


def find_dropped(call_board: CallBoard, waits: Iterable[Wait]) -> list[tuple[int, Post]]:
    """Return (rank, call) of messages that are waited for but were lost with their handle."""
    pairs = {
        (other, tuple(sorted((wait.rank, other)))) for wait in waits for other in wait.waits_for
    }
    return [
        (rank, post)
        for rank, members in sorted(pairs)
        for post in call_board.history(rank)
        if Flag.DROPPED in post.flags and post.members == members
    ]


def find_orphans(
    call_board: CallBoard, ranks: Iterable[int], since_s: float
) -> list[tuple[int, Post]]:
    """Return (rank, call) of messages that were never received, or receives never sent to.

    They have to be reported: the next message of the same pair would be taken for them.
    """
    return [
        (rank, post)
        for rank in ranks
        for post in call_board.history(rank)
        if Flag.DROPPED in post.flags
        and post.post_s >= since_s
        and len(list(call_board.matching(post))) < len(post.members)
    ]


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
    history = (post for post in call_board.history(rank) if post.post_s >= since_s)
    return {(p.channel, p.seq): p for p in history if p.kind not in ("send", "recv")}


class HangWatch:
    """Watch for a hang; it is certain once no rank could proceed, and none did, for 0.7 s."""

    def __init__(self, call_board: CallBoard) -> None:
        self._call_board = call_board
        self._since_s: float | None = None
        self._seen: tuple[int, ...] = ()

    def is_certain(self, unfinished: Iterable[int]) -> bool:
        """Look at the call board again; return True once a hang has lasted for 0.7 s."""
        unfinished, now_s = list(unfinished), time.perf_counter()
        seen = (*unfinished, *(self._call_board.state(rank).num_posts for rank in unfinished))
        if find_hang(self._call_board, unfinished) is None:
            self._since_s = None
        elif self._since_s is None or seen != self._seen:
            self._since_s = now_s
        self._seen = seen
        return self._since_s is not None and now_s - self._since_s > CERTAIN_AFTER_S
