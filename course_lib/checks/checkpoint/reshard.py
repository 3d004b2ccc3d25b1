"""Exercise 2 of 14_checkpoint: what a rank reads of the files that other ranks wrote."""

from collections.abc import Sequence
from random import Random
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

Numbers = list[int]
FileBox = tuple[str, Numbers, Numbers]

NEGATIVE = Cause("Two negative sizes have a positive product: compare begin and end in each dim.")
EVERY_DIM = Cause("Rows are not enough: tensor parallelism splits columns. Compare every dim.")
UNCHANGED = Cause("The boxes belong to the caller: leave them as they are.")
ENDS = Cause("A box ends at its beginning plus its size, in each dim: offsets[d] + sizes[d].")
NO_DIMS = Cause("A number without dims is in each box of it: read it, with three empty lists.")
FOUR = Cause("Need a list of (file, begin in the saved box, begin in the wanted box, sizes).")


def _rows(counts: Sequence[int], *columns: int) -> list[FileBox]:
    """Return one saved box per rank: its rows, all columns."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [
        (f"r{rank}", [start, *(0 for _ in columns)], [count, *columns])
        for rank, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def _columns(rows: int, counts: Sequence[int]) -> list[FileBox]:
    return [
        (file, offsets[::-1], [rows, count])
        for (file, offsets, _), count in zip(_rows(counts, rows), counts, strict=True)
    ]


GRID: list[FileBox] = [
    (f"r{2 * i + j}", [3 * i, 2 * j], [3, 2 + j]) for i in range(2) for j in range(2)
]
EXPERTS: list[FileBox] = [("r0", [0, 0, 0], [2, 3, 5]), ("r1", [2, 0, 0], [2, 3, 5])]
DEEP: list[FileBox] = [("r0", [0, 0, 0], [4, 3, 2]), ("r1", [0, 0, 2], [4, 3, 3])]
FLAT: list[FileBox] = [  # a range of a flat parameter [4, 5], cut in the middle of rows
    ("r0", [0, 0], [1, 5]),
    ("r0", [1, 0], [1, 2]),
    ("r1", [1, 2], [1, 3]),
    ("r1", [2, 0], [1, 5]),
    ("r1", [3, 0], [1, 5]),
]


def _cases() -> list[Case]:
    return [
        ("8 rows of 4 ranks, rows 4 to 7", (_rows([2, 2, 2, 2]), ([4], [4]))),
        ("10 rows of 4 ranks, rows 0 to 4", (_rows([3, 3, 3, 1]), ([0], [5]))),
        ("10 rows of 4 ranks, rows 5 to 9", (_rows([3, 3, 3, 1]), ([5], [5]))),
        ("2 ranks to 4, rows 3 to 5 of 10", (_rows([5, 5]), ([3], [3]))),
        ("[6, 4] in rows, columns 1 and 2", (_rows([2, 2, 2], 4), ([0, 1], [6, 2]))),
        ("[5, 7] in columns, rows 2 to 4", (_columns(5, [3, 3, 1]), ([2, 0], [3, 7]))),
        ("[5, 7] in columns, columns 0 to 2", (_columns(5, [3, 3, 1]), ([1, 0], [4, 3]))),
        ("[6, 5] in a grid, its middle", (GRID, ([2, 1], [2, 3]))),
        ("[6, 5] in a grid, a corner", (GRID, ([0, 0], [2, 1]))),
        ("[4, 5] flat, columns 1 to 3", (FLAT, ([0, 1], [4, 3]))),
        ("[4, 3, 5] of experts, in the middle", (EXPERTS, ([1, 1, 2], [2, 2, 2]))),
        ("[4, 3, 5] by columns, the last two", (DEEP, ([1, 1, 3], [2, 2, 2]))),
        ("8 rows of 4 ranks, in no order", (_rows([2, 2, 2, 2])[::-1], ([3], [4]))),
        ("a rank without rows", (_rows([2, 2, 0], 3), ([1, 0], [3, 3]))),
        ("a number without dims", ([("r0", [], [])], ([], []))),
    ]


def _drawn(random: Random) -> list[Case]:
    found: list[Case] = []
    for _ in range(3):
        counts = [random.randint(0, 4) for _ in range(4)]
        first = random.randint(0, sum(counts))
        many = random.randint(0, sum(counts) - first)
        text = f"rows of 4 ranks, {many} from row {first} on"
        found.append((text, (_rows(counts, 3), ([first, 1], [many, 2]))))
    return found


def _shown(result: Any, *_arguments: Any) -> list[Any]:
    """Return the reads as lists, sorted: their order is free."""
    try:
        return sorted(
            [str(file), *([int(n) for n in numbers] for numbers in three)]
            for file, *three in [(file, a, b, c) for file, a, b, c in result]
        )
    except (TypeError, ValueError):
        raise failed(f"got {result!r}"[:200], FOUR) from None


TOUCH = Cause("Boxes that only touch share nothing: there is nothing to read.")
SOME_DIM = Cause("Boxes overlap if they do so in every dim, not in some.")
IN_FILE = Cause("Positions in a file count from the beginning of the saved box.")
IN_RANK = Cause("A rank holds only its own box: count from where the wanted box begins.")
NOT_ENDS = Cause("Those are the ends, not the sizes: subtract the beginnings.")
WHOLE_BOXES = Cause("You read whole boxes: read only the overlap, a rank has no room for more.")
EXCHANGED = Cause("Exchange the positions: first the one in the saved box, then in the wanted.")
LATER = Cause("An overlap begins at the later beginning of the two boxes.")
EARLIER = Cause("An overlap ends at the earlier end of the two boxes.")
SEVERAL = Cause("A wanted box may lie in several files: read from all of them.")

OVERLAP, SIZES = "all(map(lt, start, stop))", "list(map(sub, stop, start))"
OLD_ORDER, NEW_ORDER = "(file, list(in_file), list(in_rank)", "(file, list(in_rank), list(in_file)"
IMPORT = ("found = []", "from math import prod\nfound = []")

RESHARD = Exercise(
    key="checkpoint-2",
    title="what a rank reads",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=_shown,
        look="Draw both boxes on graph paper. Where does their overlap begin and end in each dim, "
        "and how far is that from where either box begins?",
        success="Right for rows, columns, grids, flat ranges and a scalar.",
        unchanged=UNCHANGED,
    ),
    wrong=(
        Edit(OVERLAP, "all(a <= b for a, b in zip(start, stop, strict=True))", TOUCH),
        Edit("if all(", "if not start or any(", SOME_DIM),
        Edit("list(in_file)", "start", IN_FILE),
        Edit("list(in_rank)", "start", IN_RANK),
        Edit(SIZES, "stop", NOT_ENDS),
        Edit(SIZES, "sizes", WHOLE_BOXES),
        Edit(OLD_ORDER, NEW_ORDER, EXCHANGED),
        Edit("map(max, offsets", "map(min, offsets", LATER),
        Edit("map(min, map(add", "map(max, map(add", EARLIER),
        Edit("return found", "return found[:1]", SEVERAL),
        Edit(OVERLAP, "not start or start[0] < stop[0]", EVERY_DIM),
        Edit("map(add, *wanted)", "wanted[1]", ENDS),
        Edit("map(add, offsets, sizes)", "sizes", ENDS),
        Edit("if all(", "if start and all(", NO_DIMS),
        Edit("found = []", "saved.sort()\nfound = []", UNCHANGED),
        Edit(OVERLAP, "prod(map(sub, stop, start)) > 0", NEGATIVE, also=(IMPORT,)),
    ),
)
