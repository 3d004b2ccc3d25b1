"""Where the boxes of one rank go: work in the main lane, messages under way beneath it.

A message that runs while the rank computes gets the thin lane under the rank, so that overlap can
be seen; a message beside which the rank does nothing, or only waits for it, fills the main lane.
Messages at the same time, a send beside a recv, share the height.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.core.records import COMMUNICATION_KINDS, Event


@dataclass(frozen=True)
class Slot:
    """An event, and which part of which lane it takes: part `index` of `count` equal ones."""

    event: Event
    beneath: bool
    index: int = 0
    count: int = 1


def places(events: Iterable[Event]) -> list[Slot]:
    """Places for the events of one rank, in the order in which they are to be drawn.

    Waits come first and long work before short, so that what happens meanwhile stays visible.
    """
    ordered = sorted(events, key=lambda event: (event.start_s, -event.end_s))
    messages = [event for event in ordered if event.kind in COMMUNICATION_KINDS]
    waits = [event for event in ordered if event.kind == "wait"]
    work = [event for event in ordered if event.kind not in (*COMMUNICATION_KINDS, "wait")]
    busy = _merged(work)
    beside = [event for event in messages if _overlaps(event, busy)]
    alone = [event for event in messages if not _overlaps(event, busy)]
    work.sort(key=lambda event: -event.duration_s)
    return [
        *(Slot(event, beneath=False) for event in waits + work),
        *_sharing(alone, beneath=False),
        *_sharing(beside, beneath=True),
    ]


def visible(events: Iterable[Event]) -> list[Event]:
    """Without the waits that are hidden, at least for the most part, by the call they wait in."""
    found: list[Event] = []
    by_rank: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        by_rank.setdefault(event.rank, []).append(event)
    for own in by_rank.values():
        busy = _merged([e for e in own if e.kind not in (*COMMUNICATION_KINDS, "wait")])
        alone = [e for e in own if e.kind in COMMUNICATION_KINDS and not _overlaps(e, busy)]
        covers = _merged(alone)
        found += [e for e in own if e.kind != "wait" or not _mostly_within(e, covers)]
    return found


def _mostly_within(event: Event, stretches: Sequence[tuple[float, float]]) -> bool:
    """Does more than half of the event lie in the one stretch that it begins in, or just before?"""
    after = bisect_right(stretches, (event.start_s, float("inf")))
    near = stretches[max(0, after - 1) : after + 1]
    shared = (min(event.end_s, end) - max(event.start_s, start) for start, end in near)
    shared_s = max(shared, default=0.0)
    return 2 * shared_s > event.duration_s


def _merged(ordered: Sequence[Event]) -> list[tuple[float, float]]:
    """The stretches of time in which at least one of the events runs."""
    stretches: list[tuple[float, float]] = []
    for event in ordered:
        if stretches and event.start_s < stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], event.end_s))
        else:
            stretches.append((event.start_s, event.end_s))
    return stretches


def _overlaps(event: Event, stretches: Sequence[tuple[float, float]]) -> bool:
    """Does the event share more than a hundredth of its time with one of the stretches?"""
    margin = 0.01 * event.duration_s
    after = bisect_right(stretches, (event.end_s - margin, float("-inf")))
    return after > 0 and stretches[after - 1][1] > event.start_s + margin


def _sharing(ordered: Sequence[Event], *, beneath: bool) -> list[Slot]:
    """Events that overlap one another, directly or in a chain, split the lane evenly."""
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
