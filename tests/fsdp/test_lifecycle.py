"""FSDP in a training loop that does more than steps: the numbers of one process, or a sentence."""

import copy
import pickle
import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from course_lib.fsdp import FSDP
from course_lib.ranks import RankError
from tests import lifecycle
from tests.lifecycle import Loop, Net, assert_law, assert_told

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(lifecycle)


class Sharded(Loop):
    def wrap(self):
        self.model = FSDP(self.module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **self.SGD)

    def no_sync(self):
        return self.model.no_sync()

    def weights(self):
        return self.model.full_state_dict()


FROZEN = {"frozen": "head"}
LAW = [
    (lifecycle.failed_backward, {}, {}),
    (lifecycle.failed_backward, {}, {"set_to_none": False}),
    (lifecycle.failed_among_others, {}, {"clear": lambda loop: loop.model.zero_grad()}),
    (lifecycle.failed_in_no_sync, {}, {"clear": Loop.zero_grad}),
    (lifecycle.changed_through_data, {}, {}),
    (lifecycle.freeze_and_unfreeze, {}, {}),
    (lifecycle.freeze_what_is_gathered, {}, {}),
    (lifecycle.unfreeze, FROZEN, {}),
    (lifecycle.cleared_in_no_sync, {}, {}),
    (lifecycle.accumulated, {}, {}),
    (lifecycle.dropped, {}, {}),
    (lifecycle.steps, {"build": lifecycle.Penalizing}, {}),
    (lifecycle.hooked, {}, {}),
    (lifecycle.steps, {"build": lifecycle.Normed}, {}),
    (lifecycle.steps, {"build": lifecycle.Complex}, {}),
    (lifecycle.steps, {"build": lifecycle.InPlace}, {}),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", LAW, ids=lambda case: case[0].__name__)
def test_a_loop_that_does_more_ends_with_the_weights_of_one_process(pools, case, world_size):
    assert_law(pools, world_size, Sharded, *case)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, use_spare):
        x = torch.tanh(self.layer(x))
        return self.spare(x) if use_spare else x


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 3), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, use_spare, skip=None):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x, use_spare)
        return x


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": False}, {"reshard_after_forward": False}], ids=str
)
def test_parameters_that_a_rank_does_not_use_count_as_zero_there(pools, options):
    x = torch.arange(6.0).view(2, 3).double()

    def step(rank):
        torch.manual_seed(0)
        model = FSDP(Choice().double(), **options)
        for _ in range(2):  # the first step records the order of the units
            model.zero_grad()
            model(x, use_spare=rank == 1).sum().backward()
        return [param.grad for param in model.parameters()]

    torch.manual_seed(0)
    alone = Choice().double()
    sum(alone(x, use_spare).sum() / 2 for use_spare in (False, True)).backward()
    for shards in zip(*pools(2).run(step), list(alone.parameters()), strict=True):
        *found, whole = shards
        torch.testing.assert_close(torch.cat(found), whole.grad, **lifecycle.TOLERANCE)


def test_ranks_that_gather_other_units_are_told_both_names(pools):
    def step(rank):
        FSDP(Choice())(torch.ones(2, 3), use_spare=True, skip=1 + rank)

    with pytest.raises(RankError, match=r"(?s)all_gather .* of blocks.2\n.*all_gather .* blocks.1"):
        pools(2).run(step)


# --- what is told


def early(use):
    """What the gradients are used for before a backward outside of no_sync."""

    def loop(rank):
        loop = Sharded()
        with loop.no_sync():
            loop.loss().backward()
        use(loop)
        loop.loss().backward()

    return loop


def step_and_clear(loop):
    loop.optimizer.step()
    loop.zero_grad()


def late_layer(rank):
    model = FSDP(Net())
    model.module.head = nn.Sequential(model.module.head, nn.Linear(2, 2))
    model(torch.ones(1, 3))


def failed_after_reduced(loop):
    loop.loss().backward()
    lifecycle.fail(loop)
    loop.loss()


class Reader(Net):
    """It computes with a weight of a block, which is not gathered then."""

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.blocks[0].weight)[:, :2]


def clipped_by_hand(loop):
    loop.loss().backward()
    torch.stack([param.grad.norm() for param in loop.params()])


class Counts(nn.Linear):
    """It has a state that is no tensor."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_a_state_that_is_no_tensor_is_restored(pools):
    def counts(rank):
        model, others = FSDP(Counts(3, 3)), [FSDP(Counts(3, 3)) for _ in range(2)]
        model.module.count = 7
        others[0].load_full_state_dict(model.full_state_dict())
        others[1].load_state_dict(model.state_dict())
        return [other.module.count for other in others]

    assert pools(2).run(counts) == [[7, 7]] * 2


def test_the_whole_weights_of_a_call_of_the_module_are_new_ones(pools):
    """As that of a `generate`, which is a method of the module."""

    def outputs(rank):
        loop = Sharded()
        loop.loss().backward()
        x = torch.ones(1, 3).double()
        with torch.no_grad():
            loop.module(x)
            for shard in loop.params():
                shard.data.zero_()
            return loop.module(x).abs().max().item()

    assert pools(2).run(outputs) == [0, 0]


def read_in_evaluation(loop):
    with torch.no_grad():
        loop.loss()


TOLD = {
    "FSDP: need weights inside the forward of their unit, where they are gathered; got one that": (
        lambda rank: Sharded(Reader).loss()
    ),
    "that is used outside. Try units=": lambda rank: read_in_evaluation(Sharded(Reader)),
    "got one with this rank's shard of head.bias": (lambda rank: lifecycle.penalized(Sharded())),
    "got one of Linear alone, which has this rank's shard": (
        lambda rank: Sharded().module.head(torch.ones(1, 3).double())
    ),
    "FSDP: need a backward that computes gradients only; got create_graph=True": (
        lambda rank: Sharded().loss().backward(create_graph=True)
    ),
    "got that of the wrapped module, or of one around it, with this rank's shards": (
        lambda rank: Sharded().module.state_dict()
    ),
    "or of one around it": lambda rank: nn.ModuleDict({"g": Sharded().model}).state_dict(),
    "got the state of a plain module. Try load_full_state_dict": (
        lambda rank: Sharded().model.load_state_dict(Net().state_dict())
    ),
    "got grad.norm(), which sees this rank's alone": lambda rank: clipped_by_hand(Sharded()),
    "FSDP: need a model outside of a process group": lambda rank: copy.deepcopy(FSDP(Net())),
    "outside of a process group to copy": lambda rank: copy.deepcopy(FSDP(Net()).module),
    "process group to copy or pickle": lambda rank: AveragedModel(FSDP(Net())),
    "copy or pickle; got one": lambda rank: pickle.dumps(FSDP(Net())),
    "need a backward outside of no_sync()": early(lambda loop: loop.model.clip_grad_norm_(1.0)),
    "outside of no_sync() before the gradients are used": early(step_and_clear),
    "got blocks.1.weight, of which no_sync() keeps one": early(
        lambda loop: loop.zero_grad(set_to_none=False)
    ),
    "got head.1.weight, head.1.bias later": late_layer,
    "FSDP: need model.zero_grad() after a backward that raised an error": (
        lambda rank: lifecycle.failed_among_others(Sharded())
    ),
    "FSDP: need model.zero_grad() after": lambda rank: failed_after_reduced(Sharded()),
}


def test_what_an_engine_cannot_follow_is_told_in_one_sentence(pools):
    assert_told(pools, 2, TOLD)
