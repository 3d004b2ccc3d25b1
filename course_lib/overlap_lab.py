"""Measuring DDP steps on real ranks, to hold them against the model of overlap.

`measure_cost` times a module that has nobody to talk to: that is all `cost.overlap` has to know.
`measure_steps` times DDP steps, and `measure_sweep` does so for several bucket sizes. Runs take
turns, so that whatever else the machine does falls on all of them. Where ranks share processors,
computing and the wire disturb each other; layers of `emulated_model` take their time without using
a processor, as a rank with an accelerator of its own would. Notebook 06_ddp.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.records import Event
from course_lib.cost.overlap import StepCost
from course_lib.ddp import DDP
from course_lib.ranks import Ranks, record, span

Build = Callable[[], nn.Module]
LossOf = Callable[[nn.Module, int], Tensor]  # (model, rank) -> the loss of this rank's batch


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
    by_rank = ranks.run(_in_turns, build, loss_of, dict(runs), turns)
    return {name: _measured([found[name] for found in by_rank]) for name in runs}


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


def emulated_model(
    num_layers: int = 12,
    layer_bytes: int = 2**20,
    backward_s: float = 0.01,
    forward_s: float = 0.005,
) -> nn.Module:
    """Layers that take given seconds each, without a processor, and have float32 gradients."""
    return nn.Sequential(
        *(EmulatedLayer(layer_bytes, forward_s, backward_s) for _ in range(num_layers))
    )


def emulated_loss(model: nn.Module, rank: int) -> Tensor:
    """A loss for `emulated_model`."""
    return model(torch.ones(1)).sum()


class EmulatedLayer(nn.Module):
    """x + weight[0], which sleeps as long as a real layer would compute."""

    def __init__(self, num_bytes: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4))
        self.seconds = (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, *self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        weight_grad = torch.zeros_like(ctx.saved_tensors[0])
        weight_grad[0] = grad.sum()
        return grad, weight_grad, None, None


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


def _in_turns(
    rank: int,
    build: Build,
    loss_of: LossOf,
    runs: Mapping[Any, Mapping[str, Any]],
    turns: int,
) -> dict[Any, list[list[Event]]]:
    """On a rank: the events of each turn of each run."""
    models = {name: DDP(build(), **options) for name, options in runs.items()}
    return in_turns(rank, models, loss_of, turns, finish=DDP.finish)


def in_turns(
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


def _measured(by_rank: Sequence[Sequence[list[Event]]]) -> Measured:
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
