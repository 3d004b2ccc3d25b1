"""Exercise 6 of 06_ddp: read from a trace how much communication is exposed."""

from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

from course_lib.checks import traces
from course_lib.checks.cases import Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.core.records import COMMUNICATION_KINDS, COMPUTE_KINDS
from course_lib.core.trace_reading import communicating, computing, exposed_s

Trace = dict[str, Any]
TraceBox = dict[str, Any]
WAITS = Cause("Inside a box of computing, a wait is not computing.")
ALL = Cause("That is all communication: what runs beside computing is hidden.")
TWICE = Cause("Two transfers at the same time are exposed once: add up times, not transfers.")
ONLY_WAITS = Cause("A wait is no transfer: a rank can wait with none, and be idle without a wait.")
SOME_RANK = Cause("Only the boxes of this pid: other ranks compute at other times.")
MILLISECONDS = Cause("ts and dur are in microseconds; return seconds.")
STEPS = Cause("The box of a step lies around all of it: COMPUTE_KINDS names what computes.")
ONE_KIND = Cause("Not only all_reduce communicates: COMMUNICATION_KINDS has all of them.")
BACKWARD = Cause("Not only backward computes: COMPUTE_KINDS has all of them.")
LENGTHS = Cause("Not a difference of two sums: what counts is what happens at the same time.")
TAIL = Cause("Not only after the last computing: a transfer can be exposed before or between.")
STORAGE = Cause("Writing to storage is no communication between ranks.")
IDLE = Cause("Nothing computes there, but nothing is sent either: that is idle, not exposed.")
PARTLY = Cause("A transfer can be hidden in part: cut the time at every start and end.")
NESTED = Cause("Boxes nest: computing inside computing is hidden once, not twice.")
ROUNDED = Cause("Do not round: in a small model a transfer is shorter than a millisecond.")
WRITES = Cause("Writing to storage is not computing: COMPUTE_KINDS names what is.")
FRACTIONS = Cause("Times have fractions of a microsecond: keep them.")
NAMES = Cause("The kind is `cat`: the name is anything that somebody wrote.")
THREADS = Cause("Any thread can compute: the kind says so, not its number.")
EACH_KIND = Cause("A kind is missing: take COMMUNICATION_KINDS and COMPUTE_KINDS as they are.")
ANY_WAIT = Cause("Every wait inside a box of computing counts, also one at its very start.")
WAITS_TWICE = Cause("Waits overlap, too: what they share counts once.")
IN_STEPS = Cause("Not only inside the box of a step: some transfers lie outside.")
LAST_EDGE = Cause("The last stretch, up to the last edge, is missing.")
NO_BOXES = Cause("A rank may have no box at all: 0 seconds.")
NUMBER = Cause("Return one number, the seconds.")
UNCHANGED = Cause("The trace belongs to the caller: leave it as it is.")


def _boxes(trace: Trace, pid: int, kinds: Iterable[str]) -> list[dict[str, Any]]:
    boxes = [part for part in trace["traceEvents"] if part["ph"] == "X" and part["pid"] == pid]
    return [box for box in boxes if box["cat"] in kinds]


def _sum_us(trace: Trace, pid: int, kinds: Iterable[str]) -> float:
    return sum(box["dur"] for box in _boxes(trace, pid, kinds))


def _sum_of_transfers(trace: Trace, pid: int) -> float:
    return _sum_us(trace, pid, COMMUNICATION_KINDS) / 1e6


def _difference(trace: Trace, pid: int) -> float:
    sent, busy = (_sum_us(trace, pid, kinds) for kinds in (COMMUNICATION_KINDS, COMPUTE_KINDS))
    return max(0.0, sent - busy) / 1e6


def _of_waits(trace: Trace, pid: int) -> float:
    return _sum_us(trace, pid, ("wait",)) / 1e6


def _each_by_itself(trace: Trace, pid: int) -> float:
    busy = computing(trace, pid)
    return sum(_alone_us(box, busy) for box in _boxes(trace, pid, COMMUNICATION_KINDS)) / 1e6


def _alone_us(box: dict[str, Any], busy: list[tuple[float, float]]) -> float:
    start, end = box["ts"], box["ts"] + box["dur"]
    return float(end - start - sum(max(0.0, min(b, end) - max(a, start)) for a, b in busy))


