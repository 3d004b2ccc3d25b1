"""Exercise 4 of 11_mesh: find the axis that should not cross nodes, from the trace of a step."""

from dataclasses import replace
from random import Random

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.core import Event
from course_lib.mesh.mesh import Mesh

INSIDE = Cause("That axis stays inside nodes: its links are the fast ones. Count what crosses.")
MOST_CALLS = Cause("That axis calls most often: what counts is how long its calls take together.")
MOST_BYTES = Cause("That axis sends most bytes: small messages pay the latency, each one.")
LONGEST = Cause("That is the axis of the longest call: add up the calls of each axis.")
ALWAYS_TP = Cause("It is not always tp: read it from the events.")
FIRST = Cause("More than one axis crosses nodes: return the one that takes longest.")
NONE = Cause("Where every axis stays inside a node, no axis is misplaced: None.")
NEIGHBOURS = Cause("Compare all members of a group: its first two may be on one node.")
OTHER_RANKS = Cause("Rank 0's calls alone: the same call takes other ranks longer.")
ANY_AXIS = Cause("A mesh can have other axes, such as cp and ep: ask the mesh.")
MESSAGES = Cause("A message's group is its two ranks: mesh.axis_of says along which axis they are.")
SHORT = Cause("Many calls are shorter than a millisecond: add up first, and do not round.")
OWN_GROUP = Cause("Another group of that axis leaves its node: rank 0's does not.")
OF_NO_AXIS = Cause("A call over several axes is of no axis: mesh.axis_of(group) is None, skip it.")
UNCHANGED = Cause("The events belong to the caller: leave them as they are.")

# name of axis -> (number of calls, seconds of each, bytes of each)
Calls = dict[str, tuple[int, float, int]]


def _events(mesh: Mesh, calls: Calls, busy_s: float = 0.0, gap_s: float = 0.0) -> list[Event]:
    """Return the events of all ranks: each makes these calls, other ranks take longer.

    gap_s   of computing between two calls
    """
    found = []
    for rank in range(mesh.world_size):
        at_s = 0.0
        if busy_s:
            found.append(Event(rank=rank, kind="backward", start_s=0.0, end_s=busy_s))
        for axis, (count, seconds, size) in calls.items():
            group = tuple(mesh.group(rank, axis)) if axis in mesh.sizes else ()
            if axis == "world":
                group = tuple(range(mesh.world_size))
            if axis == "pp" and len(group) > 2:  # a message's group is its two ranks
                at = min(group.index(rank), len(group) - 2)
                group = group[at : at + 2]
            longer = 1 if rank == 0 else 30 if axis == "pp" else 2 + (rank == 1)
            for _ in range(count if len(group) > 1 else 0):
                kind, end_s = "send" if axis == "pp" else "all_reduce", at_s + longer * seconds
                told = Event(rank=rank, kind=kind, start_s=at_s, end_s=end_s, group=group)
                found.append(replace(told, num_bytes=size))
                at_s = end_s + gap_s
    return found


def _case(text: str, mesh: Mesh, calls: Calls, ranks_per_node: int, *times_s: float) -> Case:
    events = _events(mesh, calls, *times_s)
    return f"{text}: {mesh}, {ranks_per_node} ranks per node", (mesh, events, ranks_per_node)


