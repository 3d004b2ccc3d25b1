"""Measuring pipeline steps on real ranks, to hold them against simulated ones.

`emulated(schedule, times)` is a step whose stages take the times that `simulate` plays, without
using a processor, as ranks with accelerators of their own would; its gradients are real.
`measure` times such steps, or those of any model, in turns, so that whatever else the machine does
falls on all of them. `measure_times` finds the times of a model to simulate with. Notebook
08_pipeline.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from course_lib.core.records import COMPUTE_KINDS, Event
from course_lib.pipeline.actions import LETTERS, Action, Schedule, num_model_chunks_of
from course_lib.pipeline.engine import LossFn, Pipeline
from course_lib.pipeline.simulation import INSTANT, PipelineTimes
from course_lib.pipeline.stage import Stage
from course_lib.ranks import Ranks, record
from course_lib.ranks.timing import Measured

BuildStage = Callable[
    [int, int], Stage | nn.Module | Sequence[nn.Module]
]  # (stage, num_stages) -> it


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """What to measure: `build(stage, num_stages)` on every rank, and steps of one schedule."""

    build: BuildStage
    schedule: Schedule
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    loss_fn: LossFn


@dataclass(frozen=True)
class MeasuredPipeline(Measured):
    """Turns of one schedule: seconds, the median step's events, micro-batches held by each rank."""

    peak_in_flight: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time, in the median step, in which they do not compute."""
        computed = [event for event in self.events if event.kind in COMPUTE_KINDS]
        length_s = max(e.end_s for e in computed) - min(e.start_s for e in computed)
        return 1 - sum(e.duration_s for e in computed) / (len(self.peak_in_flight) * length_s)


def measure(
    ranks: Ranks, runs: Mapping[Any, PipelineRun], turns: int = 5
) -> dict[Any, MeasuredPipeline]:
    """Time steps of all runs, taking turns.

    A step lasts from the moment when the last rank begins until the last one has ended.
    """
    by_rank = ranks.run(_record_steps, dict(runs), turns)
    return {name: measured_of([found[name] for found in by_rank]) for name in runs}


def measure_times(ranks: Ranks, run: PipelineRun, turns: int = 3) -> PipelineTimes:
    """Seconds of the run's actions while only one rank computes at a time: medians by model chunk.

    Whole backwards are counted half and half; a run whose schedule cuts them has both measured.
    """
    alone = replace(run, schedule=_one_by_one(run.schedule))
    events = measure(ranks, {"": alone}, turns)[""].events
    num_stages, num_model_chunks = len(run.schedule), num_model_chunks_of(run.schedule)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if event.kind in LETTERS:
            _, _, chunk = event.label.partition(".")
            depth = int(chunk or 0) * num_stages + event.rank
            seconds[event.kind, depth].append(event.duration_s)

    def by_depth(kind: str, parts: int = 1) -> list[float]:
        return [median(seconds[kind, d]) / parts for d in range(num_stages * num_model_chunks)]

    if ("backward", 0) in seconds:
        halves = {"backward_input_s": by_depth("backward", 2)}
        halves["backward_weight_s"] = halves["backward_input_s"]
    else:
        halves = {f"{kind}_s": by_depth(kind) for kind in ("backward_input", "backward_weight")}
    sizes = [event.num_bytes for event in events if event.kind == "send"]
    return PipelineTimes(
        forward_s=by_depth("forward"),
        **halves,
        link=ranks.link or INSTANT,
        message_bytes=median(sizes) if sizes else 0.0,
    )


def _one_by_one(schedule: Schedule) -> Schedule:
    """The same actions, one micro-batch after the other."""
    order = list(LETTERS)

    def place(action: Action) -> tuple[int, int, int]:
        chunk = action.model_chunk if action.kind == "forward" else -action.model_chunk
        return action.micro_batch, order.index(action.kind), chunk

    return [sorted(actions, key=place) for actions in schedule]


# --- stages that only take their time


def emulated(schedule: Schedule, times: PipelineTimes) -> PipelineRun:
    """Steps that take what `simulate(schedule, times)` plays, on ranks with `times.link`.

    The length of a micro-batch comes from `times.micro_batch_scale`; messages have their size.
    """
    num_micro_batches = 1 + max(action.micro_batch for action in schedule[0])
    inputs = [
        torch.full((max(1, round(times.bytes_of(n) / 4)),), float(times.scale(n)))
        for n in range(num_micro_batches)
    ]
    return PipelineRun(
        build=partial(_emulated_stage, times, num_model_chunks_of(schedule)),
        schedule=schedule,
        inputs=inputs,
        targets=[torch.ones(1)] * num_micro_batches,
        loss_fn=_first_number,
    )


def _emulated_stage(
    times: PipelineTimes, num_model_chunks: int, stage: int, num_stages: int
) -> Stage:
    seconds = times.by_depth(num_stages, num_model_chunks)
    kinds = ("forward", "backward_input", "backward_weight")
    depths = range(stage, num_stages * num_model_chunks, num_stages)
    return Stage([TimedLayer(*(seconds[kind][depth] for kind in kinds)) for depth in depths])


def _first_number(output: Tensor, target: Tensor) -> Tensor:
    return output[0] * target[0]


class TimedLayer(nn.Module):
    """x + weight, which takes given seconds for forward and for each half of backward.

    The first number of x says how long its micro-batch is, in parts of an ordinary one.
    """

    def __init__(self, forward_s: float, backward_input_s: float, backward_weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = (forward_s, backward_input_s, backward_weight_s)

    def forward(self, x: Tensor) -> Tensor:
        forward_s, input_s, weight_s = (seconds * x[0].item() for seconds in self.seconds)
        time.sleep(forward_s)
        return _SlowGrad.apply(_add(x, self.weight, weight_s), input_s)


def _add(x: Tensor, weight: Tensor, weight_s: float) -> Tensor:
    """x + weight; the weight's gradient takes its time. One operation for whoever watches."""
    if has_torch_function_variadic(x, weight):
        return handle_torch_function(_add, (x, weight), x, weight, weight_s)
    return x + _SlowGrad.apply(weight, weight_s)


