"""The experiment of lesson 02: exact noise, steps by batch size, and its two pictures."""

import itertools

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from course_lib.accumulation import batch_sizes as sizes
from course_lib.accumulation.noise_scale import NoiseEstimate, noise_scale
from course_lib.accumulation.pictures import batch_tradeoff, noise_growth
from course_lib.models.data import mixed_seed


def test_exact_noise_equals_brute_force_over_all_pairs():
    """Gradients of all 64 * 64 pairs of a token and its successor, each with its probability."""
    model = sizes.Bigram(3)
    pairs = torch.tensor(list(itertools.product(range(sizes.VOCAB), repeat=2)))

    def loss(params, token, successor):
        return F.cross_entropy(functional_call(model, params, (token,)), successor)

    params = {name: param.detach() for name, param in model.named_parameters()}
    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, pairs[:, 0], pairs[:, 1])
    flat = torch.cat([part.flatten(1) for part in each.values()], dim=1)
    weights = sizes._joint().flatten()
    mean = weights @ flat
    found = sizes.exact_noise(model)
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert found.grad_sq == pytest.approx(mean.pow(2).sum().item(), rel=1e-4)
    total = (weights @ flat.pow(2).sum(1)).item()
    assert found.noise == pytest.approx(total - mean.pow(2).sum().item(), rel=1e-4)


def test_the_data_follow_their_distribution():
    tokens, successors = sizes.token_pairs(200_000, torch.Generator().manual_seed(0))
    counts = torch.zeros(sizes.VOCAB, sizes.VOCAB)
    counts.index_put_((tokens, successors), torch.ones(len(tokens)), accumulate=True)
    assert (counts / len(tokens) - sizes._joint()).abs().max() < 0.005


def test_estimates_agree_with_the_exact_noise_for_every_seed():
    for seed in range(5):
        run = sizes.noise_on_the_way(2.2, seed=seed)
        found = noise_scale(point.estimate for point in run)
        exact = noise_scale(point.exact for point in run)
        assert found == pytest.approx(exact, rel=0.25)
        assert 40 < found < 90
        assert exact > 1.5 * noise_scale(point.exact for point in run[:3])  # it grows


def test_a_batched_run_takes_the_steps_of_one_model():
    sweep = sizes.steps_to_loss(3.0, [8], rates=(1.0,), seeds=(4,))
    model, random = sizes.Bigram(4), torch.Generator().manual_seed(mixed_seed(4, 8))
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=1.0), 0
    while sizes.exact_loss(model.embedding, model.head).item() > 3.0:
        tokens, successors = sizes.token_pairs(8, random)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), successors).backward()
        optimizer.step()
        steps += 1
    assert sweep.steps == ((float(steps),),)


def test_a_larger_batch_takes_fewer_steps_and_more_examples_and_a_higher_rate():
    sweep = sizes.steps_to_loss(2.8, [2, 16, 128], seeds=(0, 1))
    steps = sweep.mean_steps()
    assert steps[0] > 4 * steps[1] > 4 * steps[2]
    assert steps[1] < 6 * steps[2]
    assert list(sweep.rates) == sorted(sweep.rates)
    assert [each[0] for each in sweep.examples()] == [
        batch * each[0] for batch, each in zip((2, 16, 128), sweep.steps, strict=True)
    ]


def test_a_rate_that_never_arrives_is_inf():
    sweep = sizes.steps_to_loss(2.0, [1], rates=(64.0,), seeds=(0,), max_steps=20)
    assert sweep.steps == ((float("inf"),),)


def point(grad_sq, noise):
    estimate = NoiseEstimate(grad_sq=grad_sq, noise=noise)
    return sizes.NoisePoint(estimate=estimate, exact=estimate, loss=3.0)


def test_windows_average_before_the_ratio():
    run = [point(4.0, 10.0), point(1.0, 20.0), point(1.0, 30.0)]
    assert sizes.noise_windows([run, run], steps=2) == [(1.5, 6.0, [6.0, 6.0])]


def test_pictures_show_estimates_and_the_noise_scale():
    runs = {0.5: [[point(2.0, 20.0)] * 10, [point(1.0, 30.0)] * 12]}
    figure, alt = noise_growth(runs)
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([50 / 3] * 2)
    assert alt.endswith("from 17 to 17 at learning rate 0.5")
    sweep = sizes.Sweep(batches=(1, 64), rates=(0.5, 8.0), steps=((800.0, 700.0), (30.0, 25.0)))
    figure, alt = batch_tradeoff(sweep, 40.0)
    assert "noise scale 40" in " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "critical batch size is 46 items, the noise scale 40" in alt
    (steps, _, *_) = figure.axes[0].lines
    assert steps.get_ydata()[-1] == pytest.approx(27.5)  # the prediction meets the largest batch
