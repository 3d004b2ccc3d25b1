"""A pipeline schedule on a clock: bubble, micro-batches in flight. Notebook 08_pipeline.

Everything is simulated, so a slider responds at once.
"""

import math
from collections.abc import Callable
from typing import Any

from course_lib.core.links import Link
from course_lib.core.live import Bars, Drawing, Live, lanes_of
from course_lib.pipeline import schedules
from course_lib.pipeline.actions import Schedule
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
NAMES = ["naive", "GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-V", "DualPipeV"]


def simulated_schedule(
    *,
    schedule: str,
    p: int,
    m: int,
    chunks: int,
    backward_input: float,
    backward_weight: float,
    message: float,
) -> SimulatedStep:
    """Return the simulated step of a schedule by its name; times are in forwards."""
    interleaved = schedule == "interleaved"
    actions = schedules.interleaved(p, m, chunks) if interleaved else PLAIN[schedule](p, m)
    times = PipelineTimes(
        forward_s=1.0,
        backward_input_s=backward_input,
        backward_weight_s=backward_weight,
        link=Link(latency_s=message, bytes_per_s=math.inf),
    )
    return simulate(actions, times)


def schedule_finding(step: SimulatedStep, name: str) -> str:
    """Return the finding as a sentence: the bubble, and what is in flight at most."""
    overhead, peak = step.bubble_overhead, max(step.peak_in_flight())
    parts = max(action.model_chunk for action in step.schedule[0]) + 1
    in_flight = f"{peak} parts of 1/{parts}" if parts > 1 else f"{peak} micro-batches"
    return (
        f"{name}: a bubble of {overhead:.0%} of the computing time, {in_flight} in flight at most"
    )


def schedule_drawing(**values: Any) -> Drawing:
    """Return the lanes of all ranks, and below them what each holds at most."""
    step = simulated_schedule(**values)
    held = {f"rank {rank}": {"activations": n} for rank, n in enumerate(step.peak_in_flight())}
    return Drawing(
        finding=schedule_finding(step, values["schedule"]),
        panels=[
            lanes_of(step.events(), "time (forwards)"),
            Bars(rows=held, x_label="most in flight (forwards of one chunk)"),
        ],
    )


SCHEDULE = Live(
    name="schedule_explorer",
    lesson="08_pipeline",
    question="Which order of the same work leaves the smallest bubble, and what does it hold?",
    choices={
        "schedule": (NAMES, "1F1B"),
        "p": (2, 8, 4),
        "m": (1, 16, 6),
        "chunks": (2, 4, 2),
        "backward_input": ([0.5, 1.0, 1.5, 2.0], 1.0),
        "backward_weight": ([0.0, 0.5, 1.0, 1.5], 1.0),
        "message": ([0.0, 0.1, 0.2, 0.5, 1.0], 0.0),
    },
    compute=schedule_drawing,
)
