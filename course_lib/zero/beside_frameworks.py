"""Run ZeRO's stages in this course and in DeepSpeed on the same model and batch.

`kept_bytes` says what each of them keeps between two steps, and why. `take_steps` times any
framework's engine; the FSDP lesson uses it too. Notebook 09_zero.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core.specs import ModelSpec
from course_lib.models import GPT, token_loss
from course_lib.ranks.timing import StepsTaken, timed_steps
from course_lib.zero.zero import ZeRO1, ZeRO2, ZeRO3

if TYPE_CHECKING:
    from course_lib.frameworks import Engine


BUCKET_NUMEL = 2**14  # DeepSpeed's reduce_bucket_size here


def take_steps(engine: "Engine", batches: Iterable[tuple[Tensor, Tensor]]) -> StepsTaken:
    """On a rank: take one step per batch, each on this rank's part of it."""
    rank, p = dist.get_rank(), dist.get_world_size()

    def step(inputs: Tensor, targets: Tensor) -> float:
        return engine.step(token_loss(engine.model(inputs[rank::p]), targets[rank::p]))

    return timed_steps(step, batches)


def run_stage(
    rank: int, spec: ModelSpec, batch: tuple[Tensor, Tensor], zero: int, is_ours: bool
) -> tuple[float, float, float]:
    """On a rank: return the third loss, median ms of three steps, and KiB of live tensors.

    Raises:  CourseError where DeepSpeed is asked for and not installed
    """
    from course_lib.frameworks import alive_bytes, deepspeed_engine  # slow to import

    before, adam = alive_bytes(), partial(torch.optim.AdamW, lr=1e-3)
    torch.manual_seed(0)
    model = GPT(spec)
    engine = (
        _ours(model, zero)
        if is_ours
        else deepspeed_engine(model, adam, stage=zero, reduce_bucket_size=BUCKET_NUMEL)
    )
    steps = take_steps(engine, [batch] * 3)
    return steps.losses[-1], steps.median_ms, (alive_bytes() - before) / 2**10


def kept_bytes(zero: int, numel: int, p: int, is_ours: bool) -> dict[str, float]:
    """Return the bytes between two steps of an fp32 model with Adam, by what they are for.

    DeepSpeed copies its shard as an fp32 master whatever the model's dtype; stage 3 also keeps the
    buffers of gradients and of a bucket, and gathers small tensors again after each step
    (stage3_param_persistence_threshold: up to 10**5 numbers).

    Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py, stage3.py, config.py
    """
    shard = 4 * numel / p
    kept = {"parameters": shard if zero == 3 else 4 * numel, "moments": 2 * shard}
    if not is_ours:
        kept["master copy"] = shard
    if not is_ours and zero == 3:
        kept |= {"gradients": shard, "bucket": 4 * BUCKET_NUMEL, "left gathered": 4 * numel}
    return kept


def _ours(model: GPT, zero: int) -> "Engine":
    """Return our engine of a stage behind the handle of the frameworks."""
    from course_lib.frameworks import Engine

    stage = (ZeRO1, ZeRO2, ZeRO3)[zero - 1]
    engine = stage(model, torch.optim.AdamW, lr=1e-3, bucket_bytes=2**16)

    def update() -> None:
        engine.step()
        engine.zero_grad()

    return Engine(
        name=stage.__name__,
        model=engine,  # type: ignore[arg-type]
        backward=Tensor.backward,
        update=update,
        weights=lambda: engine.full_state_dict()["model"],
    )