def _cases() -> list[Case]:
    ms = 1e-3
    usual: Calls = {"tp": (40, ms, 4000), "pp": (8, ms, 4000), "dp": (1, 9 * ms, 400_000)}
    of_all: Calls = {**usual, "world": (1, 99 * ms, 9)}
    outer, inner = Mesh(tp=2, dp=2, pp=2), Mesh(pp=2, dp=2, tp=2)
    return [
        _case("tp is outermost", outer, usual, 4),
        _case("tp is innermost", inner, of_all, 4),
        _case("one rank a node", inner, {**usual, "dp": (1, 90 * ms, 400_000)}, 1),
        _case("dp and pp cross", inner, of_all, 2),
        _case("dp is slow", inner, {**usual, "dp": (2, 30 * ms, 4_000)}, 2),
        _case("many messages", inner, {**usual, "pp": (50, ms, 10)}, 2),
        _case("one long call", inner, {**usual, "pp": (20, 2 * ms, 10)}, 2, 0.5),
        _case("one node", inner, usual, 8),
        _case("four along tp", Mesh(dp=2, tp=4), {"tp": (9, ms, 9), "dp": (1, 3 * ms, 99)}, 2),
        _case("an axis of one", Mesh(tp=2, pp=1, dp=3), usual, 3),
        _case("dp outermost", Mesh(dp=2, pp=2, tp=2), {**usual, "pp": (5, ms, 9)}, 4),
        _case("short calls", inner, {"pp": (100, 0.4 * ms, 9), "dp": (1, 9 * ms, 9)}, 2),
        _case("computing between", inner, {"pp": (2, ms, 9), "dp": (1, 9 * ms, 9)}, 2, 0, 0.1),
        _case("another axis", Mesh(cp=2, tp=2), {"cp": (3, ms, 9), "tp": (9, ms, 9)}, 2),
        _case("other groups cross", Mesh(dp=4, tp=2), {"tp": (9, ms, 9), "dp": (3, ms, 9)}, 3),
        _case("four stages", Mesh(pp=4, tp=2), {"tp": (40, ms, 9), "pp": (8, ms, 9)}, 2),
        _case("two stages a node", Mesh(dp=2, pp=4), {"pp": (90, ms, 9), "dp": (8, ms, 9)}, 2),
    ]


def _drawn(random: Random) -> list[Case]:
    found = []
    for _ in range(2):
        names = random.sample(("pp", "dp", "tp"), 3)
        mesh = Mesh(**dict.fromkeys(names, 2))
        counts = random.sample(range(5, 60), 3)
        calls = {
            name: (count, random.choice((1e-3, 4e-3)) + count * 1e-6, random.randrange(10**5))
            for name, count in zip(names, counts, strict=True)
        }
        found.append(_case("drawn", mesh, calls, 2))
    return found


ADDS = "seconds.get(axis, 0.0) + event.duration_s"
CROSSES, RETURNS = "len(nodes) > 1", "max(seconds, key=seconds.get, default=None)"

MISPLACED = Exercise(
    key="mesh-4",
    title="find the axis that waits longest between nodes",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        look="Take rank 0's calls, sort them by group, and ask of each group which nodes it is on.",
        success="Found in seventeen traces, also where no axis leaves its node.",
        unchanged=UNCHANGED,
    ),
    wrong=(
        Edit(CROSSES, "len(event.group) > 1", INSIDE),
        Edit(ADDS, "seconds.get(axis, 0) + 1", MOST_CALLS),
        Edit(ADDS, "seconds.get(axis, 0) + event.num_bytes", MOST_BYTES),
        Edit(" and axis and ", " and ", OF_NO_AXIS),
        Edit(ADDS, "max(seconds.get(axis, 0.0), event.duration_s)", LONGEST),
        Edit("default=None", 'default="tp"', NONE),
        Edit(
            CROSSES,
            "event.group[0] // ranks_per_node != event.group[1] // ranks_per_node",
            NEIGHBOURS,
        ),
        Edit(RETURNS, '"tp" if seconds else None', ALWAYS_TP),
        Edit(RETURNS, "next((a for a in mesh.sizes if a in seconds), None)", FIRST),
        Edit("event.rank == 0", "0 in event.group", OTHER_RANKS),
        Edit("axis and len", 'axis in ("pp", "dp", "tp") and len', ANY_AXIS),
        Edit(CROSSES, f"{CROSSES} and event.group == tuple(mesh.group(0, axis))", MESSAGES),
        Edit(ADDS, ADDS.replace("event.duration_s", "round(event.duration_s, 3)"), SHORT),
        Edit(CROSSES, "mesh.crosses_nodes(axis, ranks_per_node)", OWN_GROUP),
    ),
)
