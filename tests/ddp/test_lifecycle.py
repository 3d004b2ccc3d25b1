"""DDP in a training loop that does more than steps: the numbers of one process, or a sentence."""

import copy
import pickle
import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from course_lib.data_parallel import NaiveDDP
from course_lib.ddp import DDP
from course_lib.zero import ShardedOptimizer
from tests import lifecycle
from tests.lifecycle import Loop, Net, assert_law, assert_told

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(lifecycle)


class Naive(Loop):
    def wrap(self):
        super().wrap()
        self.model = self.ddp()

    def ddp(self):
        return NaiveDDP(self.module)

    def finish(self):
        self.model.finish()

    def no_sync(self):
        return self.model.no_sync()

    def weights(self):
        return {name: value.clone() for name, value in self.module.state_dict().items()}


class Buckets(Naive):
    def ddp(self):
        return DDP(self.module, bucket_bytes=1)


class FindsUnused(Naive):
    def ddp(self):
        return DDP(self.module, bucket_bytes=1, find_unused=True)


LAW = [
    (lifecycle.failed_backward, {}, {}),
    (lifecycle.failed_backward, {}, {"set_to_none": False}),
    (lifecycle.failed_among_others, {}, {"clear": Loop.zero_grad}),
    (lifecycle.failed_in_no_sync, {}, {"clear": Loop.zero_grad}),
    (lifecycle.changed_through_data, {}, {}),
    (lifecycle.freeze_and_unfreeze, {}, {}),
    (lifecycle.cleared_in_no_sync, {}, {}),
    (lifecycle.accumulated, {}, {}),
    (lifecycle.dropped, {}, {}),
    (lifecycle.penalized, {}, {}),
    (lifecycle.by_the_optimizer, {}, {}),
    (lifecycle.steps, {"build": lifecycle.InPlace}, {}),
    (lifecycle.steps, {"build": lifecycle.Complex}, {}),
]


@pytest.mark.parametrize("loop", [Naive, Buckets, FindsUnused])
@pytest.mark.parametrize("case", LAW, ids=lambda case: case[0].__name__)
def test_a_loop_that_does_more_ends_with_the_weights_of_one_process(pools, case, loop):
    assert_law(pools, 2, loop, *case)


def test_naive_ddp_trains_what_is_unfrozen_later(pools):
    assert_law(pools, 2, Naive, lifecycle.unfreeze, {"frozen": "head"})


def late_layer(loop):
    def train(rank):
        made = loop()
        made.module.head = nn.Sequential(made.module.head, nn.Linear(2, 2).double())
        made.step()

    return train


def finished_after_fault(loop):
    lifecycle.fail(loop)
    loop.finish()


def changed_in_flight(loop):
    """A hook after DDP's changes a gradient which is on its way."""

    def halve(param):
        param.grad.mul_(0.5)

    loop.module.head.weight.register_post_accumulate_grad_hook(halve)
    loop.step()


def clipped_before_finish(loop):
    loop.loss().backward()
    nn.utils.clip_grad_norm_(loop.module.parameters(), 1.0)


def never_finished(loop, step=lambda made: made.optimizer.step()):
    def train(rank):
        made = loop()
        for _ in range(2):
            made.loss().backward()
            step(made)
            made.optimizer.zero_grad()

    return train


def stepped_by_hand(made):
    with torch.no_grad():
        for param in made.module.parameters():
            param.sub_(param.grad, alpha=0.1)


def only_in_no_sync(loop, use):
    """All backwards are in no_sync, so the gradients are no means when they are used."""

    def train(rank):
        made = loop()
        with made.no_sync():
            made.loss().backward()
            made.finish()
        use(made)
        made.loss()

    return train


def step_inside(made):
    with made.no_sync():
        made.optimizer.step()


def sparse(rank):
    model = NaiveDDP(nn.Embedding(3, 2, sparse=True))
    model(torch.arange(3)).sum().backward()
    model.finish()


