"""Accumulation: the numbers of the full batch, with the activations of one micro-batch."""

from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import (
    accumulate_gradients,
    accumulated_step,
    as_sum,
    by_tokens,
    count_micro_batches,
    split_micro_batches,
)
from course_lib.core import CourseError, ShapeError
from course_lib.core.specs import ModelSpec
from course_lib.models import GPT, IGNORED, padded_batch, token_loss

# float64: the sums over items run in another order, and mean * share rounds once more
TOLERANCE = {"rtol": 1e-11, "atol": 1e-14}
Pair = namedtuple("Pair", ["inputs", "targets"])


def tied_gpt():
    """A GPT whose head is its embedding, with one frozen block."""
    torch.manual_seed(1)
    sizes = {"hidden": 16, "num_layers": 2, "num_heads": 2, "ffn_hidden": 32}
    model = GPT(ModelSpec(**sizes, vocab=40, max_seq=6)).double()
    model.blocks[0].requires_grad_(False)
    return model


def mlp():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()


def full_step(model, loss_fn, optimizer, batch, max_norm=None):
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


def trained(build, step, batches, optimizer=torch.optim.SGD, **options):
    """Losses and parameters after one step a batch."""
    model = build()
    optimizer = optimizer(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, batch) for batch in batches]
    grads = [param.grad for param in model.parameters()]
    return torch.stack(losses).double(), list(model.parameters()), grads


def assert_same_as_full_batch(build, loss_fn, batches, num_micro_batches, **options):
    full = trained(
        build,
        lambda m, o, b: full_step(m, loss_fn, o, b, options.get("max_norm")),
        batches,
    )
    ours = trained(
        build,
        lambda m, o, b: accumulated_step(m, loss_fn, o, b, num_micro_batches, **options),
        batches,
    )
    torch.testing.assert_close(ours, full, **TOLERANCE)


def regression_batches(items):
    return [(torch.randn(items, 5).double(), torch.randn(items, 3).double()) for _ in range(3)]


@pytest.mark.parametrize(("items", "num_micro_batches"), [(8, 1), (8, 4), (7, 3), (5, 5), (10, 4)])
def test_three_steps_equal_those_of_the_full_batch(items, num_micro_batches):
    batches = regression_batches(items)
    assert_same_as_full_batch(mlp, F.mse_loss, batches, num_micro_batches)
    clipped = {"max_norm": 0.05}
    assert_same_as_full_batch(mlp, F.mse_loss, batches, num_micro_batches, **clipped)


@settings(max_examples=25)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_any_batch_in_any_parts(sizes):
    assert_same_as_full_batch(mlp, F.mse_loss, regression_batches(sizes[0]), sizes[1])


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7])
def test_tokens_are_weighed_with_tied_and_frozen_parameters(num_micro_batches):
    batches = [padded_batch(n, batch=7, seq=6, vocab=40) for n in range(3)]
    assert_same_as_full_batch(tied_gpt, token_loss, batches, num_micro_batches, share=by_tokens)
    frozen = tied_gpt().blocks[0].state_dict()
    model = tied_gpt()
    accumulated_step(model, token_loss, torch.optim.SGD(model.parameters(), lr=1.0), batches[0], 3)
    assert all(torch.equal(model.blocks[0].state_dict()[name], frozen[name]) for name in frozen)
    assert all(param.grad is None for param in model.blocks[0].parameters())


def test_a_mean_of_means_is_another_number_when_lengths_differ():
    batch = padded_batch(0, batch=7, seq=6, vocab=40)
    losses = [accumulate_gradients(tied_gpt(), token_loss, batch, 7, share=s) for s in SHARES]
    full = token_loss(tied_gpt()(batch[0]), batch[1])
    assert abs(losses[0] - full) < 1e-12
    assert abs(losses[1] - full) > 1e-3


SHARES = [by_tokens, lambda part, whole: len(part) / len(whole)]


def test_a_micro_batch_without_any_token_is_left_out():
    inputs, targets = padded_batch(0, batch=4, seq=6, vocab=40)
    targets[2:] = IGNORED
    assert_same_as_full_batch(tied_gpt, token_loss, [(inputs, targets)], 2, share=by_tokens)
    with pytest.raises(CourseError, match="need a target that is not IGNORED"):
        accumulate_gradients(
            tied_gpt(), token_loss, (inputs, targets.fill_(IGNORED)), 2, share=by_tokens
        )