class _SlowGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None


# --- on the ranks


@dataclass(frozen=True)
class _Turn:
    start_s: float
    events: list[Event]
    peak_in_flight: int


def _record_steps(rank: int, runs: Mapping[Any, PipelineRun], turns: int) -> dict[Any, list[_Turn]]:
    """On a rank: what happened in each turn of each run; the first ones agree on shapes."""
    num_stages = dist.get_world_size()
    pipelines = {n: Pipeline(run.build(rank, num_stages), run.loss_fn) for n, run in runs.items()}
    found: dict[Any, list[_Turn]] = {name: [] for name in runs}
    for _ in range(turns + 1):
        for name, pipeline in pipelines.items():
            run = runs[name]
            pipeline.stage.zero_grad()
            dist.barrier()
            start_s = time.perf_counter()
            with record() as log:
                pipeline.step(run.schedule, run.inputs, run.targets)
            found[name].append(_Turn(start_s, log.events, pipeline.peak_in_flight))
    return {name: each[1:] for name, each in found.items()}


def measured_of(by_rank: Sequence[Sequence[_Turn]]) -> MeasuredPipeline:
    """Put the ranks' events of each turn together."""
    turns = list(zip(*by_rank, strict=True))
    seconds = tuple(map(_step_s, turns))
    middle = turns[sorted(range(len(turns)), key=seconds.__getitem__)[len(turns) // 2]]
    events = sorted((e for turn in middle for e in turn.events), key=lambda event: event.start_s)
    zero_s = min(event.start_s for event in events)
    shifted = [
        replace(event, start_s=event.start_s - zero_s, end_s=event.end_s - zero_s)
        for event in events
    ]
    return MeasuredPipeline(seconds, shifted, tuple(turn.peak_in_flight for turn in middle))


def _step_s(turn: Sequence[_Turn]) -> float:
    ends_s = [e.end_s for one in turn for e in one.events if e.kind in COMPUTE_KINDS]
    return max(ends_s) - max(one.start_s for one in turn)
