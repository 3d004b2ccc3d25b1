"""Recompute: the same numbers to the last bit, and only the promised bytes are kept."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.core import CourseError
from course_lib.core.specs import ModelSpec
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import (
    recompute,
    recompute_full,
    recompute_none,
    recompute_segments,
    recompute_selective,
    recompute_some,
)

SPEC = ModelSpec(hidden=32, num_layers=4, num_heads=4, ffn_hidden=64, vocab=40, max_seq=12)
STRATEGIES = {
    "selective": recompute_selective,
    "full": recompute_full,
    "segments of 2": lambda model: recompute_segments(model, 2),
    "segments of 3": lambda model: recompute_segments(model, 3),
    "every 2nd": lambda model: recompute_some(model, 2),
}
strategies = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def build(dropout=0.1, flash=False):
    torch.manual_seed(5)
    return GPT(SPEC, flash=flash, dropout=dropout)


def trained(model, num_steps=3, autocast=False):
    """Losses, parameters and gradients after some steps of SGD, and the random state at the end."""
    torch.manual_seed(7)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for n in range(num_steps):
        inputs, targets = next_tokens(token_batch(n, batch=3, seq=12, vocab=40))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = token_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [param.grad for param in model.parameters()]
    return [*losses, *model.parameters(), *grads, torch.get_rng_state()]


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one is None) == (other is None), index
        assert one is None or torch.equal(one, other), index


@strategies
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_three_steps_are_equal_to_the_last_bit(strategy, autocast):
    model = build()
    strategy(model)
    assert_equal(trained(model, autocast=autocast), trained(build(), autocast=autocast))


@strategies
def test_frozen_and_tied_parameters(strategy):
    def frozen():
        model = build()
        model.blocks[0].requires_grad_(False)
        model.embedding.requires_grad_(False)  # so nothing that enters block 1 needs a gradient
        model.positions.requires_grad_(False)
        return model

    model = frozen()
    strategy(model)
    assert_equal(trained(model), trained(frozen()))
    assert model.blocks[1].mlp.up.weight.grad.abs().sum() > 0


def test_the_same_gradients_as_torch_checkpoint():
    def grads(wrap):
        torch.manual_seed(11)
        layer, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU()), torch.randn(4, 6)
        x.requires_grad_()
        wrap(layer, x).square().sum().backward()
        return [x.grad, *(param.grad for param in layer.parameters()), torch.get_rng_state()]

    expected = grads(lambda fn, x: checkpoint(fn, x, use_reentrant=False))
    assert_equal(grads(recompute), expected)
    assert_equal(grads(recompute), grads(lambda fn, x: fn(x)))


def saved_bytes(fn):
    """Bytes that autograd holds when `fn` has returned, each storage once."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = fn()
    del alive
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_only_the_input_is_kept():
    x = torch.randn(8, 32, requires_grad=True)
    weights = [torch.randn(32, 32) for _ in range(5)]

    def deep(x):
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    assert saved_bytes(lambda: deep(x)) == 10 * 32 * 32 * 4 // 2 + 5 * 8 * 32 * 4
    assert saved_bytes(lambda: recompute(deep, x)) == x.nbytes


@pytest.mark.parametrize(
    ("strategy", "block_inputs"),
    [(recompute_full, 4), (lambda m: recompute_segments(m, 2), 2)],
    ids=["full", "segments of 2"],
)
def test_blocks_keep_their_inputs_and_nothing_else(strategy, block_inputs):
    model, x = build().to(torch.bfloat16), torch.randn(2, 12, 32, dtype=torch.bfloat16)
    strategy(model)
    x.requires_grad_()
    assert saved_bytes(lambda: model.run_blocks(model.blocks, x)) == block_inputs * x.nbytes


def test_selective_keeps_all_but_the_scores():
    def kept(model):
        x = torch.randn(2, 12, 32, requires_grad=True)
        return saved_bytes(lambda: model.run_blocks(model.blocks, x))

    everything, selective = build(), build()
    recompute_selective(selective)
    scores, masks = 4 * 2 * 4 * 12 * 12, 2 * 4 * 12 * 12  # [batch, heads, seq, seq]
    assert kept(everything) - kept(selective) == 4 * (2 * scores + masks)


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        (recompute_none, [0, 1, 2, 3]),
        (recompute_full, [0, 1, 2, 3, 3, 2, 1, 0]),
        (lambda m: recompute_segments(m, 2), [0, 1, 2, 3, 2, 3, 0, 1]),
        (lambda m: recompute_segments(m, 3), [0, 1, 2, 3, 3, 0, 1, 2]),
        (lambda m: recompute_some(m, 3), [0, 1, 2, 3, 3, 0]),
    ],
    ids=["none", "full", "segments of 2", "segments of 3", "every 3rd"],
)
def test_which_blocks_run_and_when(strategy, calls):
    model, seen = build(dropout=0.0), []
    strategy(model)
    for index, block in enumerate(model.blocks):
        block.mlp.register_forward_hook(lambda *_, index=index: seen.append(index))
    trained(model, num_steps=1)
    assert seen == calls


def test_none_takes_back_every_strategy_and_copies_keep_theirs():
    model = build()
    for strategy in STRATEGIES.values():
        strategy(model)
    names = list(model.state_dict())
    copied = copy.deepcopy(model)
    assert_equal(trained(copied), trained(build()))
    recompute_none(model)
    assert "run_blocks" not in vars(model)
    assert names == list(build().state_dict())
    recompute_selective(model)
    copied = copy.deepcopy(model)
    assert copied.blocks[0].attention.attend.args[0].__self__ is copied.blocks[0].attention