TOLD = {
    "got optimizer.step(), which sees this rank's alone. Try model.finish()": never_finished(Naive),
    "got optimizer.step(), which sees this rank's": never_finished(Buckets),
    "NaiveDDP: need finish() after backward; got parameters that have changed before it": (
        never_finished(Naive, stepped_by_hand)
    ),
    "rank's alone. Try model.finish() first, outside of no_sync()": (
        only_in_no_sync(Naive, lambda made: made.optimizer.step())
    ),
    "Try model.finish() first, outside of no_sync()": (
        only_in_no_sync(Buckets, lambda made: made.clip(1.0))
    ),
    "got ShardedOptimizer.step, which sees this rank's alone": (
        only_in_no_sync(Buckets, lambda made: ShardedOptimizer(made.params(), SGD).step())
    ),
    " DDP: need finish() after backward; got parameters that": only_in_no_sync(
        Buckets, stepped_by_hand
    ),
    " DDP: need finish() after backward": only_in_no_sync(Buckets, step_inside),
    " DDP: need finish()": never_finished(Buckets, stepped_by_hand),
    "NaiveDDP: need dense gradients; got a sparse one for weight": sparse,
    "NaiveDDP: need parameters with shapes; got weight": lambda rank: NaiveDDP(nn.LazyLinear(2)),
    "DDP: need code that knows of the gradients of all ranks; got torch.nn.utils.clip_grad_norm_": (
        lambda rank: clipped_before_finish(Buckets())
    ),
    "Try model.finish() first": lambda rank: clipped_before_finish(Naive()),
    "DDP: need a model outside of a process group": lambda rank: copy.deepcopy(DDP(Net())),
    "to copy or pickle; got one that communicates": lambda rank: pickle.dumps(DDP(Net())),
    "Try copy.deepcopy(model.module)": lambda rank: AveragedModel(NaiveDDP(Net())),
    "DDP: need the parameters to train when the module is wrapped; got head.weight, head.bias": (
        lambda rank: lifecycle.unfreeze(Buckets(frozen="head"))
    ),
    "DDP: need the parameters to train": late_layer(Buckets),
    "DDP: need model.zero_grad() after an error in backward or in finish()": (
        lambda rank: lifecycle.failed_among_others(Buckets())
    ),
    "got gradients that the next ones would be added to": (
        lambda rank: lifecycle.failed_in_no_sync(Buckets())
    ),
    "need model.zero_grad() after": lambda rank: finished_after_fault(FindsUnused()),
    "NaiveDDP: need the parameters to train": late_layer(Naive),
    "got a change in the bucket of head.weight": lambda rank: changed_in_flight(Buckets()),
}


def test_what_an_engine_cannot_follow_is_told_in_one_sentence(pools):
    assert_told(pools, 2, TOLD)


@pytest.mark.parametrize("loop", [Naive, Buckets])
def test_gradients_are_clipped_after_finish_and_in_no_sync(pools, loop):
    def clip_twice(rank):
        made = loop()
        with made.no_sync():
            clipped_before_finish(made)
        made.module.zero_grad()
        made.loss().backward()
        made.finish()
        return [nn.utils.clip_grad_norm_(made.module.parameters(), 1e-3) for _ in range(2)][1]

    norms = pools(2).run(clip_twice)
    assert norms[0] == norms[1] == pytest.approx(1e-3, rel=1e-2)


def test_an_average_of_the_plain_modules_weights_is_that_of_one_process(pools):
    def averaged(made):
        average = AveragedModel(made.module)
        for _ in range(2):
            made.zero_grad()
            made.step()
            average.update_parameters(made.module)
        return average.state_dict()

    wanted = averaged(Loop())
    for found in pools(2).run(lambda rank: averaged(Buckets())):
        torch.testing.assert_close(found, wanted, **lifecycle.TOLERANCE)
