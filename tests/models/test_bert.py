"""BERT is the encoder of the paper, has the parameters of its spec, and guesses hidden words."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from course_lib.core import MODELS, CourseError, ModelSpec, ShapeError, find_model
from course_lib.core.presets import ENCODERS
from course_lib.cost.params import count_params
from course_lib.models import (
    BERT,
    GPT,
    IGNORED,
    mask_tokens,
    masked_accuracy,
    right_and_asked,
    token_batch,
    token_loss,
)
from course_lib.models.dialogues import MASK, SPECIAL, Dialogues, generated_dialogues
from course_lib.models.gpt import Attention

SPEC = ModelSpec(hidden=32, num_layers=2, num_heads=4, ffn_hidden=48, vocab=50, max_seq=16)


def build(spec=SPEC, **options):
    torch.manual_seed(3)
    return BERT(spec, **options)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# -- the presets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "spec", "millions", "digits"),
    [(GPT, MODELS["gpt2-char"], 27.32, 2), (BERT, ENCODERS["bert-dialogues"], 46.7, 1)],
    ids=["gpt2-char", "bert-dialogues"],
)
def test_a_preset_has_the_parameters_of_the_study(kind, spec, millions, digits):
    counted = sum(param.numel() for param in kind(spec).parameters())
    assert counted == count_params(spec)
    assert round(counted / 1e6, digits) == millions


def test_an_encoder_is_not_mistaken_for_a_decoder():
    with pytest.raises(CourseError, match=r"bert-tiny is an encoder\. Try BERT\(ENCODERS"):
        find_model("bert-tiny")
    assert not ENCODERS.keys() & MODELS.keys()


# -- the encoder --------------------------------------------------------------------------------


def of_torch(block):
    """PyTorch's own encoder layer, post-norm, with the weights of a block."""
    spec, attention = SPEC, block.attention
    layer = nn.TransformerEncoderLayer(
        spec.hidden, spec.num_heads, spec.ffn_hidden, dropout=0.0, activation="gelu",
        batch_first=True, norm_first=False, dtype=torch.float64,
    )  # fmt: skip
    pairs = [
        (layer.self_attn.out_proj, attention.out),
        (layer.linear1, block.mlp.up),
        (layer.linear2, block.mlp.out),
        (layer.norm1, block.attention_norm),
        (layer.norm2, block.mlp_norm),
    ]
    with torch.no_grad():
        for theirs, ours in pairs:
            theirs.load_state_dict(ours.state_dict())
        both = [attention.q, attention.k, attention.v]
        layer.self_attn.in_proj_weight.copy_(torch.cat([linear.weight for linear in both]))
        layer.self_attn.in_proj_bias.copy_(torch.cat([linear.bias for linear in both]))
    return layer


