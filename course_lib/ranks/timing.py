"""Time several ways to do the same in turns, so that whatever else the machine does falls on all.

`time_interleaved` returns seconds; `record_interleaved` records the events of training steps, which `Measured`
sums up. `largest_difference` compares results, `communication_s` adds up communication.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.records import COMMUNICATION_KINDS, Event
from course_lib.ranks import record, span

Build = Callable[[], nn.Module]
LossOf = Callable[[nn.Module, int], Tensor]  # (model, rank) -> the loss of this rank's batch


def time_interleaved(
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


def communication_s(events: Iterable[Event]) -> float:
    """Seconds in which at least one message is under way: several at a time count once."""
    calls = [event for event in events if event.kind in COMMUNICATION_KINDS]
    total_s, until_s = 0.0, -math.inf
    for call in sorted(calls, key=lambda call: call.start_s):
        total_s += max(0.0, call.end_s - max(call.start_s, until_s))
        until_s = max(until_s, call.end_s)
    return total_s


@dataclass(frozen=True)
class Measured:
    """Turns of one kind of step: seconds of each, and the events of all ranks in the median one."""

    seconds: tuple[float, ...]
    events: list[Event]

    @property
    def step_s(self) -> float:
        """The median."""
        return median(self.seconds)

    @property
    def least_s(self) -> float:
        """The turn that was disturbed least."""
        return min(self.seconds)


def record_interleaved(
    rank: int,
    models: Mapping[Any, Any],
    loss_of: LossOf,
    turns: int,
    *,
    ahead: int = 1,
    finish: Callable[[Any], object] = lambda model: None,
) -> dict[Any, list[list[Event]]]:
    """On a rank: the events of each turn of each model, which step one after the other.

    ahead   steps that do not count
    finish  what a model needs between its backward and its step
    """
    found: dict[Any, list[list[Event]]] = {name: [] for name in models}
    for _ in range(turns + ahead):
        for name, model in models.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            optimizer.zero_grad()
            dist.barrier()
            with record() as log:
                with span("forward"):
                    loss = loss_of(model, rank)
                with span("backward"):
                    loss.backward()
                finish(model)
                with span("optimizer"):
                    optimizer.step()
            found[name].append(log.events)
    return {name: events[ahead:] for name, events in found.items()}


def measured_of(by_rank: Sequence[Sequence[list[Event]]]) -> Measured:
    """Put the ranks' events of each turn together."""
    turns = [
        [event for events in ranks for event in events] for ranks in zip(*by_rank, strict=True)
    ]
    seconds = tuple(map(_step_s, turns))
    middle = sorted(range(len(turns)), key=seconds.__getitem__)[len(turns) // 2]
    zero_s = min(event.start_s for event in turns[middle])
    shifted = [
        replace(event, start_s=event.start_s - zero_s, end_s=event.end_s - zero_s)
        for event in turns[middle]
    ]
    return Measured(seconds, sorted(shifted, key=lambda event: event.start_s))


def _step_s(events: Sequence[Event]) -> float:
    began_s = max(event.start_s for event in events if event.kind == "forward")
    return max(event.end_s for event in events if event.kind == "optimizer") - began_s
