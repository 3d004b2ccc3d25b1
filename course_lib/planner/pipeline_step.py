"""A pipeline's step in closed form: microseconds, where the simulator needs milliseconds.

Exact for equal stages; with stages of different times it is exact where the last one is slowest,
as the output layer makes it, and else an upper bound (1F1B lets a slow first stage wait less).
`tests/planner` compares with the simulator. Notebook 12_planner.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from course_lib.core.errors import CourseError
from course_lib.core.links import Link
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.cost import zero_bubble_h1_bubble_s
from course_lib.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble_h1
from course_lib.pipeline.simulation import simulate
from course_lib.pipeline.times import PipelineTimes
from course_lib.pipeline.v_schedules import zero_bubble_v


class StepTimes(NamedTuple):
    """Seconds of a micro-batch: F, I and W of each stage, and of a message between two stages."""

    forward_s: Sequence[float]
    backward_input_s: Sequence[float]
    backward_weight_s: Sequence[float]
    message_s: float = 0.0


class PipelineStep(NamedTuple):
    """Seconds of a step with instant messages, and what the messages add."""

    step_s: float
    messages_s: float


def pipeline_step(
    schedule: str, num_micro_batches: int, times: StepTimes, num_model_chunks: int = 1
) -> PipelineStep:
    """Return the step of a schedule with these times.

    All micro-batches pass the slowest stage, and the first and last pass the others, too:
    sum + (m - 1) * slowest. v model chunks divide what the others add by v.

    Source: Narayanan et al. 2021, section 2.2; ZB-H2: Qi et al. 2024, table 2
    """
    p, m, v = len(times.forward_s), num_micro_batches, num_model_chunks
    stages = [sum(parts) for parts in zip(*times[:3], strict=True)]
    slowest = max(range(p), key=stages.__getitem__)
    step_s = m * stages[slowest] + (sum(stages) - stages[slowest]) / v
    if p == 1:
        return PipelineStep(step_s, 0.0)
    if schedule == "zb-v":
        return simulated_step(schedule, m, times, v)
    if schedule.startswith("zb-h"):
        parts = [sum(one) / p for one in times[:3]]
        bubble_s = zero_bubble_h1_bubble_s(p, m, *parts)
        if schedule == "zb-h2":
            bubble_s = max(0.0, bubble_s - (min(p, m) - 1) * parts[2])
        step_s = min(step_s, m * stages[slowest] + bubble_s)
    return PipelineStep(step_s, times.message_s * exposed_messages(schedule, p, m, v))


def exposed_messages(
    schedule: str, num_stages: int, num_micro_batches: int, num_model_chunks: int = 1
) -> int:
    """Return how many message times a step takes longer.

    The first micro-batch waits at each boundary, forward and backward. In 1F1B each further one
    waits for a message in both directions, except the first in each round of p micro-batches: a
    stage runs only as far ahead as it must. The other schedules run ahead.
    """
    p, m = num_stages, num_micro_batches
    if schedule == "1f1b":
        return 2 * (p - 1) + 2 * (m - 1 - -(-(m - 1) // p))
    return 2 * (p * num_model_chunks - 1)


def simulated_step(
    schedule: str, num_micro_batches: int, times: StepTimes, num_model_chunks: int = 1
) -> PipelineStep:
    """Return the step of a schedule by simulating every action, with and without messages.

    Raises: CourseError for zb-h2, which the course has only as a formula
    """
    p = len(times.forward_s)
    actions = _actions(schedule, p, num_micro_batches, num_model_chunks)
    played = [
        simulate(
            actions,
            PipelineTimes(
                forward_s=times.forward_s,
                backward_input_s=times.backward_input_s,
                backward_weight_s=times.backward_weight_s,
                link=Link(latency_s=message_s, bytes_per_s=float("inf")),
            ),
        ).step_s
        for message_s in (0.0, times.message_s)
    ]
    return PipelineStep(played[0], played[1] - played[0])


def _actions(schedule: str, num_stages: int, num_micro_batches: int, chunks: int) -> Schedule:
    makers: dict[str, Callable[[int, int], Schedule]] = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": lambda p, m: interleaved(p, m, chunks),
        "zb-h1": zero_bubble_h1,
        "zb-v": zero_bubble_v,
    }
    if schedule not in makers:
        raise CourseError(f"simulated_step: need one of {', '.join(makers)}; got {schedule!r}.")
    return makers[schedule](num_stages, num_micro_batches)
