"""Forward and backward passes of a step: one micro-batch after another, or through a pipeline.

Either way a micro-batch's loss is weighted by its share, and the result is three sums over all
micro-batches: the loss and, for a BERT, how many masked tokens were predicted correctly, and how
many there were.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib.mesh.model_part import ModelPart
from course_lib.models import right_and_asked, token_loss
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.engine import Pipeline
from course_lib.pipeline.p2p import TensorMeta
from course_lib.ranks.recorder import span
from course_lib.ranks.world import is_dry
from course_lib.tensor_parallel.cross_entropy import parallel_token_loss
from course_lib.train.config import TrainConfig, schedule_of
from course_lib.train.mesh import TrainMesh, placement_of
from course_lib.train.strategies import Wrapped

_LossFn = Callable[[Tensor, Tensor], Tensor]
_MicroBatches = Sequence[tuple[Tensor, Tensor]]  # inputs and targets
GradientPass = Callable[[_MicroBatches, Sequence[float]], Tensor]


class Passes(NamedTuple):
    """The two ways through a model: with gradients, and without, for validation."""

    gradients: GradientPass
    losses: GradientPass


def make_passes(part: ModelPart[Wrapped], config: TrainConfig, mesh: TrainMesh) -> Passes:
    """Return the function that computes a step's gradients, up to `wrapped.finish()`, and another.

    Call them with the micro-batches and their shares.

    Shapes:  -> [3]: the loss (0 where it is not known), correctly predicted, and all masked tokens
    """
    wrapped = part.wrapped
    mean: _LossFn = token_loss
    if config.tp > 1:
        mean = partial(parallel_token_loss, group=mesh.group("tp"))
    loss_fn = partial(_in_float32, mean)
    losses = partial(_without_gradients, wrapped, loss_fn)
    if wrapped.gradients is not None:
        return Passes(wrapped.gradients, losses)
    if config.pp == 1:
        return Passes(partial(_one_by_one, wrapped, loss_fn, config.masked), losses)
    schedule = schedule_of(config, config.num_micro_batches(mesh.size("dp")))
    late = wrapped.reduces_in_backward
    border = partial(_border, config) if is_dry() else None
    pipeline = Pipeline(part.module, loss_fn, mesh.group("pp"), sums_tied=not late, border=border)
    return Passes(
        partial(_through_stages, wrapped, pipeline, schedule),
        partial(_forward_through_stages, pipeline, placement_of(config)),
    )


def _border(config: TrainConfig, inputs: Tensor) -> TensorMeta:
    """Return shape and dtype between two stages, for a dry run, in which no header arrives."""
    seq = inputs.shape[1] // (config.tp if config.sequence_parallel else 1)
    dtype = getattr(torch, config.compute_dtype or config.dtype)
    return TensorMeta((len(inputs), seq, config.model.hidden), dtype)


def _in_float32(mean: _LossFn, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss, computed in 32 bits or more."""
    return mean(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def _one_by_one(
    wrapped: Wrapped,
    loss_fn: _LossFn,
    masked: bool,
    micro_batches: _MicroBatches,
    shares: Sequence[float],
) -> Tensor:
    total = torch.zeros(3, device=micro_batches[0][0].device, dtype=torch.float64)
    for index, ((inputs, targets), share) in enumerate(zip(micro_batches, shares, strict=True)):
        with nullcontext() if index == len(shares) - 1 else wrapped.no_sync():
            with span("forward"):
                logits = wrapped.model(inputs)
                # the mean over no tokens is no number, but every rank needs a backward
                loss = loss_fn(logits, targets) * share if share else logits.sum() * 0
            with span("backward"):
                wrapped.backward(loss)
        total[0] += loss.detach()
        if masked:
            total[1:] += right_and_asked(logits.detach(), targets)
    return total


def _through_stages(
    wrapped: Wrapped,
    pipeline: Pipeline,
    schedule: Schedule,
    micro_batches: _MicroBatches,
    shares: Sequence[float],
) -> Tensor:
    """Run the pipeline; gradients are sent after the last backward, when a tied one is complete."""
    inputs, targets = zip(*micro_batches, strict=True)
    with (wrapped.in_schedule or wrapped.no_sync)():
        loss = pipeline.step(schedule, inputs, targets, shares)
    total = torch.zeros(3, device=inputs[0].device, dtype=torch.float64)
    if loss is not None:
        total[0] = loss
    return total


@torch.no_grad()
def _without_gradients(
    wrapped: Wrapped, loss_fn: _LossFn, micro_batches: _MicroBatches, shares: Sequence[float]
) -> Tensor:
    total = torch.zeros(3, device=micro_batches[0][0].device, dtype=torch.float64)
    for (inputs, targets), share in zip(micro_batches, shares, strict=True):
        logits = wrapped.model(inputs)  # every rank calls it: it may gather parameters
        if share:
            total[0] += loss_fn(logits, targets) * share
    return total


def _forward_through_stages(
    pipeline: Pipeline,
    placement: Sequence[int],
    micro_batches: _MicroBatches,
    shares: Sequence[float],
) -> Tensor:
    inputs, targets = zip(*micro_batches, strict=True)
    total = torch.zeros(3, device=inputs[0].device, dtype=torch.float64)
    loss = pipeline.forward_only(inputs, targets, shares, placement)
    if loss is not None:
        total[0] = loss
    return total