def _nested_twice(trace: Trace, pid: int) -> float:
    busy = [(box["ts"], box["ts"] + box["dur"]) for box in _boxes(trace, pid, COMPUTE_KINDS)]
    return sum(_alone_us(box, busy) for box in _boxes(trace, pid, COMMUNICATION_KINDS)) / 1e6


def _whole_or_nothing(trace: Trace, pid: int) -> float:
    found = 0.0
    for box in _boxes(trace, pid, COMMUNICATION_KINDS):
        start, end = box["ts"], box["ts"] + box["dur"]
        beside = any(a < end and start < b for a, b in computing(trace, pid))
        found += 0.0 if beside else end - start
    return found / 1e6


def _after_the_last(trace: Trace, pid: int) -> float:
    compute_end = max((b for _, b in computing(trace, pid)), default=0.0)
    return sum(max(0.0, b - max(a, compute_end)) for a, b in communicating(trace, pid)) / 1e6


def _first_to_last(trace: Trace, pid: int) -> float:
    boxes = _boxes(trace, pid, (*COMMUNICATION_KINDS, *COMPUTE_KINDS))
    busy = sum(b - a for a, b in computing(trace, pid))
    first, last = min(one["ts"] for one in boxes), max(one["ts"] + one["dur"] for one in boxes)
    return (last - first - busy) / 1e6 if communicating(trace, pid) else 0.0


def _reading(change: Callable[[TraceBox], TraceBox]) -> Callable[[Trace, int], float]:
    """Return an answer that reads boxes wrongly: as `change` returns them."""

    def answer(trace: Trace, pid: int) -> float:
        boxes = [change(part) for part in trace["traceEvents"] if part["ph"] == "X"]
        return exposed_s({"traceEvents": boxes}, pid)

    answer.__name__ = change.__name__
    return answer


def _with_kinds(kind_of: Callable[[str], str]) -> Callable[[Trace, int], float]:
    """Return an answer that takes boxes of some kinds for boxes of others."""

    def change(box: TraceBox) -> TraceBox:
        return box | {"cat": kind_of(box["cat"])}

    change.__name__ = kind_of.__name__
    return _reading(change)


def _without(kind: str) -> Callable[[Trace, int], float]:
    """Return an answer that has forgotten a kind."""

    def kind_of(other: str) -> str:
        return "step" if other == kind else other

    kind_of.__name__ = f"without {kind}"
    return _with_kinds(kind_of)


def _whole_us(box: TraceBox) -> TraceBox:
    return box | {"ts": int(box["ts"]), "dur": int(box["dur"])}


def _by_name(box: TraceBox) -> TraceBox:
    return box | {"cat": box["name"].split()[0]}


def _thread_10_computes(box: TraceBox) -> TraceBox:
    elsewhere = box["cat"] in COMPUTE_KINDS and box["tid"] != 10
    return box | {"cat": "step"} if elsewhere else box


def _waits_strictly_inside(trace: Trace, pid: int) -> float:
    starts = {box["ts"] for box in _boxes(trace, pid, COMPUTE_KINDS)}
    boxes = [part for part in trace["traceEvents"] if part["ph"] == "X" and part["pid"] == pid]
    kept = [box for box in boxes if box["cat"] != "wait" or box["ts"] not in starts]
    return exposed_s({"traceEvents": kept}, pid)


def _each_wait(trace: Trace, pid: int) -> float:
    """Add what every wait takes from computing, of transfers alone."""
    boxes = [part for part in trace["traceEvents"] if part["ph"] == "X" and part["pid"] == pid]
    busy = {"traceEvents": [box for box in boxes if box["cat"] != "wait"]}
    found = exposed_s(busy, pid)
    for wait in _boxes(trace, pid, ("wait",)):
        found += exposed_s({"traceEvents": [*busy["traceEvents"], wait]}, pid) - exposed_s(
            busy, pid
        )
    return found


def _inside_steps(trace: Trace, pid: int) -> float:
    steps = _boxes(trace, pid, ("step",))
    if not steps:
        return 0.0
    first, last = steps[0]["ts"], steps[0]["ts"] + steps[0]["dur"]
    kept = []
    for part in trace["traceEvents"]:
        if part["ph"] == "X":
            start, end = max(first, part["ts"]), min(last, part["ts"] + part["dur"])
            kept.append(part | {"ts": start, "dur": max(0.0, end - start)})
    return exposed_s({"traceEvents": kept}, pid)


