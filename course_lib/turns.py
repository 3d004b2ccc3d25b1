"""Two ways to do the same: timed in turns, so that whatever else the machine does falls on both.

And what is said of them: how far apart their numbers are, how much of a step was talking.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.records import COMMUNICATION_KINDS, Event


def in_turns(
    steps: Mapping[str, tuple[nn.Module, Callable[[], Any]]],
    turns: int = 5,
    of: Callable[[list[float]], float] = median,
) -> dict[str, float]:
    """Median seconds of each step on this rank; all ranks begin together.

    steps   by name, whose gradients are cleared before a step, and the step; a first turn of each
            is not counted
    of      what is made of the turns' seconds; min: the least disturbed turn
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in list(steps) * (turns + 1):
        module, step = steps[name]
        module.zero_grad()
        dist.barrier()
        start_s = time.perf_counter()
        step()
        seconds[name].append(time.perf_counter() - start_s)
    return {name: of(times[1:]) for name, times in seconds.items()}


def largest_difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """How far apart two rows of tensors are at most, on any rank; infinitely where one is nan.

    Cost:    one all_reduce of one number
    """
    pairs = zip(ours, theirs, strict=True)
    apart = torch.stack([(one - other).detach().abs().max() for one, other in pairs]).max()
    apart = apart.nan_to_num(nan=math.inf)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.item()


def talking_s(events: Iterable[Event]) -> float:
    """Seconds in which at least one message is under way: several at a time count once."""
    calls = [event for event in events if event.kind in COMMUNICATION_KINDS]
    total_s, until_s = 0.0, -math.inf
    for call in sorted(calls, key=lambda call: call.start_s):
        total_s += max(0.0, call.end_s - max(call.start_s, until_s))
        until_s = max(until_s, call.end_s)
    return total_s
