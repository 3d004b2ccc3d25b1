"""Computing and exposed communication of a rank, read from a Chrome trace.

A rank computes where a box of computing is and no wait inside it; it communicates from the start
of a transfer to its end. Exposed is communication beside which the rank does not compute.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from course_lib.core.records import COMMUNICATION_KINDS, COMPUTE_KINDS

Interval = tuple[float, float]  # start and end in microseconds, as in a trace


def exposed_s(trace: Mapping[str, Any], pid: int) -> float:
    """Return the seconds in which a process of the trace communicates and does not compute."""
    return sum(_exposed_us(trace, pid, communicating(trace, pid))) / 1e6


def exposed_transfers(trace: Mapping[str, Any], pid: int) -> list[tuple[str, float, float]]:
    """Return (kind, start_s, exposed_s) of each exposed transfer, the most exposed first.

    What is exposed for less than a microsecond is left out. Of transfers at the same time, each
    has its own time.
    """
    boxes = list(_boxes(trace, pid, COMMUNICATION_KINDS))
    lengths = _exposed_us(trace, pid, map(_interval, boxes))
    found = [
        (box["cat"], box["ts"] / 1e6, length / 1e6)
        for box, length in zip(boxes, lengths, strict=True)
        if length >= 1
    ]
    return sorted(found, key=lambda one: -one[2])


def communicating(trace: Mapping[str, Any], pid: int) -> list[Interval]:
    """Return when a process has a transfer under way: disjoint, in order, in microseconds."""
    return merged(map(_interval, _boxes(trace, pid, COMMUNICATION_KINDS)))


def computing(trace: Mapping[str, Any], pid: int) -> list[Interval]:
    """Return when a process computes, waits left out: disjoint, in order, in microseconds."""
    busy = merged(map(_interval, _boxes(trace, pid, COMPUTE_KINDS)))
    waits = merged(map(_interval, _boxes(trace, pid, ("wait",))))
    found = []
    for start, end in busy:
        for wait_start, wait_end in within(waits, start, end):
            found.append((start, wait_start))
            start = wait_end
        found.append((start, end))
    return [(start, end) for start, end in found if end > start]


def _exposed_us(
    trace: Mapping[str, Any], pid: int, transfers: Iterable[Interval]
) -> Iterator[float]:
    busy = computing(trace, pid)
    for start, end in transfers:
        yield end - start - sum(b - a for a, b in within(busy, start, end))


def _boxes(trace: Mapping[str, Any], pid: int, kinds: Iterable[str]) -> Iterator[dict[str, Any]]:
    for part in trace["traceEvents"]:
        if part["ph"] == "X" and part["pid"] == pid and part["cat"] in kinds:
            yield part


def _interval(box: Mapping[str, Any]) -> Interval:
    return box["ts"], box["ts"] + box["dur"]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same time."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def within(intervals: list[Interval], start: float, end: float) -> Iterator[Interval]:
    """Yield what of disjoint intervals, in order, lies between start and end."""
    for a, b in intervals[max(0, bisect_right(intervals, (start, start)) - 1) :]:
        if a >= end:
            return
        if b > start:
            yield max(a, start), min(b, end)
