"""Exercise 1 of 11_mesh: the group of a rank along an axis, from the sizes of the axes."""

from random import Random
from typing import Any

from course_lib.checks.cases import BORROWED, Case, Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.mesh.mesh import AXES, Mesh

Sizes = dict[str, int]

INNERMOST = Cause("The last axis is innermost: its neighbours have consecutive ranks.")
OWN_SIZE = Cause("A stride is the product of the sizes further in: its own size is not in it.")
BEFORE = Cause("The group has ranks before this one, too: begin where its coordinate is 0.")
OTHERS = Cause("Set only this axis's coordinate to 0: those further in stay as they are.")
CONSECUTIVE = Cause("Consecutive ranks are the innermost axis's groups: go on by the stride.")
TWO = Cause("An axis may have any size: 1, 3, 4.")
OF_RANK_0 = Cause("That is the group of rank 0 for every rank: where does this rank's begin?")
ITSELF = Cause("A rank is a member of its own group.")
FLIPPED = Cause("Flipping a bit works for axes of 2 only: count through the whole axis.")
RANKS = Cause("Need a list of ranks.")
UNCHANGED = Cause("The sizes belong to the caller: leave them as they are.")


def _case(sizes: Sizes, rank: int, axis: str) -> Case:
    text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{text}: rank {rank} along {axis}", (sizes, rank, axis)


def _cases() -> list[Case]:
    three = {"pp": 2, "dp": 3, "tp": 4}
    places = [(three, 17, axis) for axis in three] + [(three, 0, "dp"), (three, 23, "pp")]
    places += [({"pp": 2, "dp": 2, "tp": 2}, 5, axis) for axis in three]
    places += [({"tp": 3, "dp": 2, "pp": 2}, 7, axis) for axis in ("tp", "dp", "pp")]
    places += [({"pp": 3, "dp": 2, "tp": 4}, 17, axis) for axis in three]  # the same names
    five = {"dp": 2, "pp": 1, "cp": 3, "ep": 2, "tp": 2}
    places += [(five, 13, axis) for axis in five]
    places += [({"pp": 2, "dp": 3, "tp": 1}, 4, axis) for axis in three]
    places += [({"dp": 6}, 4, "dp"), ({"dp": 1, "tp": 1}, 0, "tp")]
    return [_case(dict(sizes), rank, axis) for sizes, rank, axis in places]


def _drawn(random: Random) -> list[Case]:
    found = []
    for _ in range(3):
        names = random.sample(AXES, 3)
        sizes = {name: random.randint(1, 4) for name in names}
        world_size = sizes[names[0]] * sizes[names[1]] * sizes[names[2]]
        found.append(_case(sizes, random.randrange(world_size), random.choice(names)))
    return found


def _sorted(result: Any, *_arguments: Any) -> list[int]:
    """Return the ranks in order: the exercise leaves it free."""
    try:
        return sorted(int(rank) for rank in result)
    except (TypeError, ValueError):
        raise failed(f"got {result!r}"[:200], RANKS) from None


MEMBERS = "[first + n * stride for n in range(sizes[axis])]"
FIRST, STEP = "rank - rank // stride % sizes[axis] * stride", "first + n * stride"

GROUPS = Exercise(
    key="mesh-1",
    title="coordinates and groups",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=_sorted,
        look="Write the ranks of 2 x 3 into a table, row by row, and read a column.",
        success="Right for 1, 2, 3 and 5 axes of up to 6 ranks.",
        unchanged=UNCHANGED,
        library=(Mesh.__init__,),
    ),
    wrong=(
        Edit("reversed(sizes)", "sizes", INNERMOST),
        Edit(
            "if inner == axis:",
            "stride *= sizes[inner]\nif inner == axis:",
            OWN_SIZE,
            also=(("        stride *= sizes[inner]\n    first", "    first"),),
        ),
        Edit(FIRST, "rank", BEFORE),
        Edit(FIRST, "rank // stride // sizes[axis] * sizes[axis] * stride", OTHERS),
        Edit(STEP, "first + n", CONSECUTIVE),
        Edit("range(sizes[axis])", "range(2)", TWO),
        Edit(FIRST, "0", OF_RANK_0),
        Edit("range(sizes[axis])]", "range(sizes[axis]) if first + n * stride != rank]", ITSELF),
        Edit(MEMBERS, "[rank, rank ^ stride]", FLIPPED),
        Edit("return [", "sizes[axis] = sizes.pop(axis)\nreturn [", UNCHANGED),
        Own(lambda sizes, rank, axis: Mesh(**sizes).group(rank, axis), BORROWED),
    ),
)
