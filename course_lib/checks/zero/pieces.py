"""Exercise 1 of 09_zero: the pieces of each tensor in a rank's shard.

Needs no ranks. The planted mistakes are in `pieces_answers.py`.
"""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.zero.pieces_answers import WRONG, Pieces, not_rounded, pieces_of

SIZES = ((5, 1, 7), (4, 4), (2, 3, 1, 8, 6), (3,), (1, 1), (4, 0, 3))
CASES = [(sizes, p, rank) for sizes in SIZES for p in (3, 2, 4, 1) for rank in range(p)]


def check_pieces(answer: Callable[..., Any]) -> str:
    """Check tensors of all sizes on 1 to 4 ranks, also fewer numbers than ranks."""
    got = [_read(answer([*sizes], p, rank), sizes) for sizes, p, rank in CASES]
    for (sizes, p, rank), is_now in zip(CASES, got, strict=True):
        wanted = pieces_of(sizes, p, rank)
        if is_now != wanted:
            raise CheckFailed(
                f"tensors of {', '.join(map(str, sizes))} numbers, rank {rank} of {p}: need "
                f"{wanted}; got {is_now}. {_why(got)}"
            )
    return "Equal shards: each number has one owner, also with fewer numbers than ranks."


def _read(pieces: Any, sizes: Sequence[int]) -> Pieces:
    try:
        return [(index(which), index(start), index(stop)) for which, start, stop in pieces]
    except (TypeError, ValueError):
        hint = (
            "Does your function return it?"
            if pieces is None
            else "A piece is three whole numbers; the length of a shard is rounded up."
        )
        raise CheckFailed(
            f"tensors of {', '.join(map(str, sizes))} numbers: need a list of (index, start, "
            f"stop); got {pieces!r}. {hint}"
        ) from None


def _why(got: Sequence[Pieces]) -> str:
    """Return the cause that fits every case."""
    for _, wrong, says in WRONG:
        if got == [wrong(*case) for case in CASES]:
            return says
    return "Draw the flat parameter: where do each tensor and the shard begin and end?"


PIECES = Exercise(
    key="zero-1",
    title="the pieces of a shard",
    check=check_pieces,
    reference=pieces_of,
    mistakes=(
        *(Mistake(name, wrong, says[:40]) for name, wrong, says in WRONG),
        Mistake("not rounded", not_rounded, says="three whole numbers"),
        Mistake("not returned", lambda sizes, p, rank: None, says="Does your function return it?"),
    ),
)
