"""The pictures of slides/02_accumulation.md, drawn by the functions that the notebook uses."""

import torch
from matplotlib.figure import Figure

from course_lib.accumulation import accumulate_gradients, accumulated_step, as_sum, by_items
from course_lib.accumulation.batch_sizes import NoisePoint, noise_on_the_way, steps_to_loss
from course_lib.accumulation.noise_scale import noise_scale
from course_lib.accumulation.pictures import (
    batch_tradeoff,
    graph,
    noise_growth,
    peak_by_parts,
    without_division,
)
from course_lib.accumulation.worked_graph import graph_states
from course_lib.core import Ledger, ModelSpec
from course_lib.display import memory
from course_lib.memory import activations
from course_lib.memory.layer_bytes import TORCH_CPU
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss

SPEC = ModelSpec(hidden=128, num_layers=4, num_heads=4, ffn_hidden=512, vocab=256, max_seq=128)
TINY = ModelSpec(hidden=32, num_layers=1, num_heads=2, ffn_hidden=64, vocab=32, max_seq=16)
PARTS = [1, 2, 4, 8, 16]


def pictures() -> dict[str, Figure]:
    torch.set_num_threads(1)  # quiet measurements
    added = graph_states(items_per_step=2)[4]
    return {
        "graph": graph(added, "Item 2 adds its gradients to those of item 1"),
        "adam": adam(),
        "peak": peak(),
        "batches": batches(),
        "noise": noise_growth({rate: noise_runs(rate) for rate in (8, 4)})[0],
        "saw": memory(held(4), "Four micro-batches: four small peaks instead of one big one"),
    }


def held(m: int) -> Ledger:
    torch.manual_seed(0)
    model, batch = GPT(SPEC), next_tokens(token_batch(0, batch=16, seq=128, vocab=256))
    given = [*model.parameters(), *batch]
    return activation_ledger(lambda: accumulate_gradients(model, token_loss, batch, m), given=given)


def peak() -> Figure:
    formula = [
        sum(activations(SPEC, 16 // m, 128, number_bytes=4, kernels=TORCH_CPU).values())
        for m in PARTS
    ]
    return peak_by_parts(PARTS, formula, [held(m).peak_bytes() for m in PARTS])[0]


def noise_runs(rate: float) -> list[list[NoisePoint]]:
    return [noise_on_the_way(2.2, seed=seed, rate=rate) for seed in range(5)]


def batches() -> Figure:
    scale = sum(noise_scale(point.estimate for point in run) for run in noise_runs(8)) / 5
    return batch_tradeoff(steps_to_loss(2.2, [2**n for n in range(10)]), scale)[0]


def adam(steps: int = 40) -> Figure:
    curves = [
        losses(make, lr, share, steps)
        for make, lr in ((torch.optim.SGD, 1.0), (torch.optim.AdamW, 1e-2))
        for share in (by_items, as_sum)
    ]
    return without_division(*curves)[0]


def losses(make, lr, share, steps: int) -> list[float]:
    torch.manual_seed(0)
    model, curve = GPT(TINY), []
    optimizer = make(model.parameters(), lr=lr)
    for n in range(steps):
        batch = next_tokens(token_batch(n, batch=16, seq=16, vocab=32))
        loss = accumulated_step(model, token_loss, optimizer, batch, 8, share=share).item()
        curve.append(loss / (8 if share is as_sum else 1))
    return curve
