"""How good is a schedule? `schedule_bound` is a time that none beats; `score_schedule` judges one.

The puzzle: given p, m, the times of F, I and W, and the micro-batches that a rank may hold, find
the order with the shortest step. Nobody knows the best one in general. The bound adds up what
cannot be avoided, so an order that reaches it is proven to be the best. Notebook 08_pipeline.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from course_lib.core.errors import CourseError
from course_lib.pipeline.actions import (
    Schedule,
    ScheduleError,
    depths_of,
    loop_placement,
    num_model_chunks_of,
    placement_of,
)
from course_lib.pipeline.schedule_rules import check_schedule
from course_lib.pipeline.simulation import simulate
from course_lib.pipeline.times import PipelineTimes


def schedule_bound(
    num_stages: int,
    num_micro_batches: int,
    max_in_flight: float | None = None,
    times: PipelineTimes | None = None,
    placement: Sequence[int] | None = None,
) -> float:
    """Return seconds of a step that no valid schedule can beat; messages count as instant.

    max_in_flight   micro-batches in flight on a rank, of which one in one of v model chunks counts
                    1/v; None: any number
    placement       rank of each model chunk, such as `v_placement(p)`; None: one chunk on each rank

    A rank has its own work to do, and besides that

    - before its first I it can only run forwards, of no more micro-batches than it may hold; but
      the first micro-batch has to go through all forwards, and back to here;
    - after its last I it can only run W, of no more micro-batches than it may hold; but the last
      gradient has to go back to the first layers;
    - it holds each micro-batch from F to W, in which time that goes to the last layers and back. If
      it may hold C at a time, these times, added up, fit C times into its step.

    Raises: CourseError for less than one micro-batch in flight, or for unequal micro-batches
    """
    times = times or PipelineTimes()
    placement = loop_placement(num_stages) if placement is None else placement
    num_model_chunks = len(placement) // num_stages
    most = num_micro_batches * num_model_chunks
    if max_in_flight is not None:
        most = min(most, _in_chunks(max_in_flight, num_model_chunks))
    if most < num_model_chunks or times.micro_batch_scale:
        raise CourseError(
            "schedule_bound: need max_in_flight of 1 micro-batch or more, all equally long; got "
            f"{max_in_flight} and micro_batch_scale={times.micro_batch_scale}."
        )
    seconds = times.by_depth(placement)
    path_s = max(
        sum(seconds["forward"]) + sum(seconds["backward_input"][depth:]) + weight_s
        for depth, weight_s in enumerate(seconds["backward_weight"])
    )
    ranks = [
        _RankBound(depths_of(rank, placement), seconds, times.overlap) for rank in range(num_stages)
    ]
    return max(path_s, *(one.step_s(num_micro_batches, most) for one in ranks))


@dataclass(frozen=True)
class _RankBound:
    """Return what one rank, which holds the chunks at `depths`, adds to the bound."""

    depths: Sequence[int]
    seconds: dict[str, list[float]]
    overlap: float

    def step_s(self, num_micro_batches: int, most: int) -> float:
        """Return the larger of the two bounds: by its work, and by what it may hold."""
        return max(
            self._by_work_s(num_micro_batches, most), self._by_held_s(num_micro_batches, most)
        )

    def _by_work_s(self, m: int, most: int) -> float:
        mine = {kind: [all_s[d] for d in self.depths] for kind, all_s in self.seconds.items()}
        forward_s, backward_s = m * sum(mine["forward"]), m * sum(mine["backward"])
        busy_s = forward_s + backward_s - self.overlap * min(forward_s, backward_s)
        first_input_s = sum(self.seconds["forward"]) + sum(
            self.seconds["backward_input"][self.depths[-1] + 1 :]
        )
        before_s = max(self._fill_s, first_input_s - _longest_s(mine["forward"], m, most))
        after_s = max(0.0, self._drain_s - _longest_s(mine["backward_weight"], m, most))
        return busy_s + before_s + after_s

    def _by_held_s(self, m: int, most: int) -> float:
        forward_s, input_s = self.seconds["forward"], self.seconds["backward_input"]
        until_input_s = sum(sum(forward_s[d:]) + sum(input_s[d:]) for d in self.depths)
        until_weight_s = until_input_s + sum(
            self.seconds["backward_weight"][d] for d in self.depths
        )
        held_s = max(m * until_input_s / most + self._drain_s, m * until_weight_s / most)
        return self._fill_s + held_s

    @property
    def _fill_s(self) -> float:
        """Seconds until the first input can be here."""
        return sum(self.seconds["forward"][: self.depths[0]])

    @property
    def _drain_s(self) -> float:
        """Seconds that the last gradient takes from here to the first layers."""
        return sum(self.seconds["backward_input"][: self.depths[0]])


def _longest_s(seconds: Sequence[float], num_micro_batches: int, most: int) -> float:
    """Return the seconds of the longest `most` actions, one for each chunk and micro-batch."""
    return sum(sorted(list(seconds) * num_micro_batches)[-most:])


def _in_chunks(micro_batches: float, num_model_chunks: int) -> int:
    return math.floor(micro_batches * num_model_chunks + 1e-9)


@dataclass(frozen=True, kw_only=True)
class ScheduleScore:
    """Result of `score_schedule`.

    problem          the first broken rule, as a sentence; empty: the schedule is valid
    step_s           simulated seconds of the step; infinite if the schedule is not valid
    bound_s          `schedule_bound` for the same placement
    peak_in_flight   most micro-batches in flight, by rank; one in one of v chunks counts 1/v
    """

    problem: str = ""
    step_s: float = math.inf
    bound_s: float
    peak_in_flight: list[float] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        """Whether the schedule keeps all rules."""
        return not self.problem

    @property
    def above_bound(self) -> float:
        """By which part the step is longer than the bound: 0.1 is 10 %."""
        return self.step_s / self.bound_s - 1


def score_schedule(
    schedule: Schedule,
    num_micro_batches: int,
    max_in_flight: float | None = None,
    times: PipelineTimes | None = None,
) -> ScheduleScore:
    """Judge any schedule: does it keep the rules and the limit, and how close is it to the bound?

    `max_in_flight` and `times` are those of `schedule_bound`.
    """
    num_model_chunks = num_model_chunks_of(schedule)
    most = None if max_in_flight is None else _in_chunks(max_in_flight, num_model_chunks)
    try:
        check_schedule(schedule, num_micro_batches=num_micro_batches, max_in_flight=most)
    except ScheduleError as error:
        one_chunk_s = schedule_bound(len(schedule), num_micro_batches, max_in_flight, times)
        return ScheduleScore(problem=str(error), bound_s=one_chunk_s)
    step, placement = simulate(schedule, times), placement_of(schedule)
    return ScheduleScore(
        step_s=step.step_s,
        bound_s=schedule_bound(len(schedule), num_micro_batches, max_in_flight, times, placement),
        peak_in_flight=[count / num_model_chunks for count in step.peak_in_flight()],
    )
