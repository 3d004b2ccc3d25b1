"""Exercise 6 of 06_ddp: read from a trace how much communication is exposed."""

from collections.abc import Sequence
from numbers import Number
from typing import Any

from course_lib.checks import traces
from course_lib.checks.cases import Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.properties import COUNTS, IN_A_LIST, ROUNDED
from course_lib.core.records import COMMUNICATION_KINDS, COMPUTE_KINDS
from course_lib.core.trace_reading import computing

WAITS = Cause("Inside a box of computing, a wait is not computing.")
ALL = Cause("That is all communication: what runs beside computing is hidden.")
TWICE = Cause("Two transfers at the same time are exposed once: add up times, not transfers.")
ONLY_WAITS = Cause("A wait is no transfer: a rank can wait with none, and be idle without a wait.")
SOME_RANK = Cause("Only the boxes of this pid: other ranks compute at other times.")
MILLISECONDS = Cause("ts and dur are in microseconds; return seconds.")
STEPS = Cause("The box of a step lies around all of it: COMPUTE_KINDS names what computes.")
KINDS = Cause("A kind is missing: take COMMUNICATION_KINDS and COMPUTE_KINDS as they are.")
LENGTHS = Cause("Not a difference of two sums: what counts is what happens at the same time.")
TAIL = Cause("Not only after the last computing: a transfer can be exposed before or between.")
STORAGE = Cause("Writing to storage is neither computing nor communication between ranks.")
NESTED = Cause("Boxes nest: computing inside computing hides a transfer once, not twice.")
PARTLY = Cause("A transfer can be hidden in part: cut the time at every start and end.")
NAMES = Cause("The kind is `cat`: the name is anything that somebody wrote.")
IDLE = Cause("Nothing computes there, but nothing is sent either: that is idle, not exposed.")
LAST_EDGE = Cause("The last stretch, up to the last edge, is missing.")
NUMBER = Cause("Return one number, the seconds.")
UNCHANGED = Cause("The trace belongs to the caller: leave it as it is.")


def _one_number(found: Any, *_arguments: Any) -> float:
    """Return the seconds as a float. Raises: CheckFailed for what is no single number."""
    one = found.item() if getattr(found, "ndim", None) == 0 else found
    if isinstance(one, Number) and not isinstance(one, bool):
        return float(one)  # type: ignore[arg-type]
    raise failed(f"need a number of seconds; got {found!r}", NUMBER)


Span = tuple[float, float]


def _box_by_box(trace: Any, pid: int, busy: Sequence[Span], in_part: bool) -> float:
    """Take from each transfer what is computed beside it, or all of it."""
    found = 0.0
    for box in _boxes(trace, pid, COMMUNICATION_KINDS):
        start, end = box["ts"], box["ts"] + box["dur"]
        beside = [min(b, end) - max(a, start) for a, b in busy if a < end and start < b]
        found += end - start - sum(beside) if in_part else 0.0 if beside else end - start
    return found / 1e6


def _boxes(trace: Any, pid: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    boxes = (part for part in trace["traceEvents"] if part["ph"] == "X" and part["pid"] == pid)
    return [box for box in boxes if box["cat"] in kinds]


def _nested_twice(trace: Any, pid: int) -> float:
    busy = [(box["ts"], box["ts"] + box["dur"]) for box in _boxes(trace, pid, COMPUTE_KINDS)]
    return _box_by_box(trace, pid, busy, True)


def _whole_or_nothing(trace: Any, pid: int) -> float:
    return _box_by_box(trace, pid, computing(trace, pid), False)


def _sum_of(kinds: str) -> str:
    return f'sum(box["dur"] for box in boxes if box["cat"] in {kinds}) / 1e6'


def _without(kinds: str, names: Sequence[str]) -> list[Edit]:
    """Return answers that have forgotten one of the kinds."""
    given = f"set({kinds})"
    return [Edit(given, f'({given} - {{"{name}"}})', KINDS) for name in names]


RANK = ' and part["pid"] == pid'
COMPUTES = 'kinds & set(COMPUTE_KINDS) and "wait" not in kinds'
EXPOSED, SENDS = "exposed += end - start", "kinds & set(COMMUNICATION_KINDS) and not computes"
LAST_COMPUTE = 'max((b["ts"] + b["dur"] for b in boxes if b["cat"] in COMPUTE_KINDS), default=0.0)'
SIGN = '((box["cat"] in COMMUNICATION_KINDS) - (box["cat"] in COMPUTE_KINDS))'

TRACE = Exercise(
    key="ddp-6",
    title="what a trace says is exposed",
    check=Cases(
        cases=traces.cases,
        drawn=traces.drawn,
        unit=" s",
        show=_one_number,
        look="Draw the boxes of this rank above one another, and cut the time at every edge.",
        success="Right for nineteen traces: hidden, exposed in part, nested, at the same time.",
        unchanged=UNCHANGED,
    ),
    wrong=(
        Edit(COMPUTES, "kinds & set(COMPUTE_KINDS)", WAITS),
        Edit(COMPUTES, "False", ALL),
        Edit(RANK, "", SOME_RANK),
        Edit("exposed / 1e6", "exposed / 1e3", MILLISECONDS),
        Edit("exposed / 1e6", "exposed", MILLISECONDS),
        Edit(
            EXPOSED,
            'exposed += (end - start) * sum(box["cat"] in COMMUNICATION_KINDS for box in around)',
            TWICE,
        ),
        Edit("exposed / 1e6", "exposed / 1e9", MILLISECONDS),
        Edit("exposed / 1e6", "round(exposed / 1e6, 6)", ROUNDED),
        Edit(RANK, ' and part["pid"] == 0', SOME_RANK),
        Edit("exposed / 1e6", _sum_of("COMMUNICATION_KINDS"), ALL),
        Edit("exposed / 1e6", _sum_of('("wait",)'), ONLY_WAITS),
        Edit('{box["cat"]', '{box["name"].split()[0]', NAMES),
        Own(_nested_twice, NESTED),
        Own(_whole_or_nothing, PARTLY),
        Edit(SENDS, '"wait" in kinds', ONLY_WAITS),
        Edit("& set(COMMUNICATION_KINDS)", '& {*COMMUNICATION_KINDS, "wait"}', ONLY_WAITS),
        Edit(EXPOSED, f'exposed = max(0.0, sum(box["dur"] * {SIGN} for box in boxes))', LENGTHS),
        Edit(SENDS, f"{SENDS} and start >= {LAST_COMPUTE}", TAIL),
        Edit(SENDS, "not computes", IDLE),
        Edit("set(COMPUTE_KINDS)", '{*COMPUTE_KINDS, "step"}', STEPS),
        Edit("set(COMMUNICATION_KINDS)", '{*COMMUNICATION_KINDS, "write"}', STORAGE),
        Edit("set(COMPUTE_KINDS)", '{*COMPUTE_KINDS, "write"}', STORAGE),
        *_without("COMPUTE_KINDS", COMPUTE_KINDS),
        *_without("COMMUNICATION_KINDS", COMMUNICATION_KINDS),
        Edit("set(COMPUTE_KINDS)", '{"backward"}', KINDS),
        Edit("set(COMMUNICATION_KINDS)", '{"all_reduce"}', KINDS),
        Edit("pairwise(edges)", "pairwise(edges[:-1])", LAST_EDGE),
        *(one for one in COUNTS if one.cause != IN_A_LIST),
        Edit("exposed / 1e6", "[exposed / 1e6]", NUMBER),
    ),
)
