"""Steps that are compared take turns, each from gradients of its own; and what is said of them."""

import math
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import nn

from course_lib.core import Event
from course_lib.ranks import progress
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


def slow(rank):
    """Measure two things in two turns; every one of them takes longer than a message may wait."""
    progress.EVERY_S = 0
    return list(progress.in_turns("ab", 2))


@pytest.fixture
def shown(monkeypatch):
    """Everything that JupyterLab is told to show in one place, the last one at the end."""
    told = []

    def display(data, **how):
        assert how == {"raw": True, "display_id": True}
        told.append(data)
        return SimpleNamespace(update=lambda data, raw: told.append(data))

    monkeypatch.setattr("IPython.display.display", display)
    return told


def test_jupyterlab_shows_which_measurement_is_next_and_nothing_at_the_end(
    pools, shown, monkeypatch
):
    monkeypatch.setenv(progress.JUPYTER_SERVER, "00_ranks.ipynb")
    assert pools(2).run(slow) == [["a", "b"] * 2] * 2
    words = [f"measuring: {n} of 2, turn {turn} of 2" for turn in (1, 2) for n in (1, 2)]
    assert shown == [*({"text/plain": word} for word in words), {}]
    del shown[:]
    monkeypatch.setattr(progress, "EVERY_S", 0)
    assert list(progress.in_turns("ab", 2)) == ["a", "b"] * 2  # in the notebook itself
    assert shown == [*({"text/plain": word} for word in words), {}]


def test_other_programs_see_no_progress(pools, shown, monkeypatch):
    monkeypatch.delenv(progress.JUPYTER_SERVER, raising=False)
    pools(2).run(slow)
    assert shown == []


def test_quick_measurements_are_not_told(shown, monkeypatch):
    monkeypatch.setenv(progress.JUPYTER_SERVER, "00_ranks.ipynb")
    monkeypatch.setattr(progress, "EVERY_S", math.inf)
    assert list(progress.in_turns("ab", 2)) == ["a", "b"] * 2
    assert shown == []


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
