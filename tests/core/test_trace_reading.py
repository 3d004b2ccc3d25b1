"""What is exposed, read from a trace: against a slow count of every microsecond."""

from itertools import pairwise
from random import Random

import pytest

from course_lib.core import COMMUNICATION_KINDS, COMPUTE_KINDS, Event
from course_lib.core.chrome_trace import trace_of_events
from course_lib.core.trace_reading import communicating, computing, exposed_s, exposed_transfers


def event(kind, start_us, end_us, rank=0):
    return Event(rank=rank, kind=kind, start_s=start_us / 1e6, end_s=end_us / 1e6)


def some_events(random, rank):
    kinds = ("forward", "backward", "recompute", "wait", "all_reduce", "all_gather", "write")
    for _ in range(random.randint(1, 12)):
        start = random.randint(0, 90)
        yield event(random.choice(kinds), start, start + random.randint(0, 30), rank)


def slow_exposed_us(events):
    """Microseconds in which a transfer is under way, and no computing outside of waits."""
    found = 0
    for time in range(130):
        kinds = {
            one.kind
            for one in events
            if one.start_s * 1e6 <= time + 0.5 <= one.end_s * 1e6
        }  # fmt: skip
        computes = kinds & set(COMPUTE_KINDS) and "wait" not in kinds
        found += bool(kinds & set(COMMUNICATION_KINDS) and not computes)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_exposed_time_is_that_of_counting_every_microsecond(seed):
    random = Random(seed)
    by_rank = [[event("forward", 0, 1, rank), *some_events(random, rank)] for rank in range(2)]
    trace = trace_of_events({"run": [one for own in by_rank for one in own]})
    for pid, own in enumerate(by_rank):
        assert round(1e6 * exposed_s(trace, pid)) == slow_exposed_us(own)
        alone = [
            slow_exposed_us([one, *(e for e in own if e.kind not in COMMUNICATION_KINDS)])
            for one in own
            if one.kind in COMMUNICATION_KINDS
        ]
        found = exposed_transfers(trace, pid)
        lengths = [round(1e6 * length) for *_, length in found]
        assert lengths == sorted((one for one in alone if one), reverse=True)


@pytest.mark.parametrize("seed", range(40))
def test_intervals_are_disjoint_and_in_order(seed):
    trace = trace_of_events({"": list(some_events(Random(seed), 0))})
    for intervals in (computing(trace, 0), communicating(trace, 0)):
        assert intervals == sorted(intervals)
        assert all(one[1] <= other[0] for one, other in pairwise(intervals))


def test_another_process_of_the_trace_does_not_count():
    trace = trace_of_events({"": [event("forward", 0, 50), event("all_reduce", 0, 90, rank=1)]})
    assert exposed_s(trace, 0) == 0
    assert exposed_transfers(trace, 1) == [("all_reduce", 0.0, pytest.approx(90e-6))]