def _needs_boxes(trace: Trace, pid: int) -> float:
    max(part["ts"] for part in trace["traceEvents"] if part["pid"] == pid)
    return exposed_s(trace, pid)


def _in_a_list(trace: Trace, pid: int) -> list[float]:
    return [exposed_s(trace, pid)]


def _one_number(found: Any, *_arguments: Any) -> float:
    """Return the seconds as a float. Raises: CheckFailed for what is no single number."""
    one = found.item() if getattr(found, "ndim", None) == 0 else found
    if isinstance(one, Number) and not isinstance(one, bool):
        return float(one)  # type: ignore[arg-type]
    raise failed(f"need a number of seconds; got {found!r}", NUMBER)


def _steps_compute(kind: str) -> str:
    return "compute" if kind == "step" else kind


def _writes_compute(kind: str) -> str:
    return "compute" if kind == "write" else kind


def _writes_are_sent(kind: str) -> str:
    return "all_reduce" if kind == "write" else kind


def _only_backward(kind: str) -> str:
    return "step" if kind in COMPUTE_KINDS and kind != "backward" else kind


def _only_all_reduce(kind: str) -> str:
    return "step" if kind in COMMUNICATION_KINDS and kind != "all_reduce" else kind


RANK = ' and part["pid"] == pid'
COMPUTES = 'kinds & set(COMPUTE_KINDS) and "wait" not in kinds'

TRACE = Exercise(
    key="ddp-6",
    title="what a trace says is exposed",
    check=Cases(
        cases=traces.cases,
        drawn=traces.drawn,
        unit=" s",
        show=_one_number,
        look="Draw the boxes of this rank above one another, and cut the time at every edge.",
        success="Right for eighteen traces: hidden, exposed in part, nested, at the same time.",
        unchanged=UNCHANGED,
    ),
    wrong=(
        Edit(COMPUTES, "kinds & set(COMPUTE_KINDS)", WAITS),
        Edit(COMPUTES, "False", ALL),
        Edit(RANK, "", SOME_RANK),
        Edit("exposed / 1e6", "exposed / 1e3", MILLISECONDS),
        Edit("exposed / 1e6", "exposed", MILLISECONDS),
        Edit("exposed / 1e6", "round(exposed / 1e6, 3)", ROUNDED),
        Own(_sum_of_transfers, ALL),
        Own(_each_by_itself, TWICE),
        Own(_of_waits, ONLY_WAITS),
        Own(_difference, LENGTHS),
        Own(_after_the_last, TAIL),
        Own(_first_to_last, IDLE),
        Own(_whole_or_nothing, PARTLY),
        Own(_nested_twice, NESTED),
        Own(_with_kinds(_steps_compute), STEPS),
        Own(_with_kinds(_writes_compute), WRITES),
        Own(_with_kinds(_writes_are_sent), STORAGE),
        Own(_with_kinds(_only_backward), BACKWARD),
        Own(_with_kinds(_only_all_reduce), ONE_KIND),
        *(Own(_without(kind), EACH_KIND) for kind in (*COMMUNICATION_KINDS, *COMPUTE_KINDS)),
        Own(_reading(_whole_us), FRACTIONS),
        Own(_reading(_by_name), NAMES),
        Own(_reading(_thread_10_computes), THREADS),
        Own(_waits_strictly_inside, ANY_WAIT),
        Own(_each_wait, WAITS_TWICE),
        Own(_inside_steps, IN_STEPS),
        Own(_needs_boxes, NO_BOXES),
        Own(_in_a_list, NUMBER),
        Edit("exposed / 1e6", "exposed / 1e9", MILLISECONDS),
        Edit("exposed / 1e6", "round(exposed / 1e6, 6)", ROUNDED),
        Edit(RANK, ' and part["pid"] == 0', SOME_RANK),
        Edit("& set(COMMUNICATION_KINDS)", '& {*COMMUNICATION_KINDS, "wait"}', ONLY_WAITS),
        Edit("pairwise(edges)", "pairwise(edges[:-1])", LAST_EDGE),
    ),
)
