"""Exercise 4 of 11_mesh: find the axis that should not cross nodes, from the trace of a step."""

from collections.abc import Callable, Sequence
from random import Random

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit, Own
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
BETWEEN = Cause("Between the first call and the last there is computing, too: add up the calls.")
OWN_GROUP = Cause("Another group of that axis leaves its node: rank 0's does not.")
OF_SIZE = Cause("Groups of one size are not one group: compare the members.")
OF_NO_AXIS = Cause("A call over several axes is of no axis: mesh.axis_of(group) is None, skip it.")
UNCHANGED = Cause("The events belong to the caller: leave them as they are.")

# name of axis -> (number of calls, seconds of each, bytes of each)
Calls = dict[str, tuple[int, float, int]]


def _events(mesh: Mesh, calls: Calls, busy_s: float, gap_s: float) -> list[Event]:
    """Return the events of all ranks: each makes these calls, other ranks take longer.

    gap_s   of computing between two calls
    """
    found = []
    for rank in range(mesh.world_size):
        at_s = 0.0
        if busy_s:
            found.append(Event(rank=rank, kind="backward", start_s=0.0, end_s=busy_s))
        for axis, (count, seconds, num_bytes) in calls.items():
            group = tuple(mesh.group(rank, axis)) if axis in mesh.sizes else ()
            if axis == "world":
                group = tuple(range(mesh.world_size))
            if axis == "pp" and len(group) > 2:  # a message's group is its two ranks
                at = min(group.index(rank), len(group) - 2)
                group = group[at : at + 2]
            longer = 1 if rank == 0 else 30 if axis == "pp" else 2 + (rank == 1)
            for _ in range(count if len(group) > 1 else 0):
                kind, end_s = "send" if axis == "pp" else "all_reduce", at_s + longer * seconds
                event = Event(rank=rank, kind=kind, start_s=at_s, end_s=end_s, group=group,
                              num_bytes=num_bytes)  # fmt: skip
                found.append(event)
                at_s = end_s + gap_s
    return found


def _case(
    text: str,
    mesh: Mesh,
    calls: Calls,
    ranks_per_node: int,
    busy_s: float = 0.0,
    gap_s: float = 0.0,
) -> Case:
    events = _events(mesh, calls, busy_s, gap_s)
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


def _crosses(mesh: Mesh, axis: str, ranks_per_node: int) -> bool:
    return len({rank // ranks_per_node for rank in mesh.group(0, axis)}) > 1


def _chosen(mesh: Mesh, ranks_per_node: int, scores: dict[str, float]) -> str | None:
    crossing = [a for a in mesh.sizes if scores[a] and _crosses(mesh, a, ranks_per_node)]
    return max(crossing, key=scores.__getitem__, default=None)


def _of_rank_0(mesh: Mesh, events: Sequence[Event], axis: str) -> list[Event]:
    return [one for one in events if one.rank == 0 and mesh.axis_of(one.group) == axis]


def _longest(
    mesh: Mesh,
    events: Sequence[Event],
    ranks_per_node: int,
    *,
    counts: Callable[[Event, str], bool] = lambda event, axis: event.rank == 0,
    seconds_of: Callable[[Event], float] = lambda event: event.duration_s,
) -> str | None:
    """Return the axis that takes longest across nodes, of the calls that count."""
    seconds: dict[str, float] = {}
    for event in events:
        axis = mesh.axis_of(event.group)
        crosses = len({rank // ranks_per_node for rank in event.group}) > 1
        if axis and crosses and counts(event, axis):
            seconds[axis] = seconds.get(axis, 0.0) + seconds_of(event)
    return max(seconds, key=seconds.__getitem__, default=None)


def _every_rank(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    return _longest(mesh, events, ranks_per_node, counts=lambda event, axis: 0 in event.group)


def _three_axes(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    def counts(event: Event, axis: str) -> bool:
        return event.rank == 0 and axis in ("pp", "dp", "tp")

    return _longest(mesh, events, ranks_per_node, counts=counts)


def _whole_groups(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    def counts(event: Event, axis: str) -> bool:
        return event.rank == 0 and event.group == tuple(mesh.group(0, axis))

    return _longest(mesh, events, ranks_per_node, counts=counts)


def _rounded(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    def seconds_of(event: Event) -> float:
        return round(event.duration_s, 3)

    return _longest(mesh, events, ranks_per_node, seconds_of=seconds_of)


def _extent(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    spans = dict.fromkeys(mesh.sizes, 0.0)
    for axis in spans:
        if own := _of_rank_0(mesh, events, axis):
            spans[axis] = max(e.end_s for e in own) - min(e.start_s for e in own)
    return _chosen(mesh, ranks_per_node, spans)


def _any_group(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    seconds = {
        axis: sum(e.duration_s for e in _of_rank_0(mesh, events, axis)) for axis in mesh.sizes
    }
    crossing = [a for a in mesh.sizes if seconds[a] and mesh.crosses_nodes(a, ranks_per_node)]
    return max(crossing, key=seconds.__getitem__, default=None)


def _most_calls(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    counts = {axis: float(len(_of_rank_0(mesh, events, axis))) for axis in mesh.sizes}
    return _chosen(mesh, ranks_per_node, counts)


def _always_tp(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    return "tp" if _most_calls(mesh, events, ranks_per_node) else None


def _first(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    return next((axis for axis in mesh.sizes if _crosses(mesh, axis, ranks_per_node)), None)


def _by_size(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    seconds = {
        axis: sum(e.duration_s for e in events if e.rank == 0 and len(e.group) == size)
        for axis, size in mesh.sizes.items()
    }
    return _chosen(mesh, ranks_per_node, seconds)


def _all_that_crosses(mesh: Mesh, events: Sequence[Event], ranks_per_node: int) -> str | None:
    """Add up the calls of every rank, so a rank that waits longer decides."""
    seconds = dict.fromkeys(mesh.sizes, 0.0)
    for event in events:
        for axis in mesh.sizes:
            if mesh.axis_of(event.group) == axis:
                seconds[axis] += event.duration_s
    return max(seconds, key=seconds.__getitem__)


ADDS = "seconds.get(axis, 0.0) + event.duration_s"
CROSSES = "len(nodes) > 1"

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
        Edit(CROSSES, "event.group[0] // ranks_per_node != event.group[1] // ranks_per_node",
             NEIGHBOURS),
        Own(_always_tp, ALWAYS_TP),
        Own(_first, FIRST),
        Own(_by_size, OF_SIZE),
        Own(_all_that_crosses, INSIDE),
        Own(_every_rank, OTHER_RANKS),
        Own(_three_axes, ANY_AXIS),
        Own(_whole_groups, MESSAGES),
        Own(_rounded, SHORT),
        Own(_extent, BETWEEN),
        Own(_any_group, OWN_GROUP),
    ),
)  # fmt: skip
