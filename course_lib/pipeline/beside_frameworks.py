"""A pipeline in this course, in PyTorch and in Megatron-Core: the same model, batches, schedule.

Notebook 08_pipeline.
"""

import math
from collections.abc import Iterable
from contextlib import closing
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core.specs import ModelSpec
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline.actions import Schedule, placement_of
from course_lib.pipeline.engine import Pipeline
from course_lib.pipeline.schedules import interleaved, one_f_one_b
from course_lib.pipeline.stage import split_model
from course_lib.ranks.timing import StepsTaken, time_interleaved, timed_steps
from course_lib.ranks.world import rank_device

SGD = partial(torch.optim.SGD, lr=0.1)


def run_pipeline(
    rank: int,
    spec: ModelSpec,
    batches: Iterable[tuple[Tensor, Tensor]],
    num_micro_batches: int,
    is_ours: bool,
    model_chunks: int = 1,
) -> StepsTaken:
    """On a rank: take a step per batch, a stage on each rank, with 1F1B.

    model_chunks   of each rank; more than 1: the interleaved schedule

    The loss is known on the last rank, and nan on the others.

    Raises: CourseError where Megatron-Core is asked for and not installed
    """
    torch.manual_seed(0)
    model, p, m, device = GPT(spec), dist.get_world_size(), num_micro_batches, rank_device()
    if not is_ours:
        from course_lib.frameworks import MegatronEngine  # slow to import

        with closing(MegatronEngine(model, SGD, pp=p, model_chunks=model_chunks)) as engine:
            return timed_steps(partial(engine.step, num_micro_batches=m), batches)
    stage = split_model(model.to(device), p, rank, num_model_chunks=model_chunks)
    pipeline = Pipeline(stage, token_loss)
    schedule = one_f_one_b(p, m) if model_chunks == 1 else interleaved(p, m, model_chunks)
    optimizer = SGD(stage.parameters())

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = pipeline.step(schedule, inputs.to(device).chunk(m), targets.to(device).chunk(m))
        optimizer.step()
        return math.nan if loss is None else loss.item()

    return timed_steps(step, batches)


def run_schedule(
    rank: int, spec: ModelSpec, name: str, plan: Schedule, num_micro_batches: int = 8
) -> tuple[bool, dict[str, float]]:
    """On a rank: run a plan in our engine, and PyTorch's schedule of that name, in turns.

    Return whether all gradients are equal to the last bit, and the seconds of a step of each. The
    model must be untied: PyTorch does not sum the gradients of a matrix that two stages share.
    """
    from torch.distributed import pipelining  # slow to import

    torch.manual_seed(0)
    m, placement, device = num_micro_batches, placement_of(plan), rank_device()
    split = split_model(GPT(spec).to(device), dist.get_world_size(), rank, placement=placement)
    ours = Pipeline(split, token_loss)
    parts, depths = deepcopy(ours.stage.chunks), ours.stage.depths
    stages = [
        pipelining.PipelineStage(part, depth, len(placement), device)
        for part, depth in zip(parts, depths, strict=True)
    ]
    one_each = issubclass(getattr(pipelining, name), pipelining.schedules.PipelineScheduleSingle)
    theirs = getattr(pipelining, name)(stages[0] if one_each else stages, m, loss_fn=token_loss)
    batch = next_tokens(token_batch(0, batch=m, seq=32, vocab=spec.vocab))
    x, y = (tokens.to(device) for tokens in batch)
    first = [x] if rank == 0 else []
    seconds = time_interleaved(
        {
            "ours": (ours.stage, lambda: ours.step(plan, x.chunk(m), y.chunk(m))),
            "PyTorch's": (parts, lambda: theirs.step(*first, target=y)),
        }
    )
    grads = ([param.grad for param in module.parameters()] for module in (ours.stage, parts))
    equal = all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(*grads, strict=True)
    )
    return equal, seconds
