"""The pictures of slides/03_recompute.md, drawn by the functions that the notebook uses."""

from collections.abc import Callable
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import nn

from course_lib.core import Ledger, ModelSpec
from course_lib.display import memory
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import recompute, recompute_full, recompute_none, recompute_selective
from course_lib.recompute.lab import FORMATS, train
from course_lib.recompute.pictures import (
    format_losses,
    number_formats,
    product_errors,
    published_memory,
    segment_peaks,
)

SPEC = ModelSpec(hidden=128, num_layers=6, num_heads=8, ffn_hidden=512, vocab=128, max_seq=128)
LAYERS = 64


def pictures() -> dict[str, Figure]:
    torch.set_num_threads(1)  # quiet measurements
    choose = {"none": recompute_none, "selective": recompute_selective, "full": recompute_full}
    held = {name: held_by(change, flash=False, dropout=0.1) for name, change in choose.items()}
    part = held["full"].peak_bytes() / held["none"].peak_bytes()
    precisions = {
        "fp32": held_by(recompute_none),
        "autocast": held_by(recompute_none, autocast=True),
        "bf16": held_by(recompute_none, dtype=torch.bfloat16),
    }
    return {
        "valley": valley(),
        "strategies": memory(held, f"Full recompute needs {100 * part:.0f} % of the bytes"),
        "published": published_memory()[0],
        "spikes": memory(held["full"], f"Small steps, then {SPEC.num_layers} spikes in backward"),
        "precision": number_formats(precisions)[0],
        "outliers": product_errors()[0],
        "formats": format_losses({name: train(name) for name in FORMATS})[0],
    }


def held_by(
    change: Callable[[GPT], None],
    *,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    **options: float,
) -> Ledger:
    torch.manual_seed(0)
    model = GPT(SPEC, **options).to(dtype)
    batch = next_tokens(token_batch(0, batch=4, seq=128, vocab=128))
    change(model)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = token_loss(model(batch[0]), batch[1])
        loss.backward()

    return activation_ledger(step, given=[*model.parameters(), *batch])


def valley() -> Figure:
    ks = [1, 2, 4, 8, 16, 32, 64]
    chain = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(LAYERS)]
    x, there = torch.ones(256, 64), [param for layer in chain for param in layer.parameters()]
    tensors = {
        k: activation_ledger(partial(in_segments, chain, k, x), given=there).peak_bytes() / x.nbytes
        for k in ks
    }
    return segment_peaks(LAYERS, {k: LAYERS / k + k for k in ks}, tensors)[0]


def in_segments(chain: list[nn.Module], k: int, y: torch.Tensor) -> None:
    for start in range(0, LAYERS, k):
        y = recompute(nn.Sequential(*chain[start : start + k]), y)
    y.sum().backward()
