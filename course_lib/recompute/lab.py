"""Measurement of number formats: error of a matrix product, loss of a small GPT, activation bytes.

Formats of 8 and 4 bits are those of the operands of the linear layers in the blocks; parameters,
optimizer, norms, attention, embedding and head stay in fp32. Notebook 03_recompute.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from course_lib.core.errors import CourseError
from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models.data import next_tokens, token_batch
from course_lib.models.gpt import GPT, token_loss
from course_lib.recompute.block_scaling import E2M1, BlockScaling
from course_lib.recompute.float8 import E4M3, E5M2, CurrentScaling, DelayedScaling
from course_lib.recompute.quantized_linear import (
    Operands,
    Rounder,
    quantize_linears,
    to_bf16,
    unrounded,
)

SPEC = ModelSpec(hidden=64, num_layers=2, num_heads=4, ffn_hidden=256, vocab=256, max_seq=32)


def _alike(make: Callable[[], Rounder]) -> Operands:
    """Return operands of one format, each with a rounder of its own."""
    return Operands(x=make(), weight=make(), grad=make())


def _fp8(make: Callable[..., Rounder]) -> Operands:
    """Return operands in E4M3, gradients in E5M2 (Micikevicius et al. 2022, section 3)."""
    return Operands(x=make(E4M3), weight=make(E4M3), grad=make(E5M2))


def _mxfp4_forward() -> Operands:
    """Return operands in MXFP4 for forward, in MXFP8 for backward."""
    forward = BlockScaling(rows=E2M1)
    return Operands(x=forward, weight=forward, grad=BlockScaling())


FORMATS: dict[str, Callable[[], Operands]] = {
    "fp32": Operands,
    "bf16": partial(_alike, lambda: to_bf16),
    "FP8, current scaling": partial(_fp8, CurrentScaling),
    "FP8, delayed scaling": partial(_fp8, partial(DelayedScaling, history=16)),
    "MXFP8": partial(_alike, BlockScaling),
    "MXFP8, scales rounded up": partial(_alike, partial(BlockScaling, round_up=True)),
    "MXFP4 in forward": _mxfp4_forward,
}
ROUNDERS: dict[str, Rounder] = {
    "fp32": unrounded,
    "bf16": to_bf16,
    "E5M2, one scale": CurrentScaling(E5M2),
    "E4M3, one scale": CurrentScaling(E4M3),
    "MXFP8": BlockScaling(),
    "MXFP8, scales rounded up": BlockScaling(round_up=True),
    "E2M1, one scale": CurrentScaling(E2M1),
    "MXFP4": BlockScaling(rows=E2M1, columns=E2M1),
}


def product_error(name: str, outlier: float = 1.0, size: int = 256) -> float:
    """Return the relative error of a product x @ w.T of random matrices in a format of `ROUNDERS`.

    x[0, 0] is the `outlier`; all other numbers are normal with a standard deviation of 1. The error
    is that of the rows of the product in which no outlier is: all but the first.

    Raises: CourseError for an unknown format
    """
    _known(name, ROUNDERS)
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, size, generator=random) for _ in range(2))
    x[0, 0] = outlier
    rounded = ROUNDERS[name](x)[0] @ ROUNDERS[name](weight)[0].T
    exact = x.double() @ weight.double().T
    return float((rounded - exact)[1:].norm() / exact[1:].norm())


def train(name: str, num_steps: int = 100, seed: int = 0) -> list[float]:
    """Train a small GPT with the linear layers of its blocks in a format; return the losses.

    `name` is one of `FORMATS`. All runs of a seed start from the same parameters and read the same
    batches.

    Raises: CourseError for an unknown format
    """
    _known(name, FORMATS)
    torch.manual_seed(seed)
    model = GPT(SPEC)
    quantize_linears(model.blocks, FORMATS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return [float(_step(model, optimizer, n, seed)) for n in range(num_steps)]


def losses_behind(losses: Mapping[str, Sequence[float]], last: int = 10) -> dict[str, float]:
    """Return how far each run's mean loss of its last steps is above that of the first run."""
    means = {name: sum(curve[-last:]) / last for name, curve in losses.items()}
    return {name: loss - next(iter(means.values())) for name, loss in means.items()}


def _step(model: GPT, optimizer: torch.optim.Optimizer, n: int, seed: int) -> Tensor:
    tokens, targets = next_tokens(token_batch(n, batch=16, seq=32, vocab=SPEC.vocab, seed=seed))
    loss = token_loss(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def activations_in(
    dtype: torch.dtype, spec: ModelSpec, batch: tuple[Tensor, Tensor], *, autocast: bool = False
) -> Ledger:
    """Return what a GPT with parameters of this dtype holds for backward, over one step.

    autocast   its matrix products take bf16, under `torch.autocast`
    """
    model = GPT(spec).to(dtype)

    def forward_backward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = token_loss(model(batch[0]), batch[1])
        loss.backward()

    return activation_ledger(forward_backward, given=[*model.parameters(), *batch])


def _known(name: str, formats: Mapping[str, object]) -> None:
    if name not in formats:
        raise CourseError(f"format: need one of {', '.join(formats)}; got {name!r}.")