def test_a_summed_loss_is_added_as_it_is():
    def squares(outputs, targets):
        return (outputs - targets).square().sum()

    assert_same_as_full_batch(mlp, squares, regression_batches(7), 3, share=as_sum)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
def test_numbers_that_need_no_rounding_are_equal_to_the_last_bit(num_micro_batches):
    def line():
        model = nn.Linear(3, 1).double()
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, -2.0, 4.0]]))
            model.bias.fill_(0.5)
        return model

    batch = torch.randint(-8, 8, (8, 3)).double(), torch.randint(-8, 8, (8, 1)).double()
    full, ours = line(), line()
    F.mse_loss(full(batch[0]), batch[1]).backward()
    accumulate_gradients(ours, F.mse_loss, batch, num_micro_batches)
    for expected, got in zip(full.parameters(), ours.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad)


def test_the_old_gradient_is_cleared_and_the_new_one_stays():
    model, (batch,) = mlp(), regression_batches(4)[:1]
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e3)
    accumulated_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), batch, 2)
    fresh = mlp()
    F.mse_loss(fresh(batch[0]), batch[1]).backward()
    for got, expected in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, **TOLERANCE)


def test_one_step_and_one_micro_batch_at_a_time():
    seen, model = [], mlp()
    model.register_forward_pre_hook(lambda _, args: seen.append(("forward", len(args[0]))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(("step", 0)))
    accumulated_step(model, F.mse_loss, optimizer, regression_batches(7)[0], 3)
    assert seen == [("forward", 3), ("forward", 2), ("forward", 2), ("step", 0)]


def test_batch_norm_sees_one_micro_batch_at_a_time():
    norm = nn.BatchNorm1d(3).double()
    whole = nn.BatchNorm1d(3).double()
    x, y = torch.randn(8, 3).double(), torch.randn(8, 3).double()
    F.mse_loss(whole(x), y).backward()
    accumulate_gradients(norm, F.mse_loss, (x, y), 4)
    assert (norm.weight.grad - whole.weight.grad).abs().max() > 1e-3


def test_the_same_numbers_as_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    (batch,) = regression_batches(8)[:1]
    theirs = mlp()
    model, optimizer = accelerator.prepare(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    for inputs, targets in split_micro_batches(batch, 4):
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    ours = mlp()
    accumulated_step(ours, F.mse_loss, torch.optim.SGD(ours.parameters(), lr=0.1), batch, 4)
    for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_micro_batches_are_built_like_the_batch():
    x = torch.arange(7)
    batch = {"x": x, "more": [x + 10, (x + 20, None)], "pair": Pair(x, x), "epoch": 3}
    parts = split_micro_batches(batch, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert parts[1]["more"][0].tolist() == [13, 14]
    assert parts[1]["more"][1][1] is None
    assert isinstance(parts[2]["pair"], Pair)
    assert [part["epoch"] for part in parts] == [3, 3, 3]
    assert parts[0]["x"].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("batch", "count", "says"),
    [
        ((torch.zeros(3), torch.zeros(4)), 2, "of one length above 0 along dim 0; got 3 and 4"),
        (torch.zeros(3), 4, "1 to 3 micro-batches for 3 items; got 4. Try 3"),
        (torch.zeros(3), 0, "got 0"),
        ((), 1, "no tensor"),
        (torch.zeros(()), 1, "got 0"),
        (torch.zeros(0, 3), 1, "got 0"),
    ],
)
def test_what_cannot_be_split_is_told(batch, count, says):
    with pytest.raises(ShapeError, match=says):
        split_micro_batches(batch, count)


def test_a_batch_that_is_no_pair_is_told():
    with pytest.raises(CourseError, match=r"need batch = \(inputs, targets\); got Tensor"):
        accumulate_gradients(mlp(), F.mse_loss, torch.zeros(2, 5), 1)


def test_the_arithmetic_of_batches():
    sequences = 4 * 2**20 // (4 * 2**10)
    assert count_micro_batches(sequences, micro_batch=2, dp=128) == 4
    assert count_micro_batches(sequences, micro_batch=2, dp=512) == 1
    with pytest.raises(ShapeError, match="need global_batch divisible by micro_batch"):
        count_micro_batches(10, 3)
