"""Two ways to do the same, timed in turns, so that whatever else the machine does falls on both."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import nn


def in_turns(
    steps: Mapping[str, tuple[nn.Module, Callable[[], Any]]], turns: int = 5
) -> dict[str, float]:
    """Median seconds of each step on this rank; all ranks begin together.

    steps   by name, whose gradients are cleared before a step, and the step; a first turn of each
            is not counted
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in list(steps) * (turns + 1):
        module, step = steps[name]
        module.zero_grad()
        dist.barrier()
        start_s = time.perf_counter()
        step()
        seconds[name].append(time.perf_counter() - start_s)
    return {name: median(times[1:]) for name, times in seconds.items()}