def shaken(model):
    """No weight is one or zero by chance of its start."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, dtype=param.dtype, generator=seeded(9)) / 5)
    return model


@pytest.mark.parametrize("flash", [True, False])
def test_it_equals_the_encoder_of_pytorch(flash):
    model = shaken(build(flash=flash).double())
    tokens = token_batch(0, batch=3, seq=15, vocab=50)
    x = model.norm(model.embedding.weight[tokens] + model.positions.weight)
    for block in model.blocks:
        x = of_torch(block)(x)
    expected = x @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens), expected, rtol=1e-11, atol=1e-12)  # order of sums


def test_gradients_equal_those_of_the_encoder_of_pytorch():
    block = shaken(build().double().blocks[0])
    theirs = of_torch(block)
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=seeded())
    weights = torch.randn(2, 5, 32, dtype=torch.float64, generator=seeded(1))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, one in zip((block, theirs), inputs, strict=True):
        (layer(one) * weights).sum().backward()
    q, k, v = theirs.self_attn.in_proj_weight.grad.chunk(3)
    pairs = [
        (inputs[0].grad, inputs[1].grad),
        (block.attention.q.weight.grad, q),
        (block.attention.k.weight.grad, k),
        (block.attention.v.weight.grad, v),
        (block.mlp.up.weight.grad, theirs.linear1.weight.grad),
        (block.mlp_norm.bias.grad, theirs.norm2.bias.grad),
    ]
    for ours, other in pairs:
        torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-12)  # order of sums


@pytest.mark.parametrize("flash", [True, False])
def test_every_token_sees_both_sides_of_it(flash):
    model = shaken(build(flash=flash).double())
    tokens = token_batch(0, batch=1, seq=15, vocab=50)
    for place in (0, 7, 15):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 50
        moved = (model(changed) - model(tokens)).abs().amax(dim=(0, 2))
        assert (moved > 1e-9).all()


def test_attention_of_a_gpt_stays_causal():
    assert all(block.attention.causal for block in GPT(SPEC).blocks)
    assert not any(block.attention.causal for block in build().blocks)
    assert Attention(SPEC).causal


def test_a_head_of_its_own_is_not_the_embedding():
    tied = build()
    assert tied.head.weight is tied.embedding.weight
    model = build(replace(SPEC, tied=False))
    assert model.head.weight is not model.embedding.weight
    assert sum(p.numel() for p in model.parameters()) == count_params(replace(SPEC, tied=False))


# -- hiding words -------------------------------------------------------------------------------

WORDS = torch.randint(4, 1000, (400, 40), generator=seeded(5))


def test_fifteen_percent_of_each_sequence_are_asked():
    tokens = WORDS.clone()
    tokens[:, ::10] = 3  # special
    inputs, targets = mask_tokens(tokens, seeded(), vocab=1000, mask=1, num_special=4)
    asked = targets != IGNORED
    assert (asked.sum(dim=1) == 6).all()
    assert torch.equal(targets[asked], tokens[asked])
    assert torch.equal(inputs[~asked], tokens[~asked])
    assert not asked[:, ::10].any()
    hidden, same = inputs[asked] == 1, inputs[asked] == tokens[asked]
    assert hidden.double().mean().item() == pytest.approx(0.8, abs=0.03)
    assert same.double().mean().item() == pytest.approx(0.1, abs=0.03)
    exchanged = inputs[asked][~hidden & ~same]
    assert len(exchanged) / asked.sum().item() == pytest.approx(0.1, abs=0.03)
    assert exchanged.min() >= 4
    assert len(exchanged.unique()) > 100
    assert (asked.double().mean(dim=0)[1:10] > 0.08).all()  # no place is left out


def test_masks_are_a_function_of_the_generator():
    def masks(seed):
        return mask_tokens(WORDS, seeded(seed), vocab=1000, mask=1, num_special=4)[1]

    assert torch.equal(masks(1), masks(1))
    assert not torch.equal(masks(1), masks(2))


def test_short_sequences_have_one_word_to_guess_and_special_ones_none():
    tokens = torch.tensor([[7, 2], [2, 3]])
    _, targets = mask_tokens(tokens, seeded(), vocab=9, mask=1, num_special=4)
    assert targets.tolist() == [[7, IGNORED], [IGNORED, IGNORED]]


def test_accuracy_counts_what_was_hidden_and_nothing_else():
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, 0, 0]])
    guesses = torch.tensor([[1, 2, 0], [1, 0, 2]])
    logits = nn.functional.one_hot(guesses, 3).double()
    assert right_and_asked(logits, targets).tolist() == [2, 4]
    assert masked_accuracy(logits, targets) == 0.5
    assert masked_accuracy(logits, torch.full_like(targets, IGNORED)) == 0


def test_it_learns_to_guess_the_words_of_dialogues():
    data = Dialogues.of(generated_dialogues(300))
    model = build(replace(SPEC, vocab=data.vocab))
    optimizer, random, found = torch.optim.AdamW(model.parameters(), lr=1e-2), seeded(), []
    for n in range(60):
        tokens = data.batch(n, batch=24, seq=16)
        inputs, targets = mask_tokens(
            tokens, random, vocab=data.vocab, mask=MASK, num_special=len(SPECIAL)
        )
        logits = model(inputs)
        loss = token_loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), masked_accuracy(logits, targets)))
    assert found[0][0] == pytest.approx(math.log(data.vocab), abs=0.2)
    assert sum(accuracy for _, accuracy in found[-5:]) / 5 > 0.3


# -- bad input ----------------------------------------------------------------------------------


def test_bad_input_is_told():
    with pytest.raises(ShapeError, match="need at most max_seq = 16 tokens a sequence; got 17"):
        build()(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(CourseError, match="BERT: need learned positions; got rope"):
        build(replace(SPEC, positions="rope"))
    for tokens, special in [(WORDS[0], 4), (WORDS, 1000), (WORDS[:, :0], 4)]:
        with pytest.raises(ShapeError, match="mask_tokens: need tokens"):
            mask_tokens(tokens, seeded(), vocab=1000, mask=1, num_special=special)
