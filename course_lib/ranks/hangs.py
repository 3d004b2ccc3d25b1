"""Can anything still move? Reads the board and finds who waits for whom.

A rank moves if it computes, or if the call it waits in has been made by everyone it needs. A rank
that waits for a rank that can still move may be freed later. When no rank is left that can move,
nothing will ever happen again: a hang.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from course_lib.ranks.call_board import CallBoard, Flag, Post
from course_lib.ranks.source_lines import Line

IDLE_IN_TORCH_S = 1.0  # a wait deep in C++ is told by its using no CPU
CERTAIN_AFTER_S = 0.7


@dataclass(frozen=True)
class Wait:
    """One rank's wait: in which call, for whom, on which line of the learner's."""

    rank: int
    kind: str
    waits_for: tuple[int, ...]
    source: Line

    @property
    def where(self) -> str:
        """The learner's line, as text."""
        return str(self.source)

    @property
    def line(self) -> int:
        """The line's number in its cell or file."""
        return self.source.number


def find_wait(board: CallBoard, rank: int) -> Wait | None:
    """What a rank waits for, or None if it computes (or its call is under way)."""
    state = board.state(rank)
    key = state.blocked or (state.oldest if state.idle_s > IDLE_IN_TORCH_S else None)
    if key is None:
        return None
    post = board.find(rank, *key)
    if post is None or Flag.ARRIVED in post.flags:
        return None
    missing = tuple(other for other in post.members if not _has_called(board, other, post))
    return _wait(rank, post, missing) if missing else None


def find_lost_wait(board: CallBoard, rank: int, gone: Iterable[int]) -> Wait | None:
    """The call in which a rank lost the connection to ranks that have `gone`."""
    calls = [post for post in board.history(rank) if Flag.DONE not in post.flags]
    return _wait(rank, calls[0], tuple(gone)) if calls else None


def _wait(rank: int, post: Post, missing: tuple[int, ...]) -> Wait:
    return Wait(rank, post.kind, missing, post.line)


def find_hang(board: CallBoard, unfinished: Iterable[int]) -> list[Wait] | None:
    """The waits of all unfinished ranks if none of them can ever move again, else None."""
    waits = {rank: find_wait(board, rank) for rank in unfinished}
    if not waits or any(wait is None for wait in waits.values()):
        return None
    return [wait for wait in waits.values() if wait is not None]


def find_circle(waits: Iterable[Wait]) -> list[int]:
    """Ranks that wait for one another in a circle, first rank repeated at the end; or nothing."""
    waits_for = {wait.rank: wait.waits_for for wait in waits}
    for start in sorted(waits_for):
        path = [start]
        while path[-1] in waits_for:
            following = [r for r in waits_for[path[-1]] if r in waits_for]
            if not following:
                break
            step = start if start in following else following[0]
            if step in path:
                if step == start:
                    return [*path, start]
                break
            path.append(step)
    return []


def _has_called(board: CallBoard, rank: int, post: Post) -> bool:
    found = board.find(rank, post.channel, post.seq)
    return found is not None and not found.flags & (Flag.REFUSED | Flag.DROPPED)


def find_dropped(board: CallBoard, waits: Iterable[Wait]) -> list[tuple[int, Post]]:
    """Messages somebody waits for that were lost with their handle, by the rank that lost it."""
    pairs = {
        (other, tuple(sorted((wait.rank, other)))) for wait in waits for other in wait.waits_for
    }
    return [
        (rank, post)
        for rank, members in sorted(pairs)
        for post in board.history(rank)
        if Flag.DROPPED in post.flags and post.members == members
    ]


def find_orphans(board: CallBoard, ranks: Iterable[int], since_s: float) -> list[tuple[int, Post]]:
    """Messages whose other end never came, by rank; the next one would be taken for them."""
    return [
        (rank, post)
        for rank in ranks
        for post in board.history(rank)
        if Flag.DROPPED in post.flags
        and post.post_s >= since_s
        and len(list(board.matching(post))) < len(post.members)
    ]


@dataclass(frozen=True)
class Swap:
    """Two ranks made the same two calls in opposite orders; `lines` as the first rank made them."""

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


def find_swap(board: CallBoard, ranks: Iterable[int], since_s: float = 0.0) -> Swap | None:
    """Two collectives of one group that two ranks called in opposite orders.

    They have the same kind, dtype and shape, so nothing failed; the numbers are wrong all the same.
    What a call is, is told by the text of its line, so that the branches of an `if` can differ.
    """
    calls = {rank: _collectives(board, rank, since_s) for rank in ranks}
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


def _collectives(board: CallBoard, rank: int, since_s: float) -> dict[tuple[int, int], Post]:
    history = (post for post in board.history(rank) if post.post_s >= since_s)
    return {(p.channel, p.seq): p for p in history if p.kind not in ("send", "recv")}


class HangWatch:
    """Says when a hang is certain: nothing could move, and nothing moved, for a while."""

    def __init__(self, board: CallBoard) -> None:
        self._board = board
        self._since_s: float | None = None
        self._seen: tuple[int, ...] = ()

    def is_certain(self, unfinished: Iterable[int]) -> bool:
        """Look again, a few times a second. True once a standstill has lasted long enough."""
        unfinished, now_s = list(unfinished), time.perf_counter()
        seen = (*unfinished, *(self._board.state(rank).num_posts for rank in unfinished))
        if find_hang(self._board, unfinished) is None:
            self._since_s = None
        elif self._since_s is None or seen != self._seen:
            self._since_s = now_s
        self._seen = seen
        return self._since_s is not None and now_s - self._since_s > CERTAIN_AFTER_S
