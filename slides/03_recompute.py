"""The pictures of slides/03_recompute.md, drawn by the functions that the notebook uses."""

from collections.abc import Callable
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import nn

from course_lib.core import Ledger, ModelSpec
from course_lib.display import Voices, compare, memory
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import recompute, recompute_full, recompute_none, recompute_selective
from course_lib.recompute.lab import FORMATS, train
from course_lib.recompute.pictures import format_losses, product_errors, published_memory

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
        "published": published_memory(
            "Large models keep 8 to 10 % with full recompute, 49 to 62 % with selective"
        ),
        "spikes": memory(held["full"], f"Small steps, then {SPEC.num_layers} spikes in backward"),
        "precision": memory(precisions, "bf16 halves the activations, autocast does not"),
        "outliers": product_errors(
            "With one scale, an outlier of 100 ruins FP4, one of 10⁶ ruins FP8. Blocks confine it"
        ),
        "formats": format_losses(
            {name: train(name) for name in FORMATS},
            "After 100 steps, losses in 8 bits are 0.002 to 0.005 above fp32, in MXFP4 0.06",
        ),
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
    tensors = [
        activation_ledger(partial(in_segments, chain, k, x), given=there).peak_bytes() / x.nbytes
        for k in ks
    ]
    voices = Voices(formula=[LAYERS / k + k for k in ks], measurement=tensors)
    title = f"Segments of 8 need {min(tensors):.0f} tensors instead of 64"
    labels = {"x_label": "layers in a segment, k", "y_label": "peak (tensors)"}
    return compare(ks, voices, title, log_x=True, **labels)


def in_segments(chain: list[nn.Module], k: int, y: torch.Tensor) -> None:
    for start in range(0, LAYERS, k):
        y = recompute(nn.Sequential(*chain[start : start + k]), y)
    y.sum().backward()
