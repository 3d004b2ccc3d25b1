"""The model is the one its spec describes and keeps what it says; tokens follow from a seed."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from course_lib.core import CourseError, ShapeError
from course_lib.core.specs import LatentAttention, ModelSpec, Rope
from course_lib.models import BERT, GPT, IGNORED, next_tokens, padded_batch, token_batch, token_loss
from course_lib.models.gpt import Attention, Block, Dropout, Rotary

SIZES = {"hidden": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden": 48, "vocab": 50}
GPT2 = ModelSpec(**SIZES, max_seq=16)
LLAMA = ModelSpec(
    **SIZES,
    max_seq=16,
    num_kv_heads=2,
    tied=False,
    gated=True,
    norm="rms",
    positions="rope",
    bias=False,
)
both = pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=["gpt2", "llama"])


def build(spec, **options):
    torch.manual_seed(3)
    return GPT(spec, **options)


def tokens_of(spec, n=0, batch=3):
    return next_tokens(token_batch(n, batch=batch, seq=spec.max_seq, vocab=spec.vocab))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (GPT2, (50 + 16) * 32 + 2 * (4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32) + 64),
        (LLAMA, 2 * 50 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32),
    ],
    ids=["gpt2", "llama"],
)
def test_the_parameters_are_those_of_the_spec(spec, expected):
    model = build(spec)
    assert sum(param.numel() for param in model.parameters()) == expected
    assert (model.head.weight is model.embedding.weight) == spec.tied


@both
def test_written_out_attention_equals_flash(spec):
    inputs, targets = tokens_of(spec)
    losses, grads = [], []
    for flash in (True, False):
        model = build(spec, flash=flash).double()
        loss = token_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss)
        grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-14)  # other order of sums in softmax


@both
@pytest.mark.parametrize("flash", [True, False])
def test_no_token_sees_the_future(spec, flash):
    model, (inputs, _) = build(spec, flash=flash).double(), tokens_of(spec)
    changed = inputs.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % spec.vocab
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


def test_shared_keys_equal_repeated_keys():
    torch.manual_seed(0)
    attention = Attention(LLAMA, flash=False).double()
    q = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 6, 8, dtype=torch.float64).unbind()
    repeated = (x.repeat_interleave(2, dim=1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated, is_causal=True)
    torch.testing.assert_close(attention.attend(q, k, v), expected, rtol=1e-12, atol=1e-14)


def test_rotary_scores_depend_on_the_distance_alone():
    turn = Rotary(LLAMA).double()
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 16, 8).unbind()
    scores = (turn(q) @ turn(k).transpose(-2, -1))[0, 0]
    for distance in range(-3, 4):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)


def test_what_is_turned_keeps_its_dtype_and_is_rounded_once():
    torch.manual_seed(0)
    turn, x = Rotary(LLAMA), torch.randn(2, 4, 16, 8).bfloat16()
    assert torch.equal(turn(x), turn(x.float()).bfloat16())


@both
def test_a_model_learns_the_rule_in_the_tokens(spec):
    model = build(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for n in range(60):
        inputs, targets = tokens_of(spec, n, batch=16)
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(spec.vocab), abs=0.1)
    assert losses[-1] < 0.7 * losses[0]


def test_dropout_keeps_the_mean_and_one_byte_a_number():
    torch.manual_seed(0)
    drop, saved = Dropout(0.25), []
    x = torch.ones(10_000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = drop(x)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert y.mean().item() == pytest.approx(1, abs=0.03)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.bool, 10_000)]
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert drop.eval()(x) is x


def saved_bytes(module, x):
    """Bytes that autograd keeps for backward, each storage once, parameters left out."""
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # keeps it alive: no address twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


@pytest.mark.parametrize(("flash", "dropout"), [(True, 0.0), (False, 0.0), (False, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_keeps_what_its_docstrings_say(flash, dropout, dtype):
    spec = ModelSpec(**SIZES | {"ffn_hidden": 128}, max_seq=16)
    block, (b, s, h, a) = Block(spec, flash=flash, dropout=dropout).to(dtype), (3, 16, 32, 4)
    kept = saved_bytes(block, torch.randn(b, s, h, dtype=dtype, requires_grad=True))
    numbers = 16 * b * s * h + 4 * b * s + (0 if flash else (2 if dropout else 1) * b * a * s * s)
    masks = (2 * b * s * h + b * a * s * s) if dropout else 0
    assert kept == numbers * dtype.itemsize + masks + (4 * b * a * s if flash else 0)


def test_batch_n_is_a_function_of_seed_and_n():
    def make(n, seed=0):
        return token_batch(n, batch=4, seq=8, vocab=50, seed=seed)

    first = make(5)
    make(6)
    assert torch.equal(first, make(5))
    assert first.shape == (4, 9)
    assert first.min() >= 0
    assert first.max() < 50
    several = [make(n, seed) for n in range(4) for seed in range(4)]
    assert len({tuple(tokens.flatten().tolist()) for tokens in several}) == 16
    assert torch.equal(token_batch(2**40, batch=1, seq=1, vocab=1), torch.zeros(1, 2).long())


def test_padded_targets_end_early_and_differ_in_length():
    inputs, targets = padded_batch(0, batch=16, seq=12, vocab=50)
    lengths = (targets != IGNORED).sum(dim=1)
    assert lengths.min() >= 1
    assert len(set(lengths.tolist())) > 4
    for row, length in zip(range(16), lengths, strict=True):
        assert torch.equal(targets[row, : length - 1], inputs[row, 1:length])
    logits = torch.randn(16, 12, 50)
    one_by_one = F.cross_entropy(logits[targets != IGNORED], targets[targets != IGNORED])
    torch.testing.assert_close(token_loss(logits, targets), one_by_one)


def test_bad_input_is_told():
    with pytest.raises(ShapeError, match="need at most max_seq = 16 tokens a sequence; got 17"):
        build(GPT2)(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(CourseError, match="need a probability"):
        Dropout(1.0)
    with pytest.raises(ShapeError, match="batch, seq, vocab >= 1"):
        token_batch(0, batch=0, seq=1, vocab=1)
    with pytest.raises(ShapeError, match="need an even head_dim; got 3"):
        Rotary(ModelSpec(**SIZES | {"hidden": 12, "num_heads": 4}, max_seq=4))


@both
def test_it_is_built_without_memory_on_the_meta_device(spec):
    with torch.device("meta"):
        model = GPT(spec)
        logits = model(torch.zeros(2, 8, dtype=torch.long))
    assert logits.shape == (2, 8, 50)
    assert all(param.is_meta for param in model.parameters())


NOT_BUILT = {
    "latent": LatentAttention(q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4),
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
    "sinks": True,
    "norms_per_layer": 4,
    "positions": "none",
    "qk_norm": "whole",
    "extras": ("a SwiGLU that is clamped",),
}


@pytest.mark.parametrize("field", [*NOT_BUILT, "chunked", "rope"])
def test_what_is_not_built_is_refused_by_name(field):
    spec = replace(LLAMA, num_kv_heads=None)
    if field == "chunked":
        spec = replace(spec, window=4, chunked=True)
    elif field == "rope":
        spec = replace(spec, rope=Rope(scaling=(("rope_type", "yarn"), ("factor", 4.0))))
    else:
        spec = replace(spec, **{field: NOT_BUILT[field]})
    for build_it in (GPT, BERT):
        with pytest.raises(CourseError, match=rf"^(GPT|BERT): need {field} .*Try replace\(spec"):
            build_it(spec)


def test_a_window_of_all_tokens_changes_nothing():
    inputs, _ = tokens_of(LLAMA)
    wanted = build(LLAMA)(inputs)
    assert torch.equal(build(replace(LLAMA, window=16))(inputs), wanted)
    found = build(replace(LLAMA, window=15))(inputs)
    torch.testing.assert_close(found[:, :15], wanted[:, :15], rtol=0, atol=1e-6)
    assert (found[:, 15] - wanted[:, 15]).abs().max() > 1e-5  # it does not see the first token


@pytest.mark.parametrize("flash", [True, False])
def test_a_token_sees_its_window_and_nothing_before(flash):
    """Through two layers with a window of 3, a token depends on the four before it."""
    spec = replace(LLAMA, window=3)
    model, (inputs, _) = build(spec, flash=flash).double(), tokens_of(spec)
    changed = inputs.clone()
    changed[:, 5] = (changed[:, 5] + 1) % spec.vocab
    apart = (model(inputs) - model(changed)).abs().amax(dim=(0, 2))
    assert [n for n, one in enumerate(apart) if one > 1e-9] == [5, 6, 7, 8, 9]
