"""Cost of a pipeline in formulas: bubble and activations in flight; p stages, m micro-batches.

The bubble is the time in which a rank is idle. The overhead is bubble / compute time, the fraction
is bubble / step time; v is the number of model chunks per rank. The formulas assume that all stages
take equally long; `simulation.py` covers the other cases. Notebook 08_pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.core.links import Link, TwoLevelLink
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.schedules import one_f_one_b
from course_lib.pipeline.simulation import INSTANT, PipelineTimes, SimulatedStep, simulate


def bubble_overhead(num_stages: int, num_micro_batches: int, num_model_chunks: int = 1) -> float:
    """Return (p - 1) / (v m): idle time / compute time, for GPipe, 1F1B and interleaved 1F1B.

    For v > 1 it is exact if each round of the schedule has p micro-batches.

    Source: Narayanan et al. 2021, sections 2.2.1 and 2.2.2
    """
    return (num_stages - 1) / (num_model_chunks * num_micro_batches)


def bubble_fraction(num_stages: int, num_micro_batches: int, num_model_chunks: int = 1) -> float:
    """Return (p - 1) / (v m + p - 1): the same bubble divided by the step time."""
    return (num_stages - 1) / (num_model_chunks * num_micro_batches + num_stages - 1)


def one_f_one_b_bubble_s(
    num_stages: int, forward_s: float, backward_input_s: float, backward_weight_s: float
) -> float:
    """Return (p - 1)(F + I + W): seconds that each rank is idle in a step of 1F1B, or of GPipe.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), table 2
    """
    return (num_stages - 1) * (forward_s + backward_input_s + backward_weight_s)


def zero_bubble_h1_bubble_s(
    num_stages: int,
    num_micro_batches: int,
    forward_s: float,
    backward_input_s: float,
    backward_weight_s: float,
) -> float:
    """Return (p - 1)(F + I) - (min(p, m) - 1) W: seconds that each rank is idle with ZB-H1.

    It holds if W is at most F and at most I. For m >= p it is (p - 1)(F + I - W), a third of the
    bubble of 1F1B when the three are equal.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), table 2; m <= p: appendix H
    """
    num_filled = min(num_stages, num_micro_batches) - 1
    unfilled_s = (num_stages - 1) * (forward_s + backward_input_s)
    return unfilled_s - num_filled * backward_weight_s


# --- micro-batches in flight: those whose activations a rank holds


def one_f_one_b_in_flight(num_stages: int, num_micro_batches: int, rank: int) -> int:
    """Return min(p - rank, m): a rank runs ahead only as far as the stages after it need.

    Source: Narayanan et al. 2021, section 2.2.1 (at most p)
    """
    return min(num_stages - rank, num_micro_batches)


# --- where the time of a step goes


@dataclass(frozen=True, kw_only=True)
class BatchCost:
    """Cost of a whole batch on one stage, before it is divided into micro-batches.

    forward_s, backward_s   seconds of one stage for the batch
    message_bytes           bytes that the stage sends forward for the batch
    start_s                 fixed seconds of each forward and each backward, whatever its size
    """

    forward_s: float
    backward_s: float
    message_bytes: float = 0.0
    start_s: float = 0.0

    def times(self, num_micro_batches: int, link: Link | TwoLevelLink = INSTANT) -> PipelineTimes:
        """Return the times of one micro-batch out of `num_micro_batches`."""
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
    """Decomposition of a step's seconds for one number of micro-batches; the sum is `step_s`.

    compute_s   the batch itself, the same for any number of micro-batches
    start_s     fixed costs of all forwards and backwards
    bubble_s    idle time if messages took no time
    wire_s      exposed communication: what the messages add to that
    played      the simulated step, messages included
    """

    num_micro_batches: int
    compute_s: float
    start_s: float
    bubble_s: float
    wire_s: float
    played: SimulatedStep

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.played.step_s


def step_parts(
    num_stages: int,
    num_micro_batches: int,
    batch: BatchCost,
    link: Link | TwoLevelLink,
    schedule: Callable[[int, int], Schedule] = one_f_one_b,
) -> StepParts:
    """Simulate the step over the link and over an instant one; return the parts of its time."""
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


class Published(NamedTuple):
    """Published measurement on 8 stages: milliseconds of F, I, W and a message; bubble rates."""

    model: str
    num_micro_batches: int
    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    message_ms: float
    one_f_one_b: float
    zero_bubble_h1: float

    @property
    def times(self) -> PipelineTimes:
        """Measured times in seconds, as input of `simulate`."""
        return PipelineTimes(
            forward_s=self.forward_ms / 1e3,
            backward_input_s=self.backward_input_ms / 1e3,
            backward_weight_s=self.backward_weight_ms / 1e3,
            link=Link(latency_s=self.message_ms / 1e3, bytes_per_s=float("inf")),
        )


# Qi et al. 2024 (Zero bubble pipeline parallelism): times of table 6, rates of table 5
PUBLISHED = (
    Published("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    Published("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    Published("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    Published("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    Published("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    Published("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
)
