"""Measurement of pipeline steps on real ranks, to compare with simulated ones.

`measure` times the steps of any model or schedule; runs take turns, so that a disturbance by other
processes affects all of them. `measure_times` finds the durations of a model's actions, to simulate
with. `emulated(schedule, times)` makes steps whose stages sleep for given durations, as if each
rank had an accelerator of its own; their gradients are real. Notebook 08_pipeline.
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
from course_lib.pipeline.actions import LETTERS, Action, Schedule, depths_of, placement_of
from course_lib.pipeline.engine import LossFn, Pipeline
from course_lib.pipeline.stage import Stage
from course_lib.pipeline.times import INSTANT, PipelineTimes
from course_lib.ranks import Ranks, record
from course_lib.ranks.progress import in_turns
from course_lib.ranks.timing import Measured, from_zero, median_turn

# (stage, num_stages) -> what the rank of that stage holds
BuildStage = Callable[[int, int], Stage | nn.Module | Sequence[nn.Module]]


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """Configuration of a measurement: `build(stage, num_stages)` on each rank, and one schedule.

    splits_all   see `Pipeline`
    """

    build: BuildStage
    schedule: Schedule
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    loss_fn: LossFn
    splits_all: bool = False


@dataclass(frozen=True)
class MeasuredPipeline(Measured):
    """Measured turns of one run, and each rank's peak of micro-batches in flight."""

    peak_in_flight: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks divided by their total time, in the median step."""
        computed = [event for event in self.events if event.kind in COMPUTE_KINDS]
        length_s = max(e.end_s for e in computed) - min(e.start_s for e in computed)
        return 1 - sum(e.duration_s for e in computed) / (len(self.peak_in_flight) * length_s)


def measure(
    ranks: Ranks, runs: Mapping[Any, PipelineRun], turns: int = 5
) -> dict[Any, MeasuredPipeline]:
    """Time steps of all runs, which take turns.

    A step lasts from when the last rank starts until the last rank has finished computing.
    """
    by_rank = ranks.run(_record_steps, dict(runs), turns)
    return {name: _measured([found[name] for found in by_rank]) for name in runs}


def measure_times(ranks: Ranks, run: PipelineRun, turns: int = 3) -> PipelineTimes:
    """Measure the median seconds of each model chunk's actions, one rank computing at a time.

    If the schedule has whole backwards, their time is divided equally between input and weight
    gradients; if it splits them, both parts are measured.
    """
    alone = replace(run, schedule=_one_by_one(run.schedule), splits_all=True)
    events = measure(ranks, {"": alone}, turns)[""].events
    placement = placement_of(run.schedule)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        if event.kind in LETTERS:
            _, _, chunk = event.label.partition(".")
            depth = depths_of(event.rank, placement)[int(chunk or 0)]
            seconds[event.kind, depth].append(event.duration_s)

    def by_depth(kind: str, parts: int = 1) -> list[float]:
        return [median(seconds[kind, depth]) / parts for depth in range(len(placement))]

    if ("backward", 0) in seconds:
        input_s = weight_s = by_depth("backward", 2)
    else:
        input_s, weight_s = by_depth("backward_input"), by_depth("backward_weight")
    sizes = [event.num_bytes for event in events if event.kind == "send"]
    return PipelineTimes(
        forward_s=by_depth("forward"),
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        link=ranks.link or INSTANT,
        message_bytes=median(sizes) if sizes else 0.0,
    )


def _one_by_one(schedule: Schedule) -> Schedule:
    """Return the same actions, ordered so that one micro-batch follows the other."""
    order = list(LETTERS)

    def position(action: Action) -> tuple[int, int, int]:
        chunk = action.model_chunk if action.kind == "forward" else -action.model_chunk
        return action.micro_batch, order.index(action.kind), chunk

    return [sorted(actions, key=position) for actions in schedule]


# --- emulated stages


def emulated(schedule: Schedule, times: PipelineTimes) -> PipelineRun:
    """Return a run whose actions take the durations of `times`, on ranks with `times.link`.

    Micro-batches are scaled by `times.micro_batch_scale`; messages have `times.message_bytes`.
    """
    num_micro_batches = 1 + max(action.micro_batch for action in schedule[0])
    inputs = [
        torch.full((max(1, round(times.bytes_of(n) / 4)),), float(times.scale(n)))
        for n in range(num_micro_batches)
    ]
    return PipelineRun(
        build=partial(_emulated_stage, times, placement_of(schedule)),
        schedule=schedule,
        inputs=inputs,
        targets=[torch.ones(1)] * num_micro_batches,
        loss_fn=_first_number,
    )


def _emulated_stage(
    times: PipelineTimes, placement: Sequence[int], stage: int, num_stages: int
) -> Stage:
    seconds, depths = times.by_depth(placement), depths_of(stage, placement)
    kinds = ("forward", "backward_input", "backward_weight")
    layers = [TimedLayer(*(seconds[kind][depth] for kind in kinds)) for depth in depths]
    return Stage(layers, depths=depths)


def _first_number(output: Tensor, target: Tensor) -> Tensor:
    return output[0] * target[0]


class TimedLayer(nn.Module):
    """Layer x + weight that sleeps for given seconds in forward and in each part of backward.

    The first number of x is the factor on these seconds for its micro-batch.
    """

    def __init__(self, forward_s: float, backward_input_s: float, backward_weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = (forward_s, backward_input_s, backward_weight_s)

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, then add."""
        forward_s, input_s, weight_s = (seconds * x[0].item() for seconds in self.seconds)
        time.sleep(forward_s)
        return _SlowGrad.apply(_add(x, self.weight, weight_s), input_s)


