"""Steps that are compared take turns, each from gradients of its own; and what is said of them."""

import math
import sys

import cloudpickle
import pytest
import torch
from torch import nn

from course_lib.core import Event
from course_lib.ranks.timing import (
    communication_s,
    from_zero,
    largest_difference,
    median_turn,
    time_interleaved,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def taken(rank):
    """In which order two steps ran, what gradient each left, and what was timed."""
    order, modules = [], {name: nn.Linear(1, 1, bias=False) for name in ("ours", "theirs")}

    def step(name):
        order.append(name)
        modules[name](torch.ones(1)).backward()

    seconds = time_interleaved({n: (m, lambda n=n: step(n)) for n, m in modules.items()}, turns=2)
    return order, [module.weight.grad.item() for module in modules.values()], seconds


def test_steps_take_turns_and_begin_without_gradients(pools):
    for order, grads, seconds in pools(2).run(taken):
        assert order == ["ours", "theirs"] * 3
        assert grads == [1.0, 1.0]
        assert list(seconds) == ["ours", "theirs"]
        assert all(value > 0 for value in seconds.values())


def picked(rank):
    """What is handed over to be made one number, and what becomes of it."""
    handed, module = [], nn.Linear(1, 1)

    def least(seconds):
        handed.append(seconds)
        return min(seconds)

    return time_interleaved({"a step": (module, lambda: None)}, 3, least)["a step"], handed


def test_the_least_disturbed_turn_can_be_asked_for(pools):
    for least_s, (seconds,) in pools(2).run(picked):
        assert len(seconds) == 3  # the first turn is not counted
        assert least_s == min(seconds)


def apart(rank, values):
    """From ones to values[rank], in the second of two tensors."""
    ones = [torch.ones(2), torch.ones(1)]
    return largest_difference(ones, [torch.ones(2), torch.tensor([values[rank]])])


@pytest.mark.parametrize(
    ("values", "far"),
    [((1.0, 1.0), 0), ((1.0, -3.0), 4), ((4.0, 1.0), 3), ((1.0, math.nan), math.inf)],
)
def test_the_largest_difference_is_that_of_all_ranks(pools, values, far):
    assert pools(2).run(apart, values) == [far, far]


def test_tensors_without_a_partner_are_no_equal_ones():
    with pytest.raises(ValueError, match="zip"):
        largest_difference([torch.ones(1)], [torch.ones(1), torch.ones(1)])


def test_messages_at_the_same_time_are_talking_once():
    moments = [("all_gather", 1, 4), ("send", 2, 3), ("recv", 3, 6), ("all_reduce", 10, 100)]
    moments += [("compute", 0, 1000), ("wait", 6, 9)]
    events = [Event(rank=0, kind=kind, start_s=a, end_s=b) for kind, a, b in moments[::-1]]
    assert communication_s(events) == (6 - 1) + (100 - 10)
    assert communication_s([]) == 0


def test_the_median_turn_is_that_of_the_middle_time():
    assert median_turn([3.0, 1.0, 2.0]) == 2
    assert median_turn([4.0, 1.0, 3.0, 2.0]) == 2  # of the two in the middle, the slower one


def test_events_from_zero_are_sorted_and_keep_their_distances():
    later, first = (
        Event(rank=0, kind="forward", start_s=start_s, end_s=start_s + 2, label="F0")
        for start_s in (105, 101)
    )
    assert [(one.start_s, one.end_s) for one in from_zero([later, first])] == [(0, 2), (4, 6)]
