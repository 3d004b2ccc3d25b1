"""Exercise 5 of 10_fsdp: find in a trace which transfers are exposed, and by how much."""

from collections.abc import Sequence
from typing import Any

from course_lib.checks import traces
from course_lib.checks.cases import Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.core.records import COMPUTE_KINDS

WHOLE = Cause("That is how long each takes: what runs beside computing is hidden.")
ITS_HIDDEN = Cause("That is how long it is hidden: exposed is the rest of the transfer.")
PARTLY = Cause("A transfer that is hidden in part is exposed for the rest: keep it.")
LIMIT = Cause("Leave out what is *exposed* for less than 1 microsecond, and nothing else.")
ORDER = Cause("The most exposed comes first: that is where to look.")
MICROSECONDS = Cause("ts and dur are in microseconds; return seconds.")
OTHER_RANKS = Cause("Only the boxes of this pid.")
GATHERS = Cause("Not only gathers and reductions: COMMUNICATION_KINDS has all of them.")
ONE_BUSY = Cause("A transfer can overlap with several intervals of computing: add them up.")
START = Cause("The start of the transfer, not the start of what is exposed of it.")
TOP = Cause("Return all that are exposed, not only the worst.")
NEGATIVE = Cause("Where two intervals do not meet, they share 0 seconds, not a negative number.")
WAITS = Cause("A wait inside computing is not computing: `computing` leaves it out.")
ALIKE = Cause("Two transfers that are alike are two: keep both.")
CLOCK = Cause("start_s is a time on the clock of the trace, which need not begin at 0.")
NOT_SENT = Cause("Neither a wait, a step nor a write to storage is communication between ranks.")
UNCHANGED = Cause("The trace belongs to the caller: leave it as it is.")
NO_LIST = Cause("Return a list of (cat, start_s, exposed_s).")


def _listed(found: Any, *_arguments: Any) -> list[list[Any]]:
    """Return the transfers as plain lists; of two that are exposed alike, the earlier first.

    Raises: CheckFailed for what is no list of three values each
    """
    try:
        rows = [(kind, float(start_s), float(length)) for kind, start_s, length in found]
    except (TypeError, ValueError) as error:
        need = "a list of (cat, start_s, exposed_s)"
        raise failed(f"need {need}; got {found!r}", NO_LIST) from error
    lengths = [round(length, 9) for _, _, length in rows]
    if lengths == sorted(lengths, reverse=True):
        rows.sort(key=lambda row: (-round(row[2], 9), row[1]))
    return [list(row) for row in rows]


def _of_another_kind(got: Sequence[Any], _need: Sequence[Any]) -> bool:
    """Return whether a box is listed that is no communication, of any other kind."""
    others = {"wait", "step", "write", *COMPUTE_KINDS}
    return any(row[0] in others for one in got if isinstance(one, list) for row in one)


SHARED = "sum(max(0, min(end, b) - max(start, a)) for a, b in busy)"
LEAVE = "end - start - hidden >= 1"
ENTRY = '(box["cat"], start / 1e6, (end - start - hidden) / 1e6)'
SORTED = "sorted(found, key=lambda one: -one[2])"
KINDS = 'box["cat"] in COMMUNICATION_KINDS'

WITH_WAITS = (
    'parts = [part for part in trace["traceEvents"] if part.get("cat") != "wait"]\n'
    'busy = computing({"traceEvents": parts}, pid)'
)

TRACE = Exercise(
    key="fsdp-5",
    title="which transfers are exposed",
    check=Cases(
        cases=traces.cases,
        drawn=traces.drawn,
        show=_listed,
        look="Take one transfer, and subtract what it shares with each interval of computing.",
        success="Found in nineteen traces: each transfer, its start, what is exposed of it.",
        unchanged=UNCHANGED,
        symptoms=((_of_another_kind, NOT_SENT),),
    ),
    wrong=(
        Edit(SHARED, "0", WHOLE),
        Edit(ENTRY, ENTRY.replace("(end - start - hidden)", "hidden"), ITS_HIDDEN),
        Edit(SHARED, "(end - start) * any(min(end, b) > max(start, a) for a, b in busy)", PARTLY),
        Edit(KINDS, "True", NOT_SENT),
        Edit(KINDS, 'box["cat"] in (*COMMUNICATION_KINDS, "wait")', NOT_SENT),
        Edit(LEAVE, "True", LIMIT),
        Edit("busy = computing(trace, pid)", WITH_WAITS, WAITS),
        Edit(SORTED, "sorted(set(found), key=lambda one: -one[2])", ALIKE),
        Edit(ENTRY, ENTRY.replace("start / 1e6", "(start - boxes[0]['ts']) / 1e6"), CLOCK),
        Edit(ENTRY, "(box['cat'], start, end - start - hidden)", MICROSECONDS),
        Edit(ENTRY, "(box['cat'], (start + hidden) / 1e6, (end - start - hidden) / 1e6)", START),
        Edit(SORTED, "found", ORDER),
        Edit(SORTED, "sorted(found, key=lambda one: one[2])", ORDER),
        Edit(' and part["pid"] == pid', "", OTHER_RANKS),
        Edit(KINDS, 'box["cat"] in ("all_gather", "reduce_scatter")', GATHERS),
        Edit(
            SHARED,
            "max([max(0, min(end, b) - max(start, a)) for a, b in busy], default=0)",
            ONE_BUSY,
        ),
        Edit(SHARED, "sum(min(end, b) - max(start, a) for a, b in busy)", NEGATIVE),
        Edit(SORTED, f"{SORTED}[:1]", TOP),
    ),
)
