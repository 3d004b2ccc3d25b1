"""Mixed precision by hand: the bits of autocast and of GradScaler, and nothing is rounded away."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import split_micro_batches
from course_lib.core import CourseError
from course_lib.recompute import LossScale, MixedPrecisionOptimizer

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def batch(n, items=8):
    random = torch.Generator().manual_seed(n)
    return torch.randn(items, 6, generator=random), torch.randn(items, 3, generator=random)


def ours(dtype, make, factors, loss_scale, max_norm=None):
    """Masters, and which steps were taken, when step n's loss is multiplied by factors[n]."""
    model = mlp()
    masters = [param.detach().clone() for param in model.parameters()]
    model.to(dtype)
    optimizer = MixedPrecisionOptimizer(model.parameters(), make, loss_scale=loss_scale)
    with torch.no_grad():
        for master, exact in zip(optimizer.masters, masters, strict=True):
            master.copy_(exact)  # start from the same fp32 numbers as autocast
    trace = []
    for n, factor in enumerate(factors):
        x, y = batch(n)
        loss = F.mse_loss(model(x.to(dtype)).float(), y) * factor
        optimizer.scale(loss).backward()
        optimizer.step(max_norm)
        optimizer.zero_grad()
        trace.append(None if loss_scale is None else loss_scale.scale)
    return optimizer.masters, trace, model


def real(dtype, make, factors, scaler, max_norm=None):
    """The same with fp32 parameters, torch.autocast and, if given, torch's GradScaler."""
    model, trace = mlp(), []
    optimizer = make(model.parameters())
    for n, factor in enumerate(factors):
        x, y = batch(n)
        with torch.autocast("cpu", dtype=dtype):
            output = model(x)
        loss = F.mse_loss(output.float(), y) * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.append(scaler.get_scale() if scaler.is_enabled() else None)
    return list(model.parameters()), trace, model


@half
@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_the_masters_have_the_bits_of_autocast_and_grad_scaler(dtype, make, max_norm):
    factors = [1.0, 1.0, 1e6, 1.0, float("inf"), 1.0, 1.0, 1.0]  # 1e6 overflows in fp16 alone
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    loss_scale = LossScale(scale=2.0**8, interval=2)
    masters, trace, model = ours(dtype, make, factors, loss_scale, max_norm)
    theirs, their_trace, _ = real(dtype, make, factors, scaler, max_norm)
    assert trace == their_trace
    assert len(set(trace)) > 1
    for master, param in zip(masters, theirs, strict=True):
        assert torch.equal(master, param)
    for param, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(param, master.to(dtype))


def test_bf16_without_a_scale_has_the_bits_of_autocast():
    off = torch.amp.GradScaler("cpu", enabled=False)
    masters, _, _ = ours(torch.bfloat16, ADAMW, [1.0] * 5, None)
    theirs, _, _ = real(torch.bfloat16, ADAMW, [1.0] * 5, off)
    assert all(torch.equal(one, other) for one, other in zip(masters, theirs, strict=True))


def test_small_steps_are_lost_without_masters():
    def moved(optimizer_of):
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = optimizer_of([weight])
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().float()

    step = partial(torch.optim.SGD, lr=1e-3)
    assert torch.equal(moved(step), torch.ones(4))
    kept = moved(lambda params: MasterSteps(params, step))
    assert torch.equal(kept, torch.full((4,), 0.9).bfloat16().float())


class MasterSteps(MixedPrecisionOptimizer):
    """For a loop that does not clear gradients by itself."""

    def step(self, max_norm=None):
        stepped = super().step(max_norm)
        self.zero_grad()
        return stepped


def test_a_scale_saves_gradients_that_fp16_has_no_numbers_for():
    def grad_of(loss_scale):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
        optimizer = MixedPrecisionOptimizer([weight], SGD, loss_scale=loss_scale)
        optimizer.scale((weight * 2.0**-13).float().sum() * 2.0**-13).backward()
        assert optimizer.unscale()
        return optimizer.masters[0].grad.item()

    assert grad_of(None) == 0
    assert grad_of(LossScale()) == 2.0**-26