def _add(x: Tensor, weight: Tensor, weight_s: float) -> Tensor:
    """Return x + weight; the weight's gradient sleeps. `SplitBackward` sees a single operation."""
    if has_torch_function_variadic(x, weight):
        return handle_torch_function(_add, (x, weight), x, weight, weight_s)
    return x + _SlowGrad.apply(weight, weight_s)


class _SlowGrad(torch.autograd.Function):
    """Identity whose backward sleeps."""

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
    """Recorded step of one rank."""

    start_s: float
    events: list[Event]
    peak_in_flight: int


def _record_steps(rank: int, runs: Mapping[Any, PipelineRun], turns: int) -> dict[Any, list[_Turn]]:
    """On a rank: record each turn of each run; a first turn, which exchanges shapes, is dropped."""
    num_stages = dist.get_world_size()
    pipelines = {n: Pipeline(run.build(rank, num_stages), run.loss_fn) for n, run in runs.items()}
    found: dict[Any, list[_Turn]] = {name: [] for name in runs}
    for name, pipeline in in_turns(pipelines.items(), turns + 1):
        run = runs[name]
        pipeline.splits_all = run.splits_all
        pipeline.stage.zero_grad()
        dist.barrier()
        start_s = time.perf_counter()
        with record() as log:
            pipeline.step(run.schedule, run.inputs, run.targets)
        found[name].append(_Turn(start_s, log.events, pipeline.peak_in_flight))
    return {name: each[1:] for name, each in found.items()}


def _measured(by_rank: Sequence[Sequence[_Turn]]) -> MeasuredPipeline:
    """Combine the ranks' turns: seconds of all, events and peaks of the median one."""
    turns = list(zip(*by_rank, strict=True))
    seconds = tuple(map(_step_s, turns))
    median_ranks = turns[median_turn(seconds)]
    return MeasuredPipeline(
        seconds=seconds,
        events=from_zero(event for turn in median_ranks for event in turn.events),
        peak_in_flight=tuple(turn.peak_in_flight for turn in median_ranks),
    )


def _step_s(turn: Sequence[_Turn]) -> float:
    ends_s = [e.end_s for one in turn for e in one.events if e.kind in COMPUTE_KINDS]
    return max(ends_s) - max(one.start_s for one in turn)
