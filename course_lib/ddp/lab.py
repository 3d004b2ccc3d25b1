"""Measuring DDP steps on real ranks, to hold them against the model of overlap.

`measure_cost` times a module that has nobody to talk to: that is all `cost.overlap` has to know.
`measure_steps` times DDP steps, and `measure_sweep` does so for several bucket sizes. Runs take
turns, so that whatever else the machine does falls on all of them. Where ranks share processors,
computing and the wire disturb each other; layers of `emulated_model` take their time without using
a processor, as a rank with an accelerator of its own would. Notebook 06_ddp.
"""

import time
from collections.abc import Iterable, Mapping
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core.records import Event
from course_lib.ddp.cost import StepCost
from course_lib.ddp.ddp import DDP
from course_lib.ranks import Ranks
from course_lib.ranks.timing import Build, LossOf, Measured, measured_of, record_interleaved


def measure_cost(ranks: Ranks, build: Build, loss_of: LossOf, turns: int = 5) -> StepCost:
    """What a rank computes in a step while all ranks compute and nobody talks: medians."""
    measured = [turn for by_rank in ranks.run(_alone, build, loss_of, turns) for turn in by_rank]
    moments = zip(*(turn["ready_s"] for turn in measured), strict=True)
    return StepCost(
        forward_s=median(turn["forward_s"] for turn in measured),
        ready_s=tuple(map(median, moments)),
        grad_bytes=measured[0]["grad_bytes"],
        optimizer_s=median(turn["optimizer_s"] for turn in measured),
    )


def measure_steps(
    ranks: Ranks,
    build: Build,
    loss_of: LossOf,
    runs: Mapping[Any, Mapping[str, Any]],
    turns: int = 5,
) -> dict[Any, Measured]:
    """Time steps of DDP(build(), **options) for each name and options of `runs`, taking turns.

    A step lasts from the moment when the last rank begins until the last one has ended.
    """
    by_rank = ranks.run(_record_steps, build, loss_of, dict(runs), turns)
    return {name: measured_of([found[name] for found in by_rank]) for name in runs}


def measure_sweep(
    ranks: Ranks,
    build: Build,
    loss_of: LossOf,
    bucket_sizes: Iterable[int],
    overlap: bool = True,
    turns: int = 5,
) -> dict[Any, Measured]:
    """Time steps for each bucket size: {bucket_bytes: Measured}."""
    runs = {size: {"bucket_bytes": size, "overlap": overlap} for size in bucket_sizes}
    return measure_steps(ranks, build, loss_of, runs, turns)


def _alone(rank: int, build: Build, loss_of: LossOf, turns: int) -> list[dict[str, Any]]:
    """On a rank: seconds of each part of a step, for some turns; nobody sends anything."""
    module = build()
    arrived: dict[Tensor, float] = {}
    params = [param for param in module.parameters() if param.requires_grad][::-1]
    for param in params:
        param.register_post_accumulate_grad_hook(
            lambda param: arrived.__setitem__(param, time.perf_counter())
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    found = []
    for _ in range(turns + 1):
        dist.barrier()
        optimizer.zero_grad()
        moments = [time.perf_counter()]
        loss = loss_of(module, rank)
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        moments.append(time.perf_counter())
        start_s, backward_s, optimizer_s, end_s = moments
        ready_s = accumulate((arrived[param] - backward_s for param in params), max)
        found.append(
            {
                "forward_s": backward_s - start_s,
                "ready_s": tuple(ready_s),
                "grad_bytes": tuple(param.nbytes for param in params),
                "optimizer_s": end_s - optimizer_s,
            }
        )
    return found[1:]


def _record_steps(
    rank: int,
    build: Build,
    loss_of: LossOf,
    runs: Mapping[Any, Mapping[str, Any]],
    turns: int,
) -> dict[Any, list[list[Event]]]:
    """On a rank: the events of each turn of each run."""
    models = {name: DDP(build(), **options) for name, options in runs.items()}
    return record_interleaved(rank, models, loss_of, turns, finish=DDP.finish)