def test_the_gradients_are_true_ones_between_unscale_and_step():
    model, (x, y) = mlp(torch.bfloat16), batch(0)
    optimizer = MixedPrecisionOptimizer(model.parameters(), SGD, loss_scale=LossScale())
    optimizer.scale(F.mse_loss(model(x.bfloat16()).float(), y)).backward()
    assert optimizer.unscale()
    assert optimizer.unscale()  # the second time divides by nothing
    plain = mlp(torch.bfloat16)
    F.mse_loss(plain(x.bfloat16()).float(), y).backward()
    for master, param in zip(optimizer.masters, plain.parameters(), strict=True):
        assert torch.equal(master.grad, param.grad.float())


def test_micro_batches_add_up_in_fp32():
    """bf16 has 8 bits: 256 + 1 is 256 again."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MixedPrecisionOptimizer([weight], SGD)
    for factor in (256.0, 1.0, 1.0, 1.0):
        (weight * factor).sum().backward()
        optimizer.collect()
        assert weight.grad is None
    assert optimizer.masters[0].grad.item() == 259
    for factor in (256.0, 1.0, 1.0, 1.0):
        (weight * factor).sum().backward()
    assert weight.grad.item() == 256


def test_accumulated_micro_batches_equal_the_full_batch():
    def grads(num_micro_batches):
        model, (x, y) = mlp(torch.bfloat16), batch(3)
        optimizer = MixedPrecisionOptimizer(model.parameters(), SGD, loss_scale=LossScale())
        for part_x, part_y in split_micro_batches((x.bfloat16(), y), num_micro_batches):
            loss = F.mse_loss(model(part_x).float(), part_y) / num_micro_batches
            optimizer.scale(loss).backward()
            optimizer.collect()
        optimizer.unscale()
        return torch.cat([master.grad.flatten() for master in optimizer.masters])

    # each micro-batch's gradient is rounded to bf16 once: 8 bits of each part
    torch.testing.assert_close(grads(4), grads(1), rtol=2**-7, atol=2e-3)


def test_frozen_tied_and_fp32_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model.bfloat16()
    model[1].float()
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    optimizer = MixedPrecisionOptimizer(model.parameters(), SGD)
    own = [
        master is param for master, param in zip(optimizer.masters, optimizer.params, strict=True)
    ]
    assert len(optimizer.masters) == 5
    assert sum(own) == 2
    before = [param.detach().clone() for param in model.parameters()]
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    hidden = model[1](model[0](x).float()).bfloat16()
    (model[3](model[2](hidden)).float() * torch.arange(4)).sum().backward()
    assert optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [True] * 5 + [False] * 2


def test_a_restart_goes_on_with_the_same_bits():
    def steps(model, optimizer, ns):
        for n in ns:
            x, y = batch(n)
            optimizer.scale(F.mse_loss(model(x.bfloat16()).float(), y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh():
        model = mlp(torch.bfloat16)
        scale = LossScale(scale=4.0, interval=3)
        return model, MixedPrecisionOptimizer(model.parameters(), ADAMW, loss_scale=scale)

    straight, restarted = fresh(), fresh()
    steps(*straight, range(5))
    stopped = fresh()
    steps(*stopped, range(2))
    restarted[1].load_state_dict(stopped[1].state_dict())
    steps(*restarted, range(2, 5))
    for one, other in zip(straight[1].masters, restarted[1].masters, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(straight[0].parameters(), restarted[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert straight[1].loss_scale == restarted[1].loss_scale


def test_schedules_see_the_inner_groups():
    optimizer = MixedPrecisionOptimizer(mlp(torch.bfloat16).parameters(), SGD)
    optimizer.param_groups[0]["lr"] = 0.125
    assert optimizer.inner.param_groups[0]["lr"] == 0.125


def test_bad_use_is_told():
    with pytest.raises(CourseError, match="need a parameter that requires a gradient; got none"):
        MixedPrecisionOptimizer([], SGD)
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MixedPrecisionOptimizer([weight], SGD)
    weight.sum().backward()
    optimizer.step()
    weight.sum().backward()
    with pytest.raises(CourseError, match=r"need zero_grad\(\) before the next backward"):
        optimizer.step()
    state = optimizer.state_dict() | {"masters": []}
    with pytest.raises(CourseError, match="the state of 1 parameters; got one of 0"):
        optimizer.load_state_dict(state)
