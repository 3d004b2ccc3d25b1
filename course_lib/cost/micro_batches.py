"""How many micro-batches? More of them shrink the bubble, and pay for it elsewhere.

The batch stays the same: with more micro-batches each has less to compute and to send, but every
one pays a fixed price to start its kernels and its messages. Notebook 08_pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.core.links import Link, TwoLevelLink
from course_lib.cost.actions import Schedule
from course_lib.cost.schedule_simulation import SimulatedStep, simulate
from course_lib.cost.schedule_times import INSTANT, PipelineTimes
from course_lib.cost.schedules import one_f_one_b


@dataclass(frozen=True, kw_only=True)
class BatchCost:
    """One rank's part of a whole batch, before it is cut into micro-batches.

    `forward_s` and `backward_s` are seconds of one stage, `message_bytes` what it sends forward.
    `start_s` is what every forward and every backward costs besides, however small it is.
    """

    forward_s: float
    backward_s: float
    message_bytes: float = 0.0
    start_s: float = 0.0

    def times(self, num_micro_batches: int, link: Link | TwoLevelLink = INSTANT) -> PipelineTimes:
        """The times of one micro-batch out of `num_micro_batches`."""
        half_s = (self.backward_s / num_micro_batches + self.start_s) / 2
        return PipelineTimes(
            forward_s=self.forward_s / num_micro_batches + self.start_s,
            backward_input_s=half_s,
            backward_weight_s=half_s,
            link=link,
            message_bytes=self.message_bytes / num_micro_batches,
        )


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Where a step's time goes, for one number of micro-batches; the parts add up to `step_s`.

    `compute_s` is there at any number; `start_s` is the fixed price of all micro-batches;
    `bubble_s` is idle even if messages took no time; `wire_s` is what the messages add to that.
    """

    num_micro_batches: int
    compute_s: float
    start_s: float
    bubble_s: float
    wire_s: float
    played: SimulatedStep

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.played.step_s


def step_parts(
    num_stages: int,
    num_micro_batches: int,
    batch: BatchCost,
    link: Link | TwoLevelLink,
    schedule: Callable[[int, int], Schedule] = one_f_one_b,
) -> StepParts:
    """Play the step over the link and over a wire that takes no time, and tell the parts."""
    actions = schedule(num_stages, num_micro_batches)
    played = simulate(actions, batch.times(num_micro_batches, link))
    ideal = simulate(actions, batch.times(num_micro_batches))
    compute_s, start_s = batch.forward_s + batch.backward_s, 2 * num_micro_batches * batch.start_s
    return StepParts(
        num_micro_batches=num_micro_batches,
        compute_s=compute_s,
        start_s=start_s,
        bubble_s=ideal.step_s - compute_s - start_s,
        wire_s=played.step_s - ideal.step_s,
        played=played,
    )
