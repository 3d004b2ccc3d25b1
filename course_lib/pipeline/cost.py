"""What a pipeline wastes and holds, in formulas: p stages, m micro-batches, v model chunks.

The bubble is the time in which a rank has nothing to do. As an overhead it is counted in parts of
the time that a rank computes; as a fraction, in parts of the whole step. All stages are equally
long here; `schedule_simulation` plays the cases that have no formula. Notebook 08_pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.core.links import Link, TwoLevelLink
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.schedules import one_f_one_b
from course_lib.pipeline.simulation import INSTANT, PipelineTimes, SimulatedStep, simulate

NUM_STAGES = 8


def bubble_overhead(num_stages: int, num_micro_batches: int, num_model_chunks: int = 1) -> float:
    """(p - 1) / (v m): seconds idle for each second computed, for GPipe, 1F1B and interleaved.

    With v > 1 it is exact where each round of the schedule has p micro-batches.

    Source: Narayanan et al. 2021, sections 2.2.1 and 2.2.2
    """
    return (num_stages - 1) / (num_model_chunks * num_micro_batches)


def bubble_fraction(num_stages: int, num_micro_batches: int, num_model_chunks: int = 1) -> float:
    """(p - 1) / (v m + p - 1): the same bubble as a part of the whole step."""
    return (num_stages - 1) / (num_model_chunks * num_micro_batches + num_stages - 1)


def naive_idle_fraction(num_stages: int) -> float:
    """(p - 1) / p: one rank works while the others wait, however many micro-batches there are."""
    return (num_stages - 1) / num_stages


def one_f_one_b_bubble_s(
    num_stages: int, forward_s: float, backward_input_s: float, backward_weight_s: float
) -> float:
    """(p - 1)(F + I + W): seconds that every rank is idle in a step of 1F1B, or of GPipe.

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
    """(p - 1)(F + I) - (min(p, m) - 1) W: seconds that every rank is idle in a step of ZB-H1.

    For W no longer than F and I. With m >= p it is (p - 1)(F + I - W), and a third of the bubble of
    1F1B when the three are equal.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), table 2; m <= p: appendix H
    """
    num_filled = min(num_stages, num_micro_batches) - 1
    unfilled_s = (num_stages - 1) * (forward_s + backward_input_s)
    return unfilled_s - num_filled * backward_weight_s


def one_f_one_b_wire_s(num_stages: int, num_micro_batches: int, message_s: float) -> float:
    """What messages of `message_s` each add to a step of 1F1B, for m a multiple of p.

    In every p micro-batches, 2 (p - 1) messages have nothing to hide behind: what leaves stage i
    is what stage i + 1 waits for. Once more for the pipeline to fill and to empty.
    """
    if num_stages == 1:
        return 0.0
    rounds = num_micro_batches // num_stages
    return (2 * (num_stages - 1) * (rounds + 1) - 2) * message_s


# --- micro-batches in flight, that is, whose activations a rank holds


def gpipe_in_flight(num_micro_batches: int) -> int:
    """m: every micro-batch waits for all the others."""
    return num_micro_batches


def one_f_one_b_in_flight(num_stages: int, num_micro_batches: int, rank: int) -> int:
    """min(p - rank, m): a rank runs ahead only by what the ranks behind it need.

    Source: Narayanan et al. 2021, section 2.2.1 (at most p)
    """
    return min(num_stages - rank, num_micro_batches)


def zero_bubble_h1_in_flight(num_stages: int, num_micro_batches: int) -> int:
    """min(p, m) on every rank, as the weight halves that are put off hold activations too.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 2.1
    """
    return min(num_stages, num_micro_batches)


def interleaved_in_flight(
    num_stages: int, num_micro_batches: int, num_model_chunks: int, rank: int
) -> int:
    """Model chunks in flight for v > 1, each 1/v of a stage, where a round has p micro-batches.

    min((v - 1) p + 2 (p - 1 - rank) + 1, v m): with v = 2, rank 0 holds 3 p - 1 halves.
    """
    ahead = (num_model_chunks - 1) * num_stages + 2 * (num_stages - 1 - rank)
    return min(ahead + 1, num_model_chunks * num_micro_batches)


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


class Published(NamedTuple):
    """One model on 8 stages: milliseconds of F, I, W and of a message, and two bubble rates."""

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
        """The same, for the simulation."""
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
