"""The gradient noise scale: unbiased, equal to brute force, and what the lesson says of it."""

import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import accumulate_gradients
from course_lib.accumulation.noise_scale import (
    NoiseEstimate,
    Tradeoff,
    accumulate_with_noise,
    estimate_noise,
    fit_tradeoff,
    noise_scale,
)
from course_lib.core import CourseError, ShapeError

MEAN, STD = torch.tensor([3.0, -1.0, 0.5]).double(), torch.tensor([1.0, 2.0, 0.5]).double()


class Point(nn.Module):
    """One point w; its loss 1/2 |w - x|^2 has the gradient w - x: G = w - mean, Sigma = std^2."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand_as(x)


def half_square(outputs, targets):
    return (outputs - targets).pow(2).sum(1).mean() / 2


def drawn(random, num=16):
    x = MEAN + STD * torch.randn(num, 3, generator=random, dtype=torch.float64)
    return x, x


def within_errors(values, truth, errors=4):
    error = statistics.stdev(values) / len(values) ** 0.5
    return abs(statistics.fmean(values) - truth) < errors * error


@pytest.mark.parametrize("num_micro_batches", [2, 4, 16])
def test_both_estimates_are_unbiased(num_micro_batches):
    random = torch.Generator().manual_seed(num_micro_batches)
    model = Point()
    seen = [
        accumulate_with_noise(model, half_square, drawn(random), num_micro_batches)
        for _ in range(400)
    ]
    grad_sq, noise = MEAN.pow(2).sum().item(), STD.pow(2).sum().item()
    assert within_errors([one.grad_sq for one in seen], grad_sq)
    assert within_errors([one.noise for one in seen], noise)
    assert noise_scale(seen) == pytest.approx(noise / grad_sq, rel=0.1)


def test_without_subtraction_the_estimate_would_be_biased():
    """The norm of the whole batch alone is too large by tr(Sigma) / B."""
    random = torch.Generator().manual_seed(5)
    norms = [(drawn(random)[0].mean(0)).pow(2).sum().item() for _ in range(4000)]
    truth, extra = MEAN.pow(2).sum().item(), STD.pow(2).sum().item() / 16
    assert not within_errors(norms, truth)
    assert within_errors(norms, truth + extra)


def mlp():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()


def batch_of(num, seed=0):
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 5, generator=random, dtype=torch.float64)
    return inputs, torch.randint(3, (num,), generator=random)


def gradient_of(model, inputs, targets):
    model.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def test_single_items_give_the_sample_variance():
    model, (inputs, targets) = mlp(), batch_of(12)
    each = torch.stack(
        [gradient_of(model, inputs[i : i + 1], targets[i : i + 1]) for i in range(12)]
    )
    found = accumulate_with_noise(model, F.cross_entropy, (inputs, targets), 12)
    noise = each.var(0).sum().item()
    assert found.noise == pytest.approx(noise, rel=1e-10)
    assert found.grad_sq == pytest.approx(each.mean(0).pow(2).sum().item() - noise / 12, rel=1e-10)


def test_the_gradient_is_that_of_accumulation():
    one, other, batch = mlp(), mlp(), batch_of(12)
    one[0].bias.requires_grad_(False)
    other[0].bias.requires_grad_(False)
    accumulate_with_noise(one, F.cross_entropy, batch, 3)
    accumulate_gradients(other, F.cross_entropy, batch, 3)
    assert one[0].bias.grad is None
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-14)


def test_a_factor_on_the_loss_cancels():
    batch = batch_of(12)
    one = accumulate_with_noise(mlp(), F.cross_entropy, batch, 4)
    ten = accumulate_with_noise(mlp(), lambda *pair: 10 * F.cross_entropy(*pair), batch, 4)
    assert ten.noise == pytest.approx(100 * one.noise)
    assert noise_scale([ten]) == pytest.approx(noise_scale([one]))


def test_the_order_of_micro_batches_and_of_their_items_does_not_matter():
    inputs, targets = batch_of(12)
    order = torch.tensor([5, 4, 3, 0, 2, 1, 11, 9, 10, 7, 6, 8])  # the first two parts swapped
    one = accumulate_with_noise(mlp(), F.cross_entropy, (inputs, targets), 4)
    other = accumulate_with_noise(mlp(), F.cross_entropy, (inputs[order], targets[order]), 4)
    assert other.noise == pytest.approx(one.noise, rel=1e-10)
    assert other.grad_sq == pytest.approx(one.grad_sq, rel=1e-10)


def test_equal_items_have_no_noise():
    inputs, targets = batch_of(1)
    batch = inputs.expand(8, 5), targets.expand(8)
    found = accumulate_with_noise(mlp(), F.cross_entropy, batch, 4)
    assert abs(found.noise) < 1e-12 * found.grad_sq
    assert found.grad_sq == pytest.approx(gradient_of(mlp(), inputs, targets).pow(2).sum().item())


def test_known_norms_give_known_numbers():
    """|G|^2 = 3 and tr(Sigma) = 40: 3 + 40 / 2 and 3 + 40 / 8."""
    found = estimate_noise(23.0, 8.0, small_batch=2, big_batch=8)
    assert (found.grad_sq, found.noise) == pytest.approx((3.0, 40.0))


def test_averages_come_before_the_ratio():
    seen = [NoiseEstimate(grad_sq=4.0, noise=10.0), NoiseEstimate(grad_sq=-1.0, noise=20.0)]
    assert noise_scale(seen) == pytest.approx(10.0)  # the mean of the ratios is -8.75
    assert noise_scale(seen[1:]) == float("inf")


def test_at_the_critical_batch_size_both_costs_are_twice_the_least():
    law = Tradeoff(min_steps=20.0, critical_batch=50.0)
    assert law.steps(50) == 2 * law.min_steps
    assert law.examples(50) == 2 * law.min_examples
    for batch in (1, 7, 50, 4000):
        steps, examples = law.steps(batch) / 20 - 1, law.examples(batch) / law.min_examples - 1
        assert steps * examples == pytest.approx(1.0)


def test_a_fit_finds_the_law_that_made_the_steps():
    law, batches = Tradeoff(min_steps=18.0, critical_batch=40.0), [2**n for n in range(10)]
    found = fit_tradeoff(batches, [law.steps(batch) for batch in batches])
    assert (found.min_steps, found.critical_batch) == pytest.approx((18.0, 40.0))


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(CourseError, match="0 < small_batch < big_batch; got 8 and 8"):
        estimate_noise(1.0, 1.0, small_batch=8, big_batch=8)
    with pytest.raises(CourseError, match="at least one"):
        noise_scale([])
    with pytest.raises(CourseError, match="two batch sizes"):
        fit_tradeoff([4], [10])
    for parts in (1, 5):
        with pytest.raises(ShapeError, match="equal size"):
            accumulate_with_noise(mlp(), F.cross_entropy, batch_of(12), parts)
