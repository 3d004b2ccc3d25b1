"""Measure several versions of a step in turns, so that disturbances affect all of them alike.

`time_interleaved` returns the seconds of each version; `record_interleaved` records the events of
training steps, which `measured_of` puts together over the ranks. `largest_difference` compares
results, `communication_s` adds up the time of communication.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.records import COMMUNICATION_KINDS, Event
from course_lib.ranks import record, span
from course_lib.ranks.progress import in_turns

Build = Callable[[], nn.Module]
LossOf = Callable[[nn.Module, int], Tensor]  # (model, rank) -> the loss of this rank's batch


def time_interleaved(
    steps: Mapping[str, tuple[nn.Module, Callable[[], Any]]],
    turns: int = 5,
    of: Callable[[list[float]], float] = median,
) -> dict[str, float]:
    """Return the median seconds of each step on this rank; all ranks begin together.

    steps   (module, step) by name; the module's gradients are cleared before each step
    turns   timed steps of each; a first turn, which warms up, is not counted
    of      reduces the seconds of the turns to one number; min: the least disturbed turn
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in in_turns(steps, turns + 1):
        module, step = steps[name]
        module.zero_grad()
        dist.barrier()
        start_s = time.perf_counter()
        step()
        seconds[name].append(time.perf_counter() - start_s)
    return {name: of(times[1:]) for name, times in seconds.items()}


def largest_difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors, over all ranks; inf for nan.

    Cost:    one all_reduce of one number
    Raises:  ValueError where the lists differ in length
    """
    pairs = zip(ours, theirs, strict=True)
    apart = torch.stack([(one - other).detach().abs().max() for one, other in pairs]).max()
    apart = apart.nan_to_num(nan=math.inf)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.item()


def communication_s(events: Iterable[Event]) -> float:
    """Return the seconds in which at least one call is under way; simultaneous ones count once."""
    calls = [event for event in events if event.kind in COMMUNICATION_KINDS]
    total_s, until_s = 0.0, -math.inf
    for call in sorted(calls, key=lambda call: call.start_s):
        total_s += max(0.0, call.end_s - max(call.start_s, until_s))
        until_s = max(until_s, call.end_s)
    return total_s


@dataclass(frozen=True)
class Measured:
    """Measured turns of one step: seconds of each, and all ranks' events of the median turn."""

    seconds: tuple[float, ...]
    events: list[Event]

    @property
    def step_s(self) -> float:
        """Median seconds of the turns."""
        return median(self.seconds)

    @property
    def least_s(self) -> float:
        """Seconds of the fastest turn, which was disturbed least."""
        return min(self.seconds)


@dataclass(frozen=True, kw_only=True)
class StepsTaken:
    """Training steps on one rank: losses (nan where unknown), seconds, the last step's events."""

    losses: list[float]
    seconds: list[float]
    last_events: list[Event]

    @property
    def median_ms(self) -> float:
        """The median step, in milliseconds."""
        return 1e3 * median(self.seconds)

    def calls(self) -> dict[str, tuple[int, int]]:
        """Return the number of calls of the last step and their bytes, by kind; none alone."""
        found: dict[str, tuple[int, int]] = {}
        for event in self.last_events:
            if event.kind in COMMUNICATION_KINDS and len(event.group) > 1:
                count, size = found.get(event.kind, (0, 0))
                found[event.kind] = count + 1, size + event.num_bytes
        return found


def timed_steps(
    step: Callable[[Tensor, Tensor], float], batches: Iterable[tuple[Tensor, Tensor]]
) -> StepsTaken:
    """Take a step per batch on this rank: `step(inputs, targets)` trains, and returns the loss."""
    losses, seconds, events = list[float](), list[float](), list[Event]()
    for inputs, targets in batches:
        start_s = time.perf_counter()
        with record() as log:
            losses.append(step(inputs, targets))
        seconds.append(time.perf_counter() - start_s)
        events = log.events
    return StepsTaken(losses=losses, seconds=seconds, last_events=events)


def record_interleaved(
    rank: int,
    models: Mapping[Any, Any],
    loss_of: LossOf,
    turns: int,
    *,
    ahead: int = 1,
    finish: Callable[[Any], object] = lambda model: None,
) -> dict[Any, list[list[Event]]]:
    """Train the models in turns on this rank; return the events of each turn by model.

    ahead   first steps of each model that are not counted
    finish  called with the model between its backward pass and the optimizer's step

    Cost:   a barrier per step, so that all ranks begin together
    """
    found: dict[Any, list[list[Event]]] = {name: [] for name in models}
    for name, model in in_turns(models.items(), turns + ahead):
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
    """Put together what `record_interleaved` returned on each rank."""
    turns = [
        [event for events in ranks for event in events] for ranks in zip(*by_rank, strict=True)
    ]
    seconds = tuple(map(_step_s, turns))
    return Measured(seconds, from_zero(turns[median_turn(seconds)]))


def median_turn(seconds: Sequence[float]) -> int:
    """Return the index of the turn that took the median time; of two, the slower one."""
    return sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]


def from_zero(events: Iterable[Event]) -> list[Event]:
    """Return the events sorted by start, on a clock that shows 0 s when the first one starts."""
    ordered = sorted(events, key=lambda event: event.start_s)
    zero_s = ordered[0].start_s
    return [event.since(zero_s) for event in ordered]


def _step_s(events: Sequence[Event]) -> float:
    began_s = max(event.start_s for event in events if event.kind == "forward")
    return max(event.end_s for event in events if event.kind == "optimizer") - began_s
