"""Exercise 3 of 07_tensor_parallel: whole attention heads for every rank."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from course_lib.checks.cases import Case, Cases, whole
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed

# p, num_heads, num_kv_heads, head_dim
ATTENTIONS = (
    (2, 4, 4, 3),
    (3, 6, 6, 2),
    (2, 8, 4, 2),
    (4, 8, 4, 3),
    (1, 3, 1, 2),
    (5, 15, 5, 1),
    (16, 32, 16, 1),
    (8, 96, 96, 128),  # more rows than int16 counts
    (2, 4, 4, 3),  # again, after the caller has changed the lists of the first time
)

MARK = -1  # what the caller puts into each list that was returned
FLAT = Cause("`rows += range(...)` or rows.extend adds the numbers themselves: one flat list.")


def _cases() -> list[Case]:
    return [
        (
            f"rank {rank} of {p} ({heads} heads of q, {kv_heads} of k and of v, {dim} rows each)",
            (rank, p, heads, kv_heads, dim),
        )
        for p, heads, kv_heads, dim in ATTENTIONS
        for rank in range(p)
    ]


def _runs(rows: Any, *_arguments: int) -> str:
    """Return row numbers as runs: `0-5 12-14`; an order that is not ascending stays as it is.

    The list itself gets a MARK, as from a caller who goes on with it.
    """
    numbers = rows.tolist() if isinstance(rows, Tensor) else rows
    if not isinstance(numbers, Iterable):
        raise failed(f"need a list of row numbers; got {rows!r}", FLAT)
    found = [whole(number) for number in numbers]
    if others := [one for one in found if not isinstance(one, int)]:
        raise failed(f"need a list of row numbers; got one that holds {others[0]}", FLAT)
    if isinstance(rows, list):
        rows.append(MARK)
    grouped = groupby(enumerate(found), lambda pair: pair[1] - pair[0])
    runs = [[row for _, row in run] for _, run in grouped]
    words = (f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return "rows " + (" ".join(words) or "none at all")


def _marked(got: Sequence[Any], _need: Sequence[Any]) -> bool:
    """Return whether a list of an earlier call came again."""
    return any(str(MARK) in str(one).split() for one in got)


def _even_part(rank: int, p: int, heads: int, kv_heads: int, dim: int) -> Sequence[int]:
    n = (heads + 2 * kv_heads) * dim // p
    return range(rank * n, (rank + 1) * n)


def _dealt(rank: int, p: int, heads: int, kv_heads: int, dim: int) -> Sequence[int]:
    """Deal heads out in turn: heads rank, rank + p, rank + 2 p ... of each matrix."""
    starts = {0: heads, heads: kv_heads, heads + kv_heads: kv_heads}
    dealt = [start + head for start, num in starts.items() for head in range(rank, num, p)]
    return [head * dim + row for head in dealt for row in range(dim)]


KEPT = Cause(
    "The rows of an earlier call are still in it, with the -1 that its caller put behind them: "
    "return a new list in each call. A default argument `[]` is made once, and a cache keeps its "
    "lists."
)
EVEN = Cause(
    "That is one p-th of the tall matrix. Rank 0 gets no values that way: q, k and v lie below "
    "each other, so split each of the three."
)
DEALT = Cause("Heads were dealt out in turn: rank 0 takes the first heads, rank 1 the next.")
ROWS = Cause("A head has head_dim rows: multiply, wherever you count rows and not heads.")
FEWER = Cause("k and v have num_kv_heads heads each, which can be fewer than q has.")
QUERIES = Cause("Which of them are the rows of k, and of v?")
THREE = Cause("There are three matrices: where are the rows of v?")
ALL_KEYS = Cause(
    "That is all of k and v: a rank's queries read some of their heads only. Give it those, "
    "num_kv_heads // p of them."
)
KEYS_TWICE = Cause("k comes twice. Where does k start, and where does v? v lies under k.")
LIKE_THE_WHOLE = Cause("A rank's part is cut like the whole: all of q, then k, then v.")
MATRICES = "(num_heads, num_kv_heads, num_kv_heads)"
TAKE = "range(start + rank * n, start + (rank + 1) * n)"
RETURN = "return rows"

HEADS = Exercise(
    key="tensor_parallel-3",
    title="whole heads",
    check=Cases(
        cases=_cases,
        show=_runs,
        symptoms=((_marked, KEPT),),
        look=(
            "Write the tall matrix down: in which row do q, k and v start, how many heads of each "
            "does a rank take, and which rows are those?"
        ),
        success="Whole heads, queries beside their keys, in the order of the matrix.",
    ),
    wrong=(
        Own(_even_part, EVEN),
        Own(_dealt, DEALT),
        Edit("heads // p * head_dim", "heads // p", ROWS, also=(("heads * head_dim", "heads"),)),
        Edit("start += heads * head_dim", "start += heads", ROWS),
        Edit(MATRICES, "(num_heads, num_heads, num_heads)", FEWER),
        Edit(MATRICES, "(num_heads,)", QUERIES),
        Edit(MATRICES, "(num_heads, num_kv_heads)", THREE),
        Edit(
            RETURN,
            "first = num_heads * head_dim\n"
            "return [*rows[: first // p], *range(first, first + 2 * num_kv_heads * head_dim)]",
            ALL_KEYS,
        ),
        Edit("start += heads * head_dim", "start = num_heads * head_dim", KEYS_TWICE),
        Edit(f"rows += {TAKE}", f"rows.append({TAKE})", FLAT),
        Edit(RETURN, "n = num_heads // p * head_dim\nreturn rows[n:] + rows[:n]", LIKE_THE_WHOLE),
        Edit(
            "head_dim):", "head_dim, rows=[]):", KEPT, also=(("rows, start = [], 0", "start = 0"),)
        ),
    ),
)
