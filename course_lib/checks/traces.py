"""Traces of small runs, which the exercises on traces judge an answer by.

Drawn by hand are those that show one thing each. `_untidy` makes traces as real jobs leave them:
boxes in no order, of every kind, fractions of microseconds, a clock that began long ago.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from course_lib.checks.cases import Case
from course_lib.core import COMMUNICATION_KINDS, COMPUTE_KINDS, Event
from course_lib.core.chrome_trace import trace_of_events

TimedKind = tuple[str, float, float]  # kind, start and end in ms
OTHER_RANK: Sequence[TimedKind] = (
    ("backward", 0, 50),
    ("all_reduce", 10, 97),
    ("wait", 50, 97),
    ("optimizer", 97, 99),
)
RUNS: dict[str, Sequence[TimedKind]] = {
    "all is hidden": [("backward", 0, 100), ("all_reduce", 20, 60)],
    "the last bucket": [("backward", 0, 100), ("all_reduce", 30, 50), ("all_reduce", 80, 130),
                        ("wait", 100, 130), ("optimizer", 130, 140)],
    "two at the same time": [("backward", 0, 100), ("all_gather", 90, 140),
                             ("reduce_scatter", 110, 150), ("wait", 100, 150)],
    "a wait within forward": [("forward", 0, 98), ("all_gather", 0, 16), ("wait", 0.5, 16),
                              ("all_gather", 20, 40), ("wait", 38, 40), ("backward", 98, 200)],
    "recomputing within backward": [("backward", 0, 100), ("recompute", 20, 40),
                                    ("reduce_scatter", 10, 50)],
    "a late rank": [("backward", 0, 60), ("all_reduce", 40, 90), ("optimizer", 110, 120)],
    "between two units": [("forward", 0, 10), ("all_gather", 5, 25), ("backward", 20, 60),
                          ("reduce_scatter", 30, 75), ("wait", 60, 75)],
    "messages": [("forward", 0, 30), ("send", 30, 44), ("wait", 44, 80), ("recv", 60, 80),
                 ("backward_input", 80, 100), ("send", 95, 125), ("backward_weight", 100, 120)],
    "a checkpoint": [("compute", 0, 40), ("write", 0, 90), ("all_reduce", 35, 55),
                     ("barrier", 60, 90), ("wait", 60, 90)],
    "nothing is sent": [("forward", 0, 10), ("backward", 10, 30), ("wait", 30, 50)],
    "nothing is computed": [("broadcast", 0, 30), ("wait", 0, 30)],
    "below a millisecond": [("backward", 0, 0.25), ("all_reduce", 0.125, 0.375),
                            ("wait", 0.25, 0.375)],
    "three buckets queue": [("backward", 0, 90), ("all_reduce", 30, 80), ("all_reduce", 80, 120),
                            ("all_reduce", 120, 170), ("wait", 90, 170), ("optimizer", 170, 171)],
}  # fmt: skip
ZERO_US = 1_234_567.875  # times are multiples of 1/16, so sums are exact


def cases() -> list[Case]:
    """Return the traces, each with the process to look at."""
    found = [(name, (_trace({"": (rows, OTHER_RANK)}), 0)) for name, rows in RUNS.items()]
    name, rows = list(RUNS.items())[-1]
    later = {"predicted": (OTHER_RANK, OTHER_RANK), "measured": (OTHER_RANK, rows)}
    found += [(f"{name}, of another run", (_trace(later), 3))]
    found += [(f"a real job's boxes, {seed}", (_untidy(Random(seed)), seed)) for seed in (1, 2, 3)]
    at_limit = [_box(1, 1, "forward", 0.0, 10.0), _box(1, 2, "all_gather", 9.0, 2.0)]
    found += [("a transfer that is exposed for exactly 1 us", ({"traceEvents": at_limit}, 1))]
    return [*found, ("a rank without boxes", (_untidy(Random(4)), 9))]


def drawn(random: Random) -> list[Case]:
    """Return more traces for a student's own assignment."""
    return [(f"drawn {number}", (_untidy(random), number)) for number in (1, 2)]


