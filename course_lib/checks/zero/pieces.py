"""Exercise 1 of 09_zero: the pieces of each tensor in a rank's shard."""

from operator import index
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

SIZES = (
    (5, 1, 7),
    (7, 1, 5),
    (4, 4),
    (2, 3, 1, 8, 6),
    (3,),
    (1, 1),
    (4, 0, 3),
    (0, 5),
    (2,) * 9,
    (0,),
)

CALLERS = Cause("The list of sizes belongs to the caller: read it, or copy it first.")
WHOLE_NUMBERS = Cause(
    "A piece is a tuple of three whole numbers, (index, start, stop). The length of a shard is "
    "rounded up, so that no piece begins between two numbers."
)


def _cases() -> list[Case]:
    return [
        (
            f"tensors of {', '.join(map(str, sizes))} numbers, rank {rank} of {p}",
            ([*sizes], p, rank),
        )
        for sizes in SIZES
        for p in (3, 2, 4, 1, 7)
        for rank in range(p)
    ]


def _read(pieces: Any, sizes: list[int], *_: int) -> list[tuple[int, int, int]]:
    if tuple(sizes) not in SIZES:
        raise failed(f"sizes is now {sizes}", CALLERS)
    try:
        return [(index(which), index(start), index(stop)) for which, start, stop in pieces]
    except (TypeError, ValueError):
        raise failed(f"need a list of tuples; got {pieces!r}", WHOLE_NUMBERS) from None


LENGTH = "-(-sum(sizes) // p)"
LOOP = "for index, size in enumerate(sizes):"
BOUNDS = "max(rank * n, begin), min((rank + 1) * n, begin + size)"
PIECE = "(index, first - begin, last - begin)"

PIECES = Exercise(
    key="zero-1",
    title="the pieces of a shard",
    check=Cases(
        cases=_cases,
        show=_read,
        look="Draw the flat parameter: where do each tensor and the shard begin and end?",
        success="Equal shards: each number has one owner, also with fewer numbers than ranks.",
    ),
    wrong=(
        Edit(
            LENGTH,
            "sum(sizes) // p",
            Cause(
                "Rounded down: the numbers left over at the end have no owner, and would never be "
                "trained. A shard is ceil(numel / p) long."
            ),
        ),
        Edit(
            LENGTH,
            "sum(sizes) // p\nrest = sum(sizes) % p",
            Cause(
                "The first ranks have one number more, but collectives need equal shards. Round up "
                "on every rank; the last shard is filled up with zeros."
            ),
            also=(
                (LOOP, f"low = rank * n + min(rank, rest)\n{LOOP}"),
                (BOUNDS, "max(low, begin), min(low + n + (rank < rest), begin + size)"),
            ),
        ),
        Edit(
            LENGTH,
            "sum(sizes) // p + 1",
            Cause("One too long where the ranks share the numbers evenly: ceil(numel / p)."),
        ),
        Edit(LENGTH, "sum(sizes) / p", WHOLE_NUMBERS),
        Edit(
            PIECE,
            "(index, first, last)",
            Cause("Those are indices into the flat parameter: count from where the tensor begins."),
        ),
        Edit(
            PIECE,
            "(index, first - rank * n, last - rank * n)",
            Cause("Those are places in the shard: count from where the tensor begins."),
        ),
        Edit(
            PIECE,
            "(index, 0, last - first)",
            Cause(
                "Every piece begins at 0, but the part of its tensor that earlier ranks own comes "
                "before it."
            ),
        ),
        Edit(
            "begin += size",
            "pass",
            Cause("begin is still 0 for every tensor: after each one, add its size."),
        ),
        Edit(
            PIECE,
            "(index, first - begin, last - first)",
            Cause("The third number is where the piece stops, not how long it is."),
        ),
        Edit(
            PIECE,
            "(index, first - begin, last - begin - 1)",
            Cause("stop is one past the last number, as in a slice."),
        ),
        Edit(
            "first < last",
            "first <= last",
            Cause("There is an empty piece: leave out tensors that do not overlap with the shard."),
        ),
        Edit(
            "enumerate(sizes)",
            "enumerate([*sizes[:-1], *(size + -sum(sizes) % p for size in sizes[-1:])])",
            Cause(
                "The padding at the end belongs to no tensor: the last piece stops where its "
                "tensor does."
            ),
        ),
        Edit(
            "first < last",
            "rank * n <= begin < (rank + 1) * n and size",
            Cause(
                "Those are whole tensors, so ranks own unequal parts: where a shard begins has "
                "nothing to do with where a tensor begins."
            ),
            also=((PIECE, "(index, 0, size)"),),
        ),
        Edit(
            LOOP,
            f"{LOOP}\n    n, begin = -(-size // p), 0",
            Cause(
                "Each tensor is cut by itself; here the flat parameter of all tensors is cut, once."
            ),
        ),
        Edit(
            LENGTH,
            f"{LENGTH}\nkey, known = f'{{sum(sizes)}} {{p}} {{rank}}', vars(pieces_of)\n"
            "if key in known:\n    return known[key]\nknown[key] = pieces",
            Cause("Those are the pieces of other sizes: what you keep from call to call is stale."),
        ),
        Edit(LOOP, "for index in range(len(sizes)):\n    size = sizes.pop(0)", CALLERS),
    ),
)
