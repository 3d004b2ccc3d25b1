"""The methods in one short file each keep the law of the engines that grew out of them."""

import copy
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.fsdp.whole import WholeFSDP
from course_lib.pipeline.whole import WholePipeline
from course_lib.zero.whole import WholeZeRO2
from tests.law.law import WORLDS, Replicas, assert_laws, ways
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAIN = ("one layer", "in place", "fewer rows than ranks", "blocks", "odd", "GPT, uneven")


class OneFileZeRO2(Replicas):
    name, reports = "ZeRO2 in one short file", ("output", "state")

    def optimize(self, cls, groups, settings):
        self.zero = WholeZeRO2(self.module, cls, **settings)
        return self.zero.optimizer

    def finish(self):
        """At most one whole gradient is in flight, and no part keeps a whole parameter alive."""
        assert len(self.zero.in_flight) <= 1
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in self.zero.shards)

    def step(self):
        self.zero.step()


class OneFileFSDP(Replicas):
    name, reports = "FSDP in one short file", ("output", "state")

    def wrap(self, module):
        blocks = getattr(module, "blocks", [])
        self.sharded = WholeFSDP(module, [x for x in blocks if isinstance(x, nn.Module)])
        return self.sharded

    def optimize(self, cls, groups, settings):
        return cls(self.sharded.shards, **settings)

    def finish(self):
        """Nothing is left to finish, and nothing is gathered."""
        units = self.sharded.units
        assert not any(unit.whole.untyped_storage().nbytes() for unit in units)

    def state(self):
        for unit in self.sharded.units:
            unit.gather()
        state = {name: x.clone() for name, x in self.module.state_dict().items()}
        for unit in self.sharded.units:
            unit.free()
        return state


@pytest.mark.parametrize("world_size", WORLDS)
def test_zero_in_one_file_has_the_numbers_of_one_process(pools, world_size):
    laws = ways((*PLAIN, "tied", "twice"), [{"optimizer": "sgd"}])
    assert_laws(pools(world_size).run, OneFileZeRO2, laws)


@pytest.mark.parametrize("world_size", WORLDS)
def test_fsdp_in_one_file_has_the_numbers_of_one_process(pools, world_size):
    assert_laws(pools(world_size).run, OneFileFSDP, ways(PLAIN, [{"optimizer": "sgd"}]))


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
def test_1f1b_in_one_file_has_the_numbers_of_one_process(pools, world_size):
    for m in (1, 2, 5):
        pools(world_size).run(pipelined, m)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 2)

    def forward(self, x, skip=False):
        for block in self.blocks:
            x = block(x)
        return x if skip else self.head(x)


def frozen(rank):
    WholeFSDP(Layers().requires_grad_(False))


def tied(rank):
    module = Layers()
    module.blocks[1].weight = module.blocks[0].weight
    WholeFSDP(module, module.blocks)


def half_a_unit(rank):
    model = WholeFSDP(Layers())
    for _ in range(2):
        model(torch.ones(1, 3), True).sum().backward()