def _trace(runs: Mapping[str, Sequence[Sequence[TimedKind]]]) -> dict[str, Any]:
    """Return the trace, with a box around the step of each rank, as a training run has it."""
    events = {name: [_event(rank, *row) for rank, rows in enumerate(ranks) for row in rows]
              for name, ranks in runs.items()}  # fmt: skip
    trace = trace_of_events(events)
    boxes = [part for part in trace["traceEvents"] if part["ph"] == "X"]
    for pid in sorted({box["pid"] for box in boxes}):
        trace["traceEvents"].append(_box(pid, 1, "step", 0.0, 200_000.0))
    return trace


def _event(rank: int, kind: str, start_ms: float, end_ms: float) -> Event:
    peer = {"send": 1, "recv": 1}.get(kind)
    return Event(rank=rank, kind=kind, start_s=start_ms / 1e3, end_s=end_ms / 1e3, peer=peer)


def _untidy(random: Random) -> dict[str, Any]:
    """Return the trace of three ranks, pids 1 to 3."""
    parts: list[dict[str, Any]] = []
    for pid in (1, 2, 3):
        end, thread = ZERO_US, random.choice((7, 10, 11))
        for number, kind in enumerate(random.sample(COMPUTE_KINDS, len(COMPUTE_KINDS))):
            start, end = end + random.randrange(0, 400) / 8, end + 60 + random.randrange(3000) / 8
            parts += _computing(random, pid, thread, kind, max(start, end - 400), end, number)
        parts += _transfers(random, pid, end)
        parts.append(_box(pid, 1, "step", ZERO_US + 100, end - ZERO_US))
        parts.append({"name": "rank", "ph": "M", "pid": pid, "tid": 0, "args": {}})
        parts.append({"name": "bytes", "ph": "C", "pid": pid, "ts": end, "args": {"params": 8}})
    random.shuffle(parts)
    return {"traceEvents": parts, "displayTimeUnit": "ms", "otherData": {}}


def _computing(
    random: Random, pid: int, tid: int, kind: str, start: float, end: float, number: int
) -> Iterator[dict[str, Any]]:
    """Yield a box, in it waits (at its start; two that overlap), and a part that is computed."""
    yield _box(pid, tid, kind, start, end - start)
    part = 8 * (end - start) // 8 / 8
    if number % 3 == 0:
        yield _box(pid, tid, "wait", start, part)
    if number % 3 == 1:
        yield _box(pid, tid, "wait", start + part, 2 * part)
        yield _box(pid, tid + 1, "wait", start + 2 * part, 2 * part)
    yield _box(pid, tid, random.choice(COMPUTE_KINDS), start + 5 * part, part)


def _transfers(random: Random, pid: int, end: float) -> Iterator[dict[str, Any]]:
    """Yield transfers: of every kind, one over everything, two alike, and very short ones."""
    for kind in (*COMMUNICATION_KINDS, "write"):
        start = ZERO_US + random.randrange(int(8 * (end - ZERO_US))) / 8
        yield _box(pid, 100, kind, start, 0.25 + random.randrange(2400) / 8)
    yield _box(pid, 101, "reduce_scatter", ZERO_US - 20, end - ZERO_US + 30.5)
    for _ in range(2):
        yield _box(pid, 102, "all_to_all", end + 40, 3.375)
    for number, length in enumerate((0.375, 0.625, 0.9375, 1.125, 1.625, 2.25)):
        yield _box(pid, 103, "gather", end + 60 + 20 * number, length)
    yield _box(pid, 104, "recv", end - 30, 30.375)  # long, and exposed for less than 1
    for number, kind in enumerate(COMMUNICATION_KINDS):
        yield _box(pid, 105, kind, end + 200 + 20 * number, 5.125)
    yield _box(pid, 106, "all_reduce", end + 500, 2.5)


def _box(pid: int, tid: int, kind: str, start: float, length: float) -> dict[str, Any]:
    times = {"ts": start, "dur": length}
    return {
        "name": f"op {tid}",
        "cat": kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        **times,
        "args": {},
    }
