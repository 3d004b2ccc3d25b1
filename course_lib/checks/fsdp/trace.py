"""Exercise 5 of 10_fsdp: find in a trace which transfers are exposed, and by how much."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from course_lib.checks import traces
from course_lib.checks.cases import Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.core.records import COMMUNICATION_KINDS, COMPUTE_KINDS
from course_lib.core.trace_reading import computing, exposed_transfers

WHOLE = Cause("That is how long each takes: what runs beside computing is hidden.")
HIDDEN = Cause("What is wholly hidden does not belong in the list.")
ORDER = Cause("The most exposed comes first: that is where to look.")
STARTS = Cause("Sort by what is exposed, not by start.")
MICROSECONDS = Cause("ts and dur are in microseconds; return seconds.")
OTHER_RANKS = Cause("Only the boxes of this pid.")
GATHERS = Cause("Not only gathers and reductions: COMMUNICATION_KINDS has all of them.")
ONE_BUSY = Cause("A transfer can overlap with several intervals of computing: add them up.")
END = Cause("The start of the transfer, not the start of what is exposed of it, nor its end.")
BEFORE = Cause("A transfer can begin before the computing, and end after it.")
TOP = Cause("Return all that are exposed, not only the worst.")
NEGATIVE = Cause("Where two intervals do not meet, they share 0 seconds, not a negative number.")
LIMIT = Cause("Leave out what is *exposed* for less than 1 microsecond, and nothing else.")
WAITS = Cause("A wait inside computing is not computing: `computing` leaves it out.")
ALIKE = Cause("Two transfers that are alike are two: keep both.")
ANY_NAME = Cause("The kind is `cat`: the name is anything that somebody wrote.")
FRACTIONS = Cause("Times have fractions of a microsecond: keep them.")
CLOCK = Cause("start_s is a time on the clock of the trace, which need not begin at 0.")
NOT_SENT = Cause("Neither a wait, a step nor a write to storage is communication between ranks.")
FIELDS = Cause("The order is (cat, start_s, exposed_s).")
ONE_PART = Cause("A long transfer can be exposed in several places: add them up.")
UNCHANGED = Cause("The trace belongs to the caller: leave it as it is.")
ITS_HIDDEN = Cause("That is how long it is hidden: exposed is the rest of the transfer.")
PARTLY = Cause("A transfer that is hidden in part is exposed for the rest: keep it.")
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


def _longest_part(trace: dict[str, Any], pid: int) -> list[tuple[str, float, float]]:
    """Count only the longest stretch of each transfer that is exposed."""
    busy, found = computing(trace, pid), []
    for kind, start_s, _ in exposed_transfers(trace, pid):
        end = max(
            part["ts"] + part["dur"]
            for part in trace["traceEvents"]
            if part["ph"] == "X" and (part["pid"], part["cat"]) == (pid, kind)
            and part["ts"] / 1e6 == start_s
        )  # fmt: skip
        edges = [(start_s * 1e6, start_s * 1e6), *busy, (end, end)]
        inside = [(max(a, start_s * 1e6), min(b, end)) for a, b in edges]
        met = [(a, b) for a, b in inside if a <= b]
        gaps = [after[0] - before[1] for before, after in pairwise(met)]
        found.append((kind, start_s, max(gaps, default=0.0) / 1e6))
    return sorted(found, key=lambda one: -one[2])


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
        success="Found in eighteen traces: each transfer, its start, what is exposed of it.",
        unchanged=UNCHANGED,
        symptoms=((_of_another_kind, NOT_SENT),),
    ),
    wrong=(
        Edit(SHARED, "0", WHOLE),
        Edit(ENTRY, ENTRY.replace("(end - start - hidden)", "(end - start)"), WHOLE),
        Edit(ENTRY, ENTRY.replace("(end - start - hidden)", "hidden"), ITS_HIDDEN),
        Edit(SHARED, "(end - start) * any(min(end, b) > max(start, a) for a, b in busy)", PARTLY),
        Edit(KINDS, "True", NOT_SENT),
        Edit(LEAVE, "True", HIDDEN),
        *(Edit(LEAVE, f"end - start - hidden >= {limit}", LIMIT)
          for limit in (0.5, 0.9, 1.5, 2, 100, 1000)),
        Edit(LEAVE, "end - start - hidden > 0", LIMIT),
        Edit(LEAVE, 'box["dur"] >= 1 and end - start > hidden', LIMIT),
        Edit("busy = computing(trace, pid)", WITH_WAITS, WAITS),
        Edit("busy = computing(trace, pid)", "busy = computing(trace, 1)", OTHER_RANKS),
        Edit(SORTED, "sorted(set(found), key=lambda one: -one[2])", ALIKE),
        Edit(SORTED, "sorted({one[1]: one for one in found}.values(), key=lambda x: -x[2])", ALIKE),
        Edit(SORTED, "sorted({x[::2]: x for x in found}.values(), key=lambda one: -one[2])",
             ALIKE),
        Edit(SORTED, "sorted(found, key=lambda one: -one[2])[:10]", TOP),
        Edit(SORTED, "sorted(found, key=lambda one: -round(one[2], 3))", ORDER),
        Edit(SORTED, "sorted(found, reverse=True)", ORDER),
        Edit("start, end = box[\"ts\"], box[\"ts\"] + box[\"dur\"]",
             "start, end = int(box[\"ts\"]), int(box[\"ts\"] + box[\"dur\"])", FRACTIONS),
        Edit(ENTRY, ENTRY.replace('box["cat"]', 'box["name"].split()[0]'), ANY_NAME),
        Edit(ENTRY, ENTRY.replace("start / 1e6", "(start - boxes[0]['ts']) / 1e6"), CLOCK),
        Edit(ENTRY, '(box["cat"], start, (end - start - hidden) / 1e6)', MICROSECONDS),
        Edit(ENTRY, '(box["cat"], start / 1e6, end - start - hidden)', MICROSECONDS),
        Edit(ENTRY, '(box["cat"], (end - start - hidden) / 1e6, start / 1e6)', FIELDS),
        *(Edit(KINDS, f'box["cat"] in (*COMMUNICATION_KINDS, "{kind}")', NOT_SENT)
          for kind in ("wait", "step", "write")),
        *(Edit(KINDS, f'box["cat"] in {{*COMMUNICATION_KINDS}} - {{"{kind}"}}', GATHERS)
          for kind in COMMUNICATION_KINDS),
        Own(_longest_part, ONE_PART),
        Edit(SORTED, "found", ORDER),
        Edit(SORTED, "sorted(found, key=lambda one: one[2])", ORDER),
        Edit(SORTED, "sorted(found, key=lambda one: one[1], reverse=True)", STARTS),
        Edit(ENTRY, "(box['cat'], start, end - start - hidden)", MICROSECONDS),
        Edit(ENTRY, "(box['cat'], start / 1e3, (end - start - hidden) / 1e3)", MICROSECONDS),
        Edit(ENTRY, "(box['cat'], (start + hidden) / 1e6, (end - start - hidden) / 1e6)", END),
        Edit(ENTRY, "(box['cat'], end / 1e6, (end - start - hidden) / 1e6)", END),
        Edit(' and part["pid"] == pid', "", OTHER_RANKS),
        Edit(KINDS, 'box["cat"] in ("all_gather", "reduce_scatter", "all_reduce")', GATHERS),
        Edit(KINDS, 'box["cat"] in ("all_gather", "reduce_scatter")', GATHERS),
        Edit(SHARED, "max([max(0, min(end, b) - max(start, a)) for a, b in busy], default=0)",
             ONE_BUSY),
        Edit(SHARED, "sum(min(end, b) - max(start, a) for a, b in busy)", NEGATIVE),
        Edit(SHARED, "sum(b - a for a, b in busy if start <= a and b <= end)", BEFORE),
        Edit(SHARED, "sum(end - start for a, b in busy if a <= start and end <= b)", BEFORE),
        Edit(SORTED, "sorted(found, key=lambda one: -one[2])[:1]", TOP),
        Edit(SORTED, "sorted(found, key=lambda one: -one[2])[:2]", TOP),
        Own(None, NO_LIST),
    ),
)  # fmt: skip
