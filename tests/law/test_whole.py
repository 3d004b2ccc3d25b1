"""The methods on one screen keep the law of the engines that grew out of them."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.fsdp.whole import WholeFSDP
from course_lib.pipeline.whole import WholePipeline
from course_lib.ranks import RankError
from course_lib.zero.whole import WholeZeRO2
from tests.law.law import WORLDS, Replicas, assert_laws, ways

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAIN = ("one layer", "in place", "fewer rows than ranks", "blocks", "odd", "GPT, uneven")


class OneScreenZeRO2(Replicas):
    name, reports = "ZeRO2 on one screen", ("output", "state")

    def optimize(self, cls, groups, settings):
        self.zero = WholeZeRO2(self.module, cls, **settings)
        return self.zero.optimizer

    def finish(self):
        """Nothing is left to finish."""

    def step(self):
        self.zero.step()


class OneScreenFSDP(Replicas):
    name, reports = "FSDP on one screen", ("output", "state")

    def wrap(self, module):
        blocks = getattr(module, "blocks", [])
        self.sharded = WholeFSDP(module, [x for x in blocks if isinstance(x, nn.Module)])
        return self.sharded

    def optimize(self, cls, groups, settings):
        return cls(self.sharded.shards, **settings)

    def finish(self):
        """Nothing is left to finish, and nothing is gathered."""
        units = {param._unit for param in self.module.parameters()}
        assert not any(unit.whole.untyped_storage().nbytes() for unit in units)

    def state(self):
        for unit in {param._unit: None for param in self.module.parameters()}:
            unit.gather()
        state = {name: x.clone() for name, x in self.module.state_dict().items()}
        for param in self.module.parameters():
            param._unit.free()
        return state


@pytest.mark.parametrize("world_size", WORLDS)
def test_zero_on_one_screen_has_the_numbers_of_one_process(pools, world_size):
    laws = ways((*PLAIN, "tied", "twice"), [{"optimizer": "sgd"}])
    assert_laws(pools(world_size).run, OneScreenZeRO2, laws)


@pytest.mark.parametrize("world_size", WORLDS)
def test_fsdp_on_one_screen_has_the_numbers_of_one_process(pools, world_size):
    assert_laws(pools(world_size).run, OneScreenFSDP, ways(PLAIN, [{"optimizer": "sgd"}]))


def pipelined(rank, m):
    """The loss, and this stage's gradients; None where it has no backward."""
    p = dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(p)]
    x, y = (torch.randn(2 * m, 3).double().chunk(m) for _ in "xy")
    loss = WholePipeline(layers[rank], F.mse_loss, x[0]).step(x, y)
    whole = F.mse_loss(nn.Sequential(*layers)(torch.cat(x)), torch.cat(y))
    wanted = torch.autograd.grad(whole, layers[rank].parameters())
    torch.testing.assert_close([p.grad for p in layers[rank].parameters()], [*wanted])
    assert (loss is None) == (rank < p - 1)
    if loss is not None:
        torch.testing.assert_close(loss, whole)


@pytest.mark.parametrize("world_size", WORLDS)
def test_1f1b_on_one_screen_has_the_numbers_of_one_process(pools, world_size):
    for m in (1, 2, 5):
        pools(world_size).run(pipelined, m)


def test_micro_batches_of_unequal_sizes_are_refused(pools):
    def step(rank):
        x = torch.ones(3, 3).split(2)
        WholePipeline(nn.Linear(3, 3), F.mse_loss, x[0]).step(x, x)

    with pytest.raises(RankError, match=r"need as many inputs as targets, all equally large"):
        pools(2).run(step)
