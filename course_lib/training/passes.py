"""A step's forward and backward passes: one micro-batch after the other, or through a pipeline.

Either way a micro-batch's loss counts for its share, and what comes back is the sum of them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from course_lib.cost.actions import Schedule
from course_lib.models import next_tokens, token_loss
from course_lib.pipeline import Pipeline
from course_lib.ranks.recorder import span
from course_lib.tensor_parallel import parallel_token_loss
from course_lib.training.axes import Axes
from course_lib.training.config import TrainConfig
from course_lib.training.parts import Parts
from course_lib.training.split import schedule_of
from course_lib.training.strategies import Wrapped

LossFn = Callable[[Tensor, Tensor], Tensor]
Pass = Callable[[Sequence[Tensor], Sequence[float]], Tensor]


def make_pass(parts: Parts, wrapped: Wrapped, config: TrainConfig, axes: Axes) -> Pass:
    """What leaves a step's gradient in every `param.grad`, up to `wrapped.finish()`.

    Call it with the micro-batches and their shares; it returns the loss, 0 where it is not known.
    """
    loss_fn: LossFn = token_loss
    if config.tp > 1:
        loss_fn = partial(parallel_token_loss, group=axes.group("tp"))
    if config.pp == 1:
        return partial(_one_by_one, wrapped, loss_fn)
    schedule = schedule_of(config, config.num_micro_batches(axes.degrees.dp))
    pipeline = Pipeline(parts.module, loss_fn, axes.group("pp"))
    return partial(_through_stages, wrapped, pipeline, schedule)


def _one_by_one(
    wrapped: Wrapped, loss_fn: LossFn, micro_batches: Sequence[Tensor], shares: Sequence[float]
) -> Tensor:
    total = torch.zeros((), device=micro_batches[0].device, dtype=torch.float64)
    for index, (micro_batch, share) in enumerate(zip(micro_batches, shares, strict=True)):
        inputs, targets = next_tokens(micro_batch)
        with nullcontext() if index == len(shares) - 1 else wrapped.no_sync():
            with span("forward"):
                loss = loss_fn(wrapped.model(inputs), targets) * share
            with span("backward"):
                loss.backward()
        total += loss.detach()
    return total


def _through_stages(
    wrapped: Wrapped,
    pipeline: Pipeline,
    schedule: Schedule,
    micro_batches: Sequence[Tensor],
    shares: Sequence[float],
) -> Tensor:
    """All gradients leave after the last backward: a tied one is whole only then."""
    inputs, targets = zip(*map(next_tokens, micro_batches), strict=True)
    with wrapped.no_sync():
        loss = pipeline.step(schedule, inputs, targets, shares)
    return torch.zeros((), device=micro_batches[0].device) if loss is None else loss
