"""Code that needs the whole gradient is refused where a rank has a part of it, or is right."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, AdamW, NAdam
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from course_lib.core.errors import CourseError
from course_lib.fsdp import FSDP
from course_lib.zero import ShardedOptimizer, ZeRO1, ZeRO2, ZeRO3

ENGINES = {"ZeRO1": ZeRO1, "ZeRO2": ZeRO2, "ZeRO3": ZeRO3}
clip = nn.utils.clip_grad_norm_


def net():
    torch.manual_seed(0)
    return nn.Linear(2, 4, bias=False)


def after_backward(name, scale=1.0):
    """A model with gradients, and its optimizer: `infinite` in the second rank's row only."""
    module = net()
    if name == "FSDP":
        model = FSDP(module)
        optimizer = SGD(model.parameters(), lr=0.1)
    else:
        model = ENGINES[name](module, SGD, lr=0.1)
        optimizer = model.optimizer
    (model(torch.ones(1, 2)) * torch.arange(4.0) * scale).sum().backward()
    return model, module, optimizer


def torch_clip(name):
    model, module, _ = after_backward(name)
    clip(list(model.parameters() if name == "FSDP" else module.parameters()), 1.0)


def torch_scaler(name):
    _, _, optimizer = after_backward(name)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))  # as a loss
    scaler.step(optimizer)


@pytest.mark.parametrize("reader", [torch_clip, torch_scaler])
@pytest.mark.parametrize("name", ["FSDP", *ENGINES])
def test_what_would_see_one_ranks_shards_is_refused(pools, reader, name):
    def told(rank):
        with pytest.raises(CourseError, match="need code that knows of the shards") as caught:
            reader(name)
        return str(caught.value)

    attempt = "clip_grad_norm_(max_norm)." if reader is torch_clip else "Try "
    for said in pools(2).run(told):
        assert attempt in said


def test_one_rank_has_the_whole_gradient_under_fsdp(pools):
    def norm(rank):
        return clip(after_backward("FSDP")[0].parameters(), 1.0).item()

    assert pools(1).run(norm) == pytest.approx([28**0.5])


def test_all_ranks_skip_a_step_together_with_the_sharded_scaler(pools):
    def moved(rank):
        model = FSDP(net())
        before = [shard.detach().clone() for shard in model.parameters()]
        optimizer, scaler = SGD(model.parameters(), lr=0.1), ShardedGradScaler("cpu", 2.0)
        factors = torch.tensor([1.0, 1.0, 1.0, float("inf")])  # a row of the last rank's shard
        scaler.scale((model(torch.ones(1, 2)) * factors).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        return any(not torch.equal(old, new) for old, new in pairs), scaler.get_scale()

    assert pools(2).run(moved) == [(False, 1.0)] * 2


class SignSGD(torch.optim.Optimizer):
    """An optimizer of a learner, which says of itself that it steps each number alone."""

    elementwise = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("optimizer_cls", [SignSGD, NAdam])
def test_an_elementwise_optimizer_steps_shards_as_one_process(pools, optimizer_cls):
    def weights(rank, sharded):
        module = net()
        model = FSDP(module) if sharded else module
        optimizer = optimizer_cls(model.parameters(), lr=0.1)
        (model(torch.ones(1, 2)) * torch.arange(1.0, 5)).sum().backward()
        optimizer.step()
        return (model.full_state_dict() if sharded else module.state_dict())["weight"]

    sharded, whole = (pools(2).run(weights, how)[0] for how in (True, False))
    torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-7)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, 0.1, total_steps=6)


def cyclic(optimizer):
    return CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, base_momentum=0.5, max_momentum=0.9)


SCHEDULES = {
    "OneCycleLR": (one_cycle, AdamW, {}),
    "CyclicLR": (cyclic, SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("kind", ["ShardedOptimizer", "ZeRO1", "ZeRO3"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_that_cycle_momentum_find_the_defaults(pools, kind, name):
    make, optimizer_cls, settings = SCHEDULES[name]

    def weights(rank, kind):
        model, settings_ = net(), {"lr": 0.1, **settings}
        engine = None
        if kind == "plain":
            optimizer = optimizer_cls(model.parameters(), **settings_)
        elif kind == "ShardedOptimizer":
            optimizer = ShardedOptimizer(model.parameters(), optimizer_cls, **settings_)
        else:
            engine = ENGINES[kind](model, optimizer_cls, **settings_)
            optimizer = engine.optimizer
        schedule = make(optimizer)
        for _ in range(4):
            stepped = engine or optimizer
            stepped.zero_grad()
            output = (engine or model)(torch.ones(1, 2))
            (output * torch.arange(1.0, 5)).sum().backward()
            stepped.step()
            schedule.step()
        return engine.full_state_dict()["model"]["weight"] if engine else model.weight.detach()

    sharded, whole = (pools(2).run(weights, one)[0] for one in (kind, "plain"))
    torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-6)