class TestAnyFunction:
    def test_several_outputs_some_unused_and_arguments_that_are_no_tensors(self):
        def fn(x, power, y, flag, nothing):
            return x**power, "word", (y * x if flag else y), x.detach(), (x * 2).long(), nothing

        def grads(wrap):
            x, y = torch.arange(1.0, 4).requires_grad_(), torch.ones(3, requires_grad=True)
            cube, word, product, constant, whole, nothing = wrap(fn, x, 3, y, True, None)
            assert (word, nothing, whole.dtype) == ("word", None, torch.int64)
            assert not whole.requires_grad
            (cube.sum() + constant.sum()).backward()
            return [x.grad, y.grad if y.grad is not None else torch.zeros(3), product.detach()]

        assert_equal(grads(recompute), grads(lambda fn, *args: fn(*args)))

    def test_a_tensor_used_twice_and_a_view(self):
        def grads(wrap):
            x = torch.arange(6.0).requires_grad_()
            wrap(lambda a, b, c: a * b + c, x, x, x.view(2, 3).sum(0).repeat(2)).sum().backward()
            return [x.grad]

        assert_equal(grads(recompute), grads(lambda fn, *args: fn(*args)))

    def test_backward_twice_adds_up(self):
        x = torch.ones(3, requires_grad=True)
        layer = nn.Linear(3, 1)
        loss = recompute(layer, x).sum()
        loss.backward(retain_graph=True)
        once = layer.weight.grad.clone()
        loss.backward()
        assert torch.equal(layer.weight.grad, 2 * once)

    def test_one_inside_another(self):
        def grads(wrap):
            torch.manual_seed(0)
            layers = [nn.Linear(4, 4) for _ in range(3)]

            def inner(x):
                return F.dropout(layers[1](x).relu(), 0.5)

            x = torch.randn(2, 4, requires_grad=True)
            wrap(lambda x: layers[2](wrap(inner, layers[0](x))), x).sum().backward()
            return [x.grad, *(layer.weight.grad for layer in layers)]

        assert_equal(grads(recompute), grads(lambda fn, x: fn(x)))

    def test_without_gradients_it_is_just_the_function(self):
        calls = []
        with torch.no_grad():
            y = recompute(lambda x: calls.append(1) or x * 2, torch.ones(2, requires_grad=True))
        assert not y.requires_grad
        assert calls == [1]

    def test_random_numbers_go_on_as_if_nothing_had_happened(self):
        x = torch.ones(100, requires_grad=True)
        torch.manual_seed(1)
        y = recompute(lambda x: F.dropout(x, 0.5), x)
        between = torch.rand(5)
        y.sum().backward()
        after = torch.rand(5)
        torch.manual_seed(1)
        F.dropout(x, 0.5)
        assert_equal([between, after], [torch.rand(5), torch.rand(5)])
        assert torch.equal(x.grad, y.detach())  # the mask was drawn again, and is the same

    def test_autocast_is_remembered_where_backward_runs_outside(self):
        dtypes, layer = [], nn.Linear(4, 4)

        def fn(x):
            y = layer(x)
            dtypes.append(y.dtype)
            return y

        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = recompute(fn, torch.ones(2, 4, requires_grad=True))
        y.sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = recompute(fn, torch.ones(2, 4))
            with torch.autocast("cpu", enabled=False):
                recompute(fn, torch.ones(2, 4)).sum().backward()
            z.sum().backward()
        bf16, fp32 = torch.bfloat16, torch.float32
        assert dtypes == [bf16, bf16, bf16, fp32, fp32, bf16]

    def test_a_weight_used_inside_and_outside_under_autocast(self):
        """The cast made inside must not be what the use outside finds: it has no way back."""

        def grad(wrap, keep_casts):
            torch.manual_seed(0)
            layer, x = nn.Linear(4, 4), torch.randn(2, 4)
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=keep_casts):
                y = layer(wrap(layer, x))
            y.sum().backward()
            return [layer.weight.grad]

        # with one cast for both uses their gradients would be added in bf16, not in fp32
        assert_equal(grad(recompute, True), grad(lambda fn, x: fn(x), False))

    def test_an_input_changed_in_place_is_noticed(self):
        x = torch.ones(3, requires_grad=True) * 1
        y = recompute(torch.sin, x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_what_it_cannot_do_is_told(self):
        x, layer = torch.ones(3, requires_grad=True), nn.Linear(3, 3)
        with pytest.raises(CourseError, match="argument 0 is a list with tensors in it"):
            recompute(sum, [x, x])
        with pytest.raises(CourseError, match=r"need fn to return a tensor .* got dict"):
            recompute(lambda x: {"x": x}, x)
        with pytest.raises(CourseError, match=r"need loss.backward\(\); got torch.autograd.grad"):
            torch.autograd.grad(recompute(layer, x).sum(), [x])
        with pytest.raises(CourseError, match="need a number of blocks above 0; got 0"):
            recompute_segments(build(), 0)


@pytest.mark.parametrize("strategy", [recompute_full, recompute_selective])
def test_models_without_memory_are_recomputed_too(strategy):
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with torch.device("meta"):
        model = GPT(SPEC, flash=False, dropout=0.1)
    strategy(model)
    token_loss(model(tokens.to("meta")), tokens.to("meta")).backward()
    assert model.blocks[0].mlp.up.weight.grad.shape == (64, 32)
