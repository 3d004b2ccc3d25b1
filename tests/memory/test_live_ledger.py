"""Saved activations over time: every rise, every fall, each storage once."""

import pytest
import torch
from torch import nn

from course_lib.accumulation import accumulate_gradients
from course_lib.core.specs import ModelSpec
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import recompute, recompute_full

SPEC = ModelSpec(hidden=32, num_layers=4, num_heads=4, ffn_hidden=64, vocab=40, max_seq=12)


def test_it_climbs_in_forward_and_falls_in_backward():
    x = torch.ones(10, requires_grad=True)
    ledger = activation_ledger(lambda: x.sin().cos().exp().sum().backward(), given=[x])
    # sin keeps x (given), cos keeps sin(x), exp keeps its output
    assert ledger.bytes_by_kind["activations"] == [0, 40, 80, 40, 0, 0]
    assert ledger.times_s == sorted(ledger.times_s)


def test_a_storage_that_is_saved_twice_counts_once():
    x = torch.ones(10, requires_grad=True)

    def fn():
        y = x * 1.0
        (y * y.view(2, 5).view(10)).sum().backward()

    assert activation_ledger(fn).peak_bytes() == 40


def test_nothing_is_held_in_the_end_unless_the_graph_is_kept():
    x, kept = torch.ones(10, requires_grad=True), []
    ledger = activation_ledger(lambda: kept.append(x.sin().cos()), given=[x])
    assert ledger.totals()[-1] == 40


def chain_peak(num_layers, wrap):
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(num_layers)]
    x = torch.ones(8, 16)
    params = [param for layer in layers for param in layer.parameters()]

    def step():
        y = x
        for layer in layers:
            y = wrap(layer, y)
        y.sum().backward()

    return activation_ledger(step, given=[*params, x]).peak_bytes() / x.nbytes


@pytest.mark.parametrize("num_layers", [1, 4, 9])
def test_recompute_has_its_peak_in_backward(num_layers):
    assert chain_peak(num_layers, lambda layer, y: layer(y)) == num_layers
    assert chain_peak(num_layers, recompute) == num_layers  # its inputs, and one output again


@pytest.mark.parametrize("full", [False, True])
def test_the_peak_is_the_same_for_any_number_of_micro_batches(full):
    model, peaks = GPT(SPEC), []
    if full:
        recompute_full(model)
    for n in (1, 2, 4, 8):
        batch = next_tokens(token_batch(0, batch=2 * n, seq=12, vocab=40))
        ledger = activation_ledger(
            lambda n=n, batch=batch: accumulate_gradients(model, token_loss, batch, n),
            given=[*model.parameters(), *batch],
        )
        peaks.append(ledger.peak_bytes())
    assert len(set(peaks)) == 1
