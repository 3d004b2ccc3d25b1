"""Measure DDP steps on real ranks, to compare them with the predictions of `ddp/cost.py`.

`measure_cost` times a module without communication: the input of the prediction. `measure_steps`
times DDP steps, and `measure_sweep` does so for several bucket sizes. Runs are interleaved, so that
other load on the machine affects all of them alike. Where ranks share processors, computation and
communication slow each other down; the layers of `emulated_model` sleep instead of computing, as if
each rank had a device of its own. Notebook 06_ddp.
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
from course_lib.ranks.progress import in_turns
from course_lib.ranks.timing import Build, LossOf, Measured, measured_of, record_interleaved


def measure_cost(ranks: Ranks, build: Build, loss_of: LossOf, turns: int = 5) -> StepCost:
    """Return the median times of a step's computation, while all ranks compute without sending."""
    measured = [turn for by_rank in ranks.run(_alone, build, loss_of, turns) for turn in by_rank]
    ready_s = zip(*(turn["ready_s"] for turn in measured), strict=True)
    return StepCost(
        forward_s=median(turn["forward_s"] for turn in measured),
        ready_s=tuple(map(median, ready_s)),
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
    """Time steps of DDP(build(), **options) for each name and options of `runs`, interleaved.

    A step lasts from when the last rank begins until the last one has ended.
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


def measure_sweeps(
    pools: Mapping[str, Ranks],
    build: Build,
    loss_of: LossOf,
    bucket_sizes: Iterable[int],
    turns: int = 5,
) -> dict[str, dict[Any, Measured]]:
    """Time steps for each bucket size on several links: {name of the pool: {bucket_bytes: ...}}."""
    sizes = [*bucket_sizes]
    return {
        name: measure_sweep(ranks, build, loss_of, sizes, turns=turns)
        for name, ranks in pools.items()
    }


def _alone(rank: int, build: Build, loss_of: LossOf, turns: int) -> list[dict[str, Any]]:
    """On a rank: return the seconds of each part of a step per turn, without communication."""
    module = build()
    completed_s: dict[Tensor, float] = {}
    params = [param for param in module.parameters() if param.requires_grad][::-1]
    for param in params:
        param.register_post_accumulate_grad_hook(
            lambda param: completed_s.__setitem__(param, time.perf_counter())
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    found = []
    for _ in in_turns([module], turns + 1):
        dist.barrier()
        optimizer.zero_grad()
        times_s = [time.perf_counter()]
        loss = loss_of(module, rank)
        times_s.append(time.perf_counter())
        loss.backward()
        times_s.append(time.perf_counter())
        optimizer.step()
        times_s.append(time.perf_counter())
        start_s, backward_s, optimizer_s, end_s = times_s
        ready_s = accumulate((completed_s[param] - backward_s for param in params), max)
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
    """On a rank: return the events of each turn of each run."""
    models = {name: DDP(build(), **options) for name, options in runs.items()}
    return record_interleaved(rank, models, loss_of, turns, finish=DDP.finish)
