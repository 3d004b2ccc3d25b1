"""Saved tensors equal the formula, byte by byte; models that do not fit can be measured too."""

import time
from dataclasses import replace
from itertools import product

import pytest
import torch

from course_lib.core import MODELS
from course_lib.core.units import GIB
from course_lib.memory import activations, count_params, step_ledger
from course_lib.memory.layer_bytes import TORCH_CPU, Pass
from course_lib.memory.saved_tensors import LiveLedger, fake_tensors, measure_saved, tensors_of
from course_lib.models import GPT, token_loss
from course_lib.recompute import recompute_full, recompute_selective

GPT2 = replace(
    MODELS["tiny"], hidden=32, num_heads=4, num_layers=3, ffn_hidden=72, vocab=50, max_seq=40
)
LLAMA = replace(
    GPT2, num_kv_heads=2, gated=True, norm="rms", positions="rope", bias=False, tied=False
)
SPECS = {
    "gpt": GPT2,
    "llama": LLAMA,
    "rms and bias": replace(GPT2, norm="rms", gated=True),
    "normed heads": replace(GPT2, qk_norm="head"),
}


def batch_of(spec, batch, seq):
    return torch.randint(0, spec.vocab, (batch, seq)), torch.randint(0, spec.vocab, (batch, seq))


def saved_by(model, tokens, targets):
    given = [*tensors_of(model), tokens, targets]
    return measure_saved(lambda: token_loss(model(tokens), targets), given=given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("flash", "dropout", "batch"), list(product([True, False], [0.0, 0.1], [1, 3]))
)
def test_saved_bytes_are_the_formula(name, dtype, flash, dropout, batch):
    spec = SPECS[name]
    model = GPT(spec, flash=flash, dropout=dropout).to(dtype)
    saved = saved_by(model, *batch_of(spec, batch, 24))
    predicted = activations(
        spec,
        batch,
        24,
        flash=flash,
        dropout=dropout > 0,
        number_bytes=dtype.itemsize,
        kernels=TORCH_CPU,
    )
    assert sum(one.num_bytes for one in saved) == sum(predicted.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize(("name", "flash", "dropout"), [("gpt", False, 0.1), ("llama", True, 0.0)])
def test_saved_bytes_are_the_formula_with_recompute(name, dtype, how, flash, dropout):
    spec = SPECS[name]
    model = GPT(spec, flash=flash, dropout=dropout).to(dtype)
    {"selective": recompute_selective, "full": recompute_full}[how](model)
    saved = saved_by(model, *batch_of(spec, 2, 24))
    predicted = activations(
        spec,
        2,
        24,
        recompute=how,
        flash=flash,
        dropout=dropout > 0,
        number_bytes=dtype.itemsize,
        kernels=TORCH_CPU,
    )
    assert sum(one.num_bytes for one in saved) == sum(predicted.values())


@pytest.mark.parametrize("how", ["selective", "full"])
def test_the_peak_with_recompute_is_the_formula(how):
    model, (tokens, targets) = GPT(LLAMA, flash=False, dropout=0.1), batch_of(LLAMA, 2, 24)
    {"selective": recompute_selective, "full": recompute_full}[how](model)
    optimizer = torch.optim.AdamW(model.parameters())
    with LiveLedger(model, optimizer, given=[tokens, targets]) as live:
        for _ in range(2):
            token_loss(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    predicted = step_ledger(
        LLAMA, 2, 24, recipe="fp32", recompute=how, flash=False, dropout=True, kernels=TORCH_CPU
    )
    assert live.ledger.peak_bytes() == predicted.peak_bytes()


def test_each_row_of_a_layer_is_a_tensor_that_is_kept():
    saved = saved_by(GPT(GPT2, flash=False, dropout=0.1), *batch_of(GPT2, 2, 24))
    rows = Pass(
        spec=GPT2, batch=2, seq=24, number_bytes=4, flash=False, dropout=True, kernels=TORCH_CPU
    ).layer()
    kept = sorted(one.num_bytes for one in saved)
    pairs = {"k and v": 2, "its statistics": 2, "two masks": 2}
    for row in rows:
        count = pairs.get(row.name, 1)
        assert kept.count(row.num_bytes // count) >= count * GPT2.num_layers, row.name


@pytest.mark.parametrize("name", ["untied", "llama"])
@pytest.mark.parametrize(("flash", "dropout"), [(True, 0.0), (False, 0.1)])
def test_a_live_ledger_of_four_steps_is_the_formula_at_every_moment(name, flash, dropout):
    spec = {"untied": replace(GPT2, tied=False), "llama": LLAMA}[name]
    model, (tokens, targets) = GPT(spec, flash=flash, dropout=dropout), batch_of(spec, 2, 24)
    optimizer = torch.optim.AdamW(model.parameters())
    with LiveLedger(model, optimizer, given=[tokens, targets]) as live:
        for _ in range(4):
            token_loss(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    predicted = step_ledger(
        spec, 2, 24, recipe="fp32", flash=flash, dropout=dropout > 0, kernels=TORCH_CPU
    )
    assert live.ledger.bytes_by_kind == predicted.bytes_by_kind


def test_a_storage_that_is_saved_twice_counts_once():
    x = torch.ones(8, requires_grad=True)
    y = x * 2
    saved = measure_saved(lambda: y[:4] * y[4:], given=[x])
    assert [one.num_bytes for one in saved] == [32]


def test_a_70b_model_is_weighed_in_seconds():
    spec = replace(MODELS["llama-70b"], max_seq=2048)
    start_s = time.perf_counter()
    with fake_tensors(torch.bfloat16):
        model = GPT(spec)
        saved = saved_by(model, *batch_of(spec, 1, 2048))
    assert time.perf_counter() - start_s < 60
    num_bytes = sum(one.num_bytes for one in saved)
    assert num_bytes == sum(activations(spec, 1, 2048, kernels=TORCH_CPU).values())
    assert num_bytes > 64 * GIB  # activations alone, at one sequence
    assert sum(param.numel() for param in model.parameters()) == count_params(spec)
    assert torch.get_default_dtype() == torch.float32
