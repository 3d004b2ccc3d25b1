"""Lanes of a timeline: computation in the main lane, overlapped communication beneath it.

Communication, or a write to storage, that runs while the rank computes is drawn in the thin lane
under the rank, so that overlap is visible; exposed communication, during which the rank does
nothing or only waits, fills the main lane. Calls at the same time, such as a send and a recv, share
the height.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.core.records import COMMUNICATION_KINDS, Event

TRANSFERS = (*COMMUNICATION_KINDS, "write")  # what can go on while the rank computes


@dataclass(frozen=True)
class Slot:
    """Slot of an event: its lane, and there part `index` of `count` equal ones."""

    event: Event
    beneath: bool
    index: int = 0
    count: int = 1


def assign_slots(events: Iterable[Event]) -> list[Slot]:
    """Return slots for the events of one rank, in the order in which to draw them.

    Waits come first and long events before short ones, so that shorter ones stay visible.
    """
    ordered = sorted(events, key=lambda event: (event.start_s, -event.end_s))
    messages = [event for event in ordered if event.kind in TRANSFERS]
    waits = [event for event in ordered if event.kind == "wait"]
    work = [event for event in ordered if event.kind not in (*TRANSFERS, "wait")]
    busy = _merged(work)
    overlapped = [event for event in messages if _overlaps(event, busy)]
    exposed = [event for event in messages if not _overlaps(event, busy)]
    work.sort(key=lambda event: -event.duration_s)
    return [
        *(Slot(event, beneath=False) for event in waits + work),
        *_sharing(exposed, beneath=False),
        *_sharing(overlapped, beneath=True),
    ]


def visible(events: Iterable[Event]) -> list[Event]:
    """Return the events without the waits that lie mostly within the call they wait in."""
    found: list[Event] = []
    by_rank: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        by_rank.setdefault(event.rank, []).append(event)
    for own in by_rank.values():
        busy = _merged([e for e in own if e.kind not in (*TRANSFERS, "wait")])
        exposed = [e for e in own if e.kind in TRANSFERS and not _overlaps(e, busy)]
        covers = _merged(exposed)
        found += [e for e in own if e.kind != "wait" or not _mostly_within(e, covers)]
    return found


def _mostly_within(event: Event, intervals: Sequence[tuple[float, float]]) -> bool:
    """Return whether over half of the event is in the interval it begins in or just before."""
    after = bisect_right(intervals, (event.start_s, float("inf")))
    near = intervals[max(0, after - 1) : after + 1]
    shared = (min(event.end_s, end) - max(event.start_s, start) for start, end in near)
    shared_s = max(shared, default=0.0)
    return 2 * shared_s > event.duration_s


def _merged(ordered: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the intervals of time in which at least one of the events runs."""
    intervals: list[tuple[float, float]] = []
    for event in ordered:
        if intervals and event.start_s < intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], event.end_s))
        else:
            intervals.append((event.start_s, event.end_s))
    return intervals


def _overlaps(event: Event, intervals: Sequence[tuple[float, float]]) -> bool:
    """Return whether the event shares more than 1 % of its time with one of the intervals."""
    margin = 0.01 * event.duration_s
    after = bisect_right(intervals, (event.end_s - margin, float("-inf")))
    return after > 0 and intervals[after - 1][1] > event.start_s + margin


def _sharing(ordered: Sequence[Event], *, beneath: bool) -> list[Slot]:
    """Return slots; events that overlap, directly or in a chain, split the lane evenly."""
    found: list[Slot] = []
    cluster: list[tuple[Event, int]] = []
    free_from: list[float] = []
    for event in ordered:
        if all(end <= event.start_s for end in free_from):
            found += _close(cluster, len(free_from), beneath)
            cluster, free_from = [], []
        index = next((i for i, end in enumerate(free_from) if end <= event.start_s), None)
        if index is None:
            index = len(free_from)
            free_from.append(event.end_s)
        free_from[index] = event.end_s
        cluster.append((event, index))
    return found + _close(cluster, len(free_from), beneath)


def _close(cluster: Sequence[tuple[Event, int]], count: int, beneath: bool) -> list[Slot]:
    return [Slot(event, beneath, index, count) for event, index in cluster]