def two_backwards(rank):
    module = Layers()
    _engine = WholeZeRO2(module, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()


def trained(wrap, use, before=lambda module: None):
    """A backward of a module under a method, and a use of both, and of what was there before."""

    def broken(rank):
        module = Layers()
        earlier = before(module)
        model = wrap(module)
        (model if isinstance(model, nn.Module) else module)(torch.ones(1, 3)).sum().backward()
        use(model, module, earlier)

    return broken


def fsdp(use, **how):
    return trained(WholeFSDP, use, **how)


def zero(use, **how):
    return trained(lambda module: WholeZeRO2(module, torch.optim.SGD, lr=0.1), use, **how)


def sgd_of(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def added_layer(model, module, _):
    module.blocks.append(nn.Linear(3, 3))
    model.step() if isinstance(model, WholeZeRO2) else model(torch.ones(1, 3))


def clip(params):
    return nn.utils.clip_grad_norm_(params, 1.0)


def two_graphs(model):
    model(torch.ones(1, 3)).sum().backward(create_graph=True)


TOLD = [
    ("WholeFSDP: need a model outside of a process group", fsdp(lambda m, *_: copy.deepcopy(m))),
    (
        "WholeFSDP: need weights inside the forward of their unit",
        fsdp(lambda m, module, _: copy.deepcopy(module)),
    ),
    ("got one that is used outside", fsdp(lambda m, *_: m.state_dict())),
    ("one that is used outside. Try the whole model", fsdp(lambda m, *_: m.to(torch.bfloat16))),
    ("got torch.nn.utils.clip_grad_norm_", fsdp(lambda m, *_: clip(m.shards))),
    ("got grad.norm()", fsdp(lambda m, *_: m.shards[0].grad.norm())),
    ("got optimizer.step(), which sees", fsdp(lambda m, _, sgd: sgd.step(), before=sgd_of)),
    ("Try an optimizer of model.shards", fsdp(lambda m, _, sgd: sgd.step(), before=sgd_of)),
    ("got module.zero_grad()", fsdp(lambda m, module, _: module.zero_grad())),
    ("got Muon", fsdp(lambda m, *_: torch.optim.Muon(m.parameters()))),
    (
        "with this rank's shard of the unit of blocks.0",
        fsdp(lambda m, *_: m.shards[0].sum().backward()),
    ),
    ("WholeFSDP: need the parameters to train when", fsdp(added_layer)),
    ("got create_graph=True", lambda rank: two_graphs(WholeFSDP(Layers()))),
    ("got torch.nn.utils.clip_grad_norm_", zero(lambda z, module, _: clip(module.parameters()))),
    ("Try step() of WholeZeRO2", zero(lambda z, _, sgd: sgd.step(), before=sgd_of)),
    ("got module.zero_grad(), which sees", zero(lambda z, module, _: module.zero_grad())),
    ("WholeZeRO2: need the parameters to train when", zero(added_layer)),
    ("WholeZeRO2: need a model outside", zero(lambda z, *_: copy.deepcopy(z))),
]


def test_what_would_be_another_number_is_told_in_one_sentence(pools):
    assert_refused(pools(2), TOLD)


def test_fsdp_in_one_file_clips_by_the_whole_norm(pools):
    def norm(rank):
        torch.manual_seed(0)
        model = WholeFSDP(Layers().double())
        model(torch.ones(1, 3).double()).sum().backward()
        return model.clip_grad_norm_(1.0)

    torch.manual_seed(0)
    alone = Layers().double()
    alone(torch.ones(1, 3).double()).sum().backward()
    wanted = clip(alone.parameters())
    for found in pools(2).run(norm):
        torch.testing.assert_close(found, wanted)


def test_zero_in_one_file_steps_what_was_loaded_into_the_module(pools):
    def loaded(rank):
        module = Layers()
        engine = WholeZeRO2(module, torch.optim.SGD, lr=0.0)
        state = {name: value * 2 for name, value in module.state_dict().items()}
        module.load_state_dict(state)
        module(torch.ones(1, 3)).sum().backward()
        engine.step()
        torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)

    pools(2).run(loaded)


def unequal(rank):
    x = torch.ones(3, 3).split(2)
    WholePipeline(nn.Linear(3, 3), F.mse_loss, x[0]).step(x, x)


def test_what_cannot_be_is_told_in_one_sentence(pools):
    table = [
        ("WholeFSDP: need parameters of one dtype that are all trained", frozen),
        ("and not tied; got others", tied),
        ("need a gradient of every parameter of a unit; got some without one", half_a_unit),
        ("WholeZeRO2: need one backward before each step; got a second gradient", two_backwards),
        (
            "need an optimizer that steps each number by itself",
            lambda rank: WholeZeRO2(Layers(), torch.optim.Muon),
        ),
        ("need as many inputs as targets, all equally large", unequal),
    ]
    assert_refused(pools(2), table)
