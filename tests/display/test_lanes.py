"""What a timeline leaves out: waits that nobody could see under the call they wait in."""

from course_lib.core import Event
from course_lib.display.lanes import visible


def event(kind, start_s, end_s, rank=0):
    return Event(rank=rank, kind=kind, start_s=start_s, end_s=end_s)


def kinds(events):
    return sorted(event.kind for event in visible(events))


def test_a_wait_under_its_own_call_is_left_out():
    assert kinds([event("all_reduce", 0.0, 1.0), event("wait", 0.1, 1.01)]) == ["all_reduce"]


def test_a_wait_beside_computing_stays():
    overlapped = [
        event("all_reduce", 0.0, 2.0),
        event("forward", 0.0, 1.0),
        event("wait", 1.0, 2.0),
    ]
    assert kinds(overlapped) == ["all_reduce", "forward", "wait"]


def test_a_wait_that_outlasts_its_call_stays():
    assert kinds([event("send", 0.0, 1.0), event("wait", 0.5, 4.0)]) == ["send", "wait"]


def test_another_ranks_call_hides_nothing():
    assert kinds([event("send", 0.0, 1.0, rank=1), event("wait", 0.0, 1.0)]) == ["send", "wait"]


def test_a_wait_alone_stays():
    assert kinds([event("wait", 0.0, 1.0)]) == ["wait"]
