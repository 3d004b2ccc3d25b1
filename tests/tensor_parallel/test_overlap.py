"""Overlap: what ranks send in backward runs beside a gradient; the same bits."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib.core import COMMUNICATION_KINDS, ModelSpec
from course_lib.core.links import Link
from course_lib.models import GPT, padded_batch
from course_lib.ranks import Ranks, record
from course_lib.recompute import recompute_full
from course_lib.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    finish_gradients,
    parallel_token_loss,
    parallelize,
)
from course_lib.tensor_parallel.cost import overlap_saves_s, tensor_traffic
from course_lib.tensor_parallel.lab import MLPStack, measure_overlap

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TINY = ModelSpec(hidden=24, num_layers=2, num_heads=12, ffn_hidden=36, vocab=48, max_seq=12)
LLAMA = {"gated": True, "norm": "rms", "positions": "rope", "bias": False}
SPECS = {
    "gpt": TINY,
    "llama": replace(TINY, **LLAMA, hidden=48, num_heads=24, num_kv_heads=12),
    "uneven": replace(TINY, vocab=41, ffn_hidden=31, gated=True, tied=False),
}
SLOW = Link(name="slow", latency_s=20e-3, bytes_per_s=20e6)


def split(spec, sequence_parallel, overlap, dtype, change=lambda model: None):
    torch.manual_seed(0)
    model = GPT(spec).to(dtype)
    change(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize(model, mesh, sequence_parallel, overlap=overlap)


def three_steps(model):
    """Losses, first gradients, weights in the end, and the collectives of the first step."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, grads, calls = [], [], []
    for n in range(3):
        tokens, targets = padded_batch(n, batch=3, seq=12, vocab=model.spec.vocab)
        sgd.zero_grad()
        with record() as log:
            loss = parallel_token_loss(model(tokens), targets)
            loss.backward()
            finish_gradients(model)
        if n == 0:
            grads = [param.grad.clone() for param in model.parameters() if param.requires_grad]
            calls = [(e.kind, e.num_bytes) for e in log.events if e.kind in COMMUNICATION_KINDS]
        sgd.step()
        losses.append(loss.detach())
    return [*losses, *grads, *(param.detach() for param in model.parameters())], calls


def freeze_some(model):
    model.embedding.weight.requires_grad_(False)
    model.blocks[0].attention.k.weight.requires_grad_(False)
    model.blocks[1].mlp.up.weight.requires_grad_(False)


CHANGES = {"plain": lambda model: None, "frozen": freeze_some, "recomputed": recompute_full}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_overlap_changes_no_bit(pools, sequence_parallel, world_size):
    cases = [(spec, dtype) for spec in SPECS.values() for dtype in (torch.float32, torch.float64)]

    def compared(rank):
        return [
            [
                three_steps(split(spec, sequence_parallel, overlap, dtype))
                for overlap in (False, True)
            ]
            for spec, dtype in cases
        ]

    for by_case in pools(world_size).run(compared):
        for (spec, dtype), ((plain, _), (overlapped, calls)) in zip(cases, by_case, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(plain, overlapped, strict=True))
            sizes = (3, 12, dtype.itemsize)
            how = {"sequence_parallel": sequence_parallel, "gathers_again": True}
            paper = [(call.kind, call.num_bytes) for call in tensor_traffic(spec, *sizes, **how)]
            assert calls == paper


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_overlap_of_frozen_and_recomputed_layers(pools, change, sequence_parallel):
    def compared(rank):
        how = torch.float64, CHANGES[change]
        build = [split(TINY, sequence_parallel, overlap, *how) for overlap in (False, True)]
        return [three_steps(model)[0] for model in build]

    for plain, overlapped in pools(2).run(compared):
        assert all(torch.equal(a, b) for a, b in zip(plain, overlapped, strict=True))


def test_a_layer_of_its_own_overlaps(pools):
    """Equal bits, also where the layer gathers its outputs; an unused output is no problem."""

    def compared(rank):
        found = []
        for overlap in (False, True):
            torch.manual_seed(0)
            layer = ColumnParallelLinear(7, 10, gather_output=True, overlap=overlap)
            x = torch.linspace(-1, 2, 42).view(2, 3, 7).requires_grad_()
            (layer(x).cumsum(-1) ** 2).sum().backward()
            found.append((x.grad, layer.weight.grad, layer.bias.grad))
        return all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    assert all(pools(3).run(compared))


def backward_of(rank, overlap, sequence_parallel=False):
    torch.manual_seed(0)
    up = ColumnParallelLinear(256, 512, overlap=overlap, sequence_parallel=sequence_parallel)
    down = RowParallelLinear(512, 256, sequence_parallel=sequence_parallel)
    model = nn.Sequential(up, nn.GELU(), down)
    x = torch.randn(1, 512 // (1 + sequence_parallel), 256, requires_grad=True)
    loss = model(x).square().mean()
    with record() as log:
        loss.backward()
    return log.events


def test_the_sum_runs_beside_the_weight_gradient():
    """It starts before the weight gradient and ends after it, on every rank."""
    with Ranks(2, link=SLOW) as ranks:
        for events in ranks.run(backward_of, True):
            (total,) = (event for event in events if event.kind == "all_reduce")
            (weight,) = (event for event in events if event.kind == "backward_weight")
            (own,) = (event for event in events if event.kind == "backward_input")
            assert own.end_s <= total.start_s <= weight.start_s < weight.end_s <= total.end_s
            least_s = 2 * SLOW.time_s(512 * 256 * 4 / 2)
            assert total.duration_s >= least_s * (1 - 1e-9)  # a difference of two clocks


def test_tokens_are_gathered_again_beside_the_input_gradient():
    with Ranks(2, link=SLOW) as ranks:
        for events in ranks.run(backward_of, True, True):
            found = {event.kind: event for event in sorted(events, key=lambda e: e.start_s)}
            gather, scatter = found["all_gather"], found["reduce_scatter"]  # the last of each kind
            own, weight = found["backward_input"], found["backward_weight"]
            assert gather.start_s <= own.start_s < own.end_s <= gather.end_s <= weight.start_s
            assert own.end_s <= scatter.start_s <= weight.start_s < weight.end_s <= scatter.end_s


def test_without_overlap_nothing_is_computed_meanwhile():
    with Ranks(2, link=SLOW) as ranks:
        for events in ranks.run(backward_of, False):
            assert [event.kind for event in events if event.kind != "wait"] == ["all_reduce"]


def test_overlap_saves_the_shorter_of_the_two():
    assert overlap_saves_s(3.0, 5.0) == overlap_saves_s(5.0, 3.0) == 3.0
    wire = Link(latency_s=2e-3, bytes_per_s=50e6)  # a sum takes about as long as a weight gradient
    with Ranks(2, link=wire) as ranks:
        runs = measure_overlap(ranks, MLPStack(num_layers=2), turns=5)
    assert runs.predicted_s > 0
    shown = runs.timelines()
    weights, sums = (
        [event for event in shown["overlapped"] if event.kind == kind]
        for kind in ("backward_weight", "all_reduce")
    )
    assert any(a.start_s < b.end_s and b.start_s < a.end_s for a in weights for b in sums)
    assert list(shown) == ["plain", "overlapped"]
    halves = {"backward_input", "backward_weight"}
    assert {event.kind for event in shown["plain"]} == {"backward", "all_reduce"}
    assert {event.kind for event in shown["overlapped"]} == {"backward", "all_reduce"} | halves
