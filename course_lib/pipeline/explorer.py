"""Interactive picture of a pipeline schedule: timeline, memory, bubble, micro-batches in flight.

Everything is simulated, so a slider responds at once. Notebook 08_pipeline.
"""

import math
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from course_lib.core.links import Link
from course_lib.display.explore import Explore, explore
from course_lib.pipeline import schedules
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.pictures import pipelines
from course_lib.pipeline.simulation import SimulatedStep, simulate
from course_lib.pipeline.times import PipelineTimes
from course_lib.pipeline.v_schedules import dual_pipe_v, zero_bubble_v

PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "naive": schedules.naive,
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_f_one_b,
    "ZB-H1": schedules.zero_bubble_h1,
    "ZB-V": zero_bubble_v,
    "DualPipeV": dual_pipe_v,
}
SCHEDULES = ["naive", "GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-V", "DualPipeV"]


def schedule_explorer() -> Explore:
    """Return a picture with sliders for schedule, p, m, chunks, and times relative to a forward.

    `chunks` applies to interleaved only; `message` is the time of any message.
    """
    return explore(
        _draw,
        lambda **values: _finding(_simulated(**values), values["schedule"]),
        schedule=(SCHEDULES, "1F1B"),
        p=(2, 8, 4),
        m=(1, 16, 6),
        chunks=(2, 4, 2),
        backward_input=([0.5, 1.0, 1.5, 2.0], 1.0),
        backward_weight=([0.0, 0.5, 1.0, 1.5], 1.0),
        message=([0.0, 0.1, 0.2, 0.5, 1.0], 0.0),
    )


def _simulated(
    *,
    schedule: str,
    p: int,
    m: int,
    chunks: int,
    backward_input: float,
    backward_weight: float,
    message: float,
) -> SimulatedStep:
    interleaved = schedule == "interleaved"
    actions = schedules.interleaved(p, m, chunks) if interleaved else PLAIN[schedule](p, m)
    times = PipelineTimes(
        forward_s=1.0,
        backward_input_s=backward_input,
        backward_weight_s=backward_weight,
        link=Link(latency_s=message, bytes_per_s=math.inf),
    )
    return simulate(actions, times)


def _draw(**values: Any) -> Figure:
    step, name = _simulated(**values), values["schedule"]
    return pipelines({name: step.events()}, _finding(step, name), unit="F")


def _finding(step: SimulatedStep, name: str) -> str:
    overhead, peak = step.bubble_overhead, max(step.peak_in_flight())
    parts = max(action.model_chunk for action in step.schedule[0]) + 1
    in_flight = f"{peak} parts of 1/{parts}" if parts > 1 else f"{peak} micro-batches"
    return (
        f"{name}: a bubble of {overhead:.0%} of the computing time, {in_flight} in flight at most"
    )
