"""The derivations of lesson 01: the 34 and the peak of a step, against what is measured."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from course_lib.accumulation import accumulate_gradients
from course_lib.checks import find_exercise
from course_lib.core import MODELS
from course_lib.core.parallelism import Parallelism
from course_lib.memory import (
    activations,
    count_params,
    layer_coefficients,
    model_states,
    param_parts,
    step_ledger,
)
from course_lib.memory.layer_bytes import TORCH_CPU, Pass, total
from course_lib.memory.saved_tensors import LiveLedger, measure_layer
from course_lib.models import GPT, next_tokens, token_batch, token_loss

GPT_SPEC = replace(
    MODELS["tiny"], hidden=48, num_heads=6, num_layers=3, ffn_hidden=200, vocab=31, max_seq=40
)
SPECS = {
    "4h": replace(GPT_SPEC, ffn_hidden=4 * 48),
    "another f": GPT_SPEC,
    "shared keys": replace(GPT_SPEC, num_kv_heads=2),
    "one key": replace(GPT_SPEC, num_kv_heads=1, hidden=30, ffn_hidden=70),
}
SWIGLU = replace(GPT_SPEC, gated=True, num_kv_heads=2, ffn_hidden=168)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def statistics(spec, batch, seq, dtype, flash):
    """What the norms of a layer keep besides their inputs, and flash attention per query."""
    norms = 2 * 2 * batch * seq * dtype.itemsize
    return norms + (4 if dtype.itemsize < 8 else 8) * batch * seq * spec.num_heads * flash


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 8), (3, 40)])
def test_the_derived_layer_is_what_autograd_keeps(spec, dtype, batch, seq):
    parts = find_exercise("memory-4").right(spec, batch, seq, dtype.itemsize)
    kept = measure_layer(spec, batch, seq, dtype=dtype, flash=False, dropout=True)
    assert kept == sum(parts.values()) + statistics(spec, batch, seq, dtype, flash=False)


def test_the_34_is_for_one_kind_of_layer():
    written_out = {"flash": False, "dropout": True}
    assert layer_coefficients(SPECS["4h"], **written_out) == (34, 5)
    assert layer_coefficients(MODELS["megatron-175b"], **written_out) == (34, 5)
    assert layer_coefficients(SPECS["4h"]) == (32, 0)
    assert layer_coefficients(MODELS["llama2-7b"])[0] == pytest.approx(12 + 4 + 8 * 11008 / 4096)
    assert layer_coefficients(MODELS["llama-8b"]) == (41, 0)


@pytest.mark.parametrize(("dtype", "flash"), list(product(DTYPES[:2], (True, False))), ids=str)
@pytest.mark.parametrize("dropout", [False, True])
def test_swiglu_and_gqa_have_their_own_count(dtype, flash, dropout):
    how = {"flash": flash, "dropout": dropout}
    c, d = layer_coefficients(SWIGLU, number_bytes=dtype.itemsize, **how)
    if flash and not dropout:
        kv, wide = SWIGLU.kv_hidden / SWIGLU.hidden, SWIGLU.ffn_hidden / SWIGLU.hidden
        assert c == dtype.itemsize / 2 * (12 + 4 * kv + 8 * wide)
    sbh, scores = 40 * 3 * SWIGLU.hidden, 40 * 40 * 3 * SWIGLU.num_heads
    kept = measure_layer(SWIGLU, 3, 40, dtype=dtype, **how)
    assert kept == c * sbh + d * scores + statistics(SWIGLU, 3, 40, dtype, flash)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_llama_layer_of_this_cpu_keeps_its_norms_in_fp32(dtype):
    llama = replace(SWIGLU, norm="rms", positions="rope", bias=False, tied=False)
    one = Pass(spec=llama, batch=3, seq=40, number_bytes=dtype.itemsize, kernels=TORCH_CPU)
    assert measure_layer(llama, 3, 40, dtype=dtype) == total(one.layer())


ROPE = replace(SWIGLU, norm="rms", positions="rope", bias=False)
TODAY = {
    "heads of their own size": replace(ROPE, head_dim=14),
    "normed queries and keys": replace(ROPE, head_dim=14, qk_norm="head"),
    "a window": replace(ROPE, window=7),
    "parallel": replace(GPT_SPEC, positions="rope", parallel=True),
    "parallel, one norm": replace(GPT_SPEC, positions="rope", parallel=True, norms_per_layer=1),
    "parallel, rms": replace(ROPE, parallel=True),
    "biases of q, k and v": replace(ROPE, bias=("qkv",)),
}


@pytest.mark.parametrize(("dtype", "flash"), list(product(DTYPES[:2], (True, False))), ids=str)
@pytest.mark.parametrize("spec", TODAY.values(), ids=TODAY)
def test_a_layer_of_a_model_of_today_keeps_what_its_rows_say(spec, dtype, flash):
    one = Pass(spec=spec, batch=3, seq=40, number_bytes=dtype.itemsize, flash=flash)
    one = replace(one, kernels=TORCH_CPU)
    assert measure_layer(spec, 3, 40, dtype=dtype, flash=flash) == total(one.layer())


UNTIED = replace(GPT_SPEC, tied=False)


def layers_of(spec, batch, seq):
    """Activations and gradients of embedding, layers and head, in bytes of fp32."""
    kept = activations(spec, batch, seq, number_bytes=4, kernels=TORCH_CPU)
    two = activations(replace(spec, num_layers=2), batch, seq, number_bytes=4, kernels=TORCH_CPU)
    layer = (sum(kept.values()) - sum(two.values())) // (spec.num_layers - 2)
    first = kept["embedding"]
    last = sum(kept.values()) - first - spec.num_layers * layer
    parts = param_parts(spec)
    block = 4 * (parts["attention"] + parts["mlp"] + 4 * spec.num_layers * spec.hidden)
    block //= spec.num_layers
    head = 4 * (parts["head"] + 2 * spec.hidden)
    embedding = 4 * (parts["embedding"] + parts["positions"])
    acts = [first, *[layer] * spec.num_layers, last]
    return acts, [embedding, *[block] * spec.num_layers, head]


def live_peak(spec, batch, seq, num_micro_batches):
    """The peak of the second step of a real model, and its states without gradients."""
    model = GPT(spec)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = next_tokens(token_batch(0, batch=batch * num_micro_batches, seq=seq, vocab=spec.vocab))
    with LiveLedger(model, optimizer, given=tokens) as live:
        for _ in range(2):
            accumulate_gradients(model, token_loss, tokens, num_micro_batches)
            optimizer.step()
            optimizer.zero_grad()
    kinds = live.ledger.bytes_by_kind
    return live.ledger.peak_bytes(), kinds["params"][-1] + kinds["optim_state"][-1]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize(("batch", "seq"), [(1, 2), (4, 40)], ids=["little", "much"])
def test_the_derived_peak_is_that_of_a_real_step(batch, seq, num_micro_batches):
    peak, states = live_peak(UNTIED, batch, seq, num_micro_batches)
    acts, grads = layers_of(UNTIED, batch, seq)
    step_peak = find_exercise("memory-5").right
    assert step_peak(states, acts, grads, num_micro_batches) == peak
    ledger = step_ledger(UNTIED, batch, seq, recipe="fp32", kernels=TORCH_CPU,
                         num_steps=2, num_micro_batches=num_micro_batches)  # fmt: skip
    assert ledger.peak_bytes() == peak


def where_the_peak_is(batch, seq, num_micro_batches):
    """Activations and gradients at the peak, as shares of the most there are of each."""
    ledger = step_ledger(UNTIED, batch, seq, recipe="fp32", num_micro_batches=num_micro_batches)
    at = ledger.totals().index(ledger.peak_bytes())
    held = ledger.bytes_by_kind
    return tuple(held[kind][at] / max(held[kind]) for kind in ("activations", "grads"))


def test_the_peak_is_not_always_where_backward_begins():
    assert where_the_peak_is(4, 40, num_micro_batches=1) == (1, 0)
    assert where_the_peak_is(1, 2, num_micro_batches=1) == (0, 1)  # gradients outweigh activations
    assert where_the_peak_is(4, 40, num_micro_batches=2) == (1, 1)  # the second backward begins


def test_sixteen_bytes_are_three_quarters_the_optimizers():
    states = model_states(count_params(MODELS["llama-8b"]), parallelism=Parallelism())
    assert 4 * states["optim_state"] == 3 * sum(states.values())
