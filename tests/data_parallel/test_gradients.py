"""What the data-parallel wrappers share: no_sync, hooks, and names of missing gradients."""

import gc
import sys
import weakref

import cloudpickle
import pytest
import torch
from torch import nn

from course_lib.core import CourseError
from course_lib.data_parallel.gradients import (
    NoSync,
    call_when_accumulated,
    require_gradients,
    some_names,
    used_on_any_rank,
)
from course_lib.ranks import record

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counts(NoSync):
    def __init__(self, param):
        self.calls = []
        call_when_accumulated(param, self.note, 3, "weight")

    def note(self, *args):
        self.calls.append((args, torch.is_grad_enabled()))


def test_a_hook_is_called_after_each_accumulation_without_grad_mode():
    param = nn.Parameter(torch.ones(2))
    counts = Counts(param)
    for number in (1, 2):
        param.sum().backward()
        assert counts.calls == [((3, "weight"), False)] * number


def test_a_hook_does_not_keep_the_wrapper_alive():
    param = nn.Parameter(torch.ones(2))
    alive = weakref.ref(Counts(param))
    gc.collect()
    assert alive() is None
    param.sum().backward()
    assert param.grad.tolist() == [1.0, 1.0]


def test_no_sync_ends_with_its_block_and_nests():
    model = NoSync()
    with model.no_sync():
        with model.no_sync():
            assert not model._syncs
        assert not model._syncs
    assert model._syncs


def test_no_sync_ends_with_an_error_too():
    model = NoSync()
    with pytest.raises(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    assert model._syncs


@pytest.mark.parametrize(
    ("count", "words"), [(0, "none"), (1, "0"), (5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3 and 2 more")]
)
def test_a_message_names_five_at_most(count, words):
    assert some_names([str(number) for number in range(count)]) == words


def used(rank):
    with record() as log:
        found = used_on_any_rank([rank == 0, rank == 1, False], None, None)
    with pytest.raises(CourseError) as told:
        require_gradients(["weight"], "Engine.step", "backward() first")
    require_gradients([], "Engine.step", "")
    return found, [event.num_bytes for event in log.events if event.group], str(told.value)


def test_a_parameter_is_used_if_any_rank_uses_it_and_named_if_not(pools):
    for rank, (found, sent, words) in enumerate(pools(2).run(used)):
        assert (found, sent) == ([True, True, False], [3])
        assert words == (
            f"rank {rank}, Engine.step: need a gradient for every parameter; got none for weight. "
            "Try backward() first."
        )
