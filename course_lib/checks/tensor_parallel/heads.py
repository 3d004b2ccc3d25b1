"""Exercise 3 of 07_tensor_parallel: whole attention heads for every rank."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from course_lib.checks.cases import A_FLOAT, Case, Cases, whole
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
    runs = list[list[int]]()
    for number in numbers:
        row = whole(number)
        if not isinstance(row, int):
            raise failed(f"need a list of row numbers; got one that holds {number!r}", FLAT)
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    if isinstance(rows, list):
        rows.append(MARK)
    words = (f"{first}-{last}" if first < last else f"{first}" for first, last in runs)
    return "rows " + (" ".join(words) or "none at all")


def _marked(got: Sequence[Any], _need: Sequence[Any]) -> bool:
    """Return whether a list of an earlier call came again."""
    return any(str(MARK) in str(one).split() for one in got)


def _every_pth(rank: int, p: int, heads: int, kv_heads: int, dim: int) -> Sequence[int]:
    return range(rank, (heads + 2 * kv_heads) * dim, p)


def _even_part(rank: int, p: int, heads: int, kv_heads: int, dim: int) -> Sequence[int]:
    n = (heads + 2 * kv_heads) * dim // p
    return range(rank * n, (rank + 1) * n)


def _dealt(rank: int, p: int, *sizes: int, of_q_only: bool = False) -> Sequence[int]:
    """Deal heads out in turn: heads rank, rank + p, rank + 2 p ... of q, k and v, or of q only."""
    heads, kv_heads, dim = sizes
    rows, start = list[int](), 0
    for matrix, num in enumerate((heads, kv_heads, kv_heads)):
        first = rank * (num // p)
        block = matrix > 0 and of_q_only
        mine = range(first, first + num // p) if block else range(rank, num, p)
        rows += [start + head * dim + i for head in mine for i in range(dim)]
        start += num * dim
    return rows


def _queries_dealt(rank: int, p: int, *sizes: int) -> Sequence[int]:
    return _dealt(rank, p, *sizes, of_q_only=True)


KEPT = Cause(
    "The rows of an earlier call are still in it, with the -1 that its caller put behind them: "
    "return a new list in each call. A default argument `[]` is made once, and a cache keeps its "
    "lists."
)
NARROW = Cause("int16 ends at 32,767: a wide layer has more rows, count them with int of Python.")
SPLIT = Cause("The softmax needs whole dot products, so a head stays on one rank, all its rows.")
EVEN = Cause(
    "That is one p-th of the tall matrix. Rank 0 gets no values that way: q, k and v lie below "
    "each other, so split each of the three."
)
ROWS = Cause("A head has head_dim rows: multiply, wherever you count rows and not heads.")
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
        Own(_every_pth, SPLIT),
        Edit("heads // p * head_dim", "heads // p", ROWS, also=(("heads * head_dim", "heads"),)),
        Edit("start += heads * head_dim", "start += heads", ROWS),
        Edit("n = heads // p * head_dim", "n = heads // p", ROWS),
        Edit(
            MATRICES,
            "(num_heads, num_heads, num_heads)",
            Cause("k and v have num_kv_heads heads each, which can be fewer than q has."),
        ),
        Edit(MATRICES, "(num_heads,)", Cause("Which of them are the rows of k, and of v?")),
        Edit(
            MATRICES,
            "(num_heads, num_kv_heads)",
            Cause("There are three matrices: where are the rows of v?"),
        ),
        Edit(
            RETURN,
            "first = num_heads * head_dim\n"
            "return [*rows[: first // p], *range(first, first + 2 * num_kv_heads * head_dim)]",
            Cause(
                "That is all of k and v: a rank's queries read some of their heads only. Give it "
                "those, num_kv_heads // p of them."
            ),
        ),
        Edit(
            "start += heads * head_dim",
            "start = num_heads * head_dim",
            Cause("k comes twice. Where does k start, and where does v? v lies under k."),
        ),
        Edit(f"rows += {TAKE}", f"rows.append({TAKE})", FLAT),
        Edit(
            "n = heads // p",
            "n = heads / p",
            A_FLOAT,
            also=((TAKE, TAKE.replace("range", "torch.arange")),),
        ),
        Own(
            _queries_dealt,
            Cause(
                "Neighbouring queries share a key: give each rank neighbouring heads of all three, "
                "so that a query finds its key on its own rank."
            ),
        ),
        Own(
            _dealt,
            Cause("Heads were dealt out in turn: rank 0 takes the first heads, rank 1 the next."),
        ),
        Edit(
            RETURN,
            "n = num_heads // p * head_dim\nreturn rows[n:] + rows[:n]",
            Cause("A rank's part is cut like the whole: all of q, then k, then v."),
        ),
        Edit(
            RETURN,
            "return sorted(rows, key=lambda row: row % head_dim)",
            Cause("Keep the rows of a head together, in their order."),
        ),
        Edit(
            "head_dim):", "head_dim, rows=[]):", KEPT, also=(("rows, start = [], 0", "start = 0"),)
        ),
        Edit(
            "def rows_of_rank(",
            "from functools import cache\n\n\n@cache\ndef rows_of_rank(",
            KEPT,
        ),
        Edit(RETURN, "return torch.tensor(rows).to(torch.int16)", NARROW),
        Edit(
            TAKE,
            "range(start + (p - 1 - rank) * n, start + (p - rank) * n)",
            Cause("Backwards: rank 0 takes the first heads, the last rank the last ones."),
        ),
    ),
)
