"""Exercise 7 of 08_pipeline: a puzzle, the shortest step within a limit on memory.

The simulator is the judge; `scores.py` prints a learner's steps beside those of known schedules.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from course_lib.checks.cases import BORROWED, Case, Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.pipeline.parts import demand_own_stages, read_schedule
from course_lib.pipeline.actions import (
    LETTERS,
    Schedule,
    ScheduleError,
    in_flight,
    num_model_chunks_of,
)
from course_lib.pipeline.schedule_rules import check_schedule
from course_lib.pipeline.schedules import (
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zero_bubble_h1,
)
from course_lib.pipeline.simulation import PipelineTimes, simulate
from course_lib.pipeline.v_schedules import dual_pipe_v, zero_bubble_v

Seconds = Mapping[str, float]


class Puzzle(NamedTuple):
    """Find the shortest step of p ranks and m micro-batches, with `cap` of them in flight."""

    p: int
    m: int
    ratio: tuple[float, float, float]  # seconds of F, I and W
    cap: int
    enough_s: float = 0.0  # the step of ZB-H1

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each kind of action, as a learner's function gets them."""
        return dict(zip(("forward", "backward_input", "backward_weight"), self.ratio, strict=True))

    @property
    def times(self) -> PipelineTimes:
        """The same, for the simulator."""
        forward_s, input_s, weight_s = self.ratio
        return PipelineTimes(
            forward_s=forward_s, backward_input_s=input_s, backward_weight_s=weight_s
        )

    def __str__(self) -> str:
        shown = " : ".join(f"{part:g}" for part in self.ratio)
        return f"p = {self.p}, m = {self.m}, F : I : W = {shown}, cap {self.cap}"


PUZZLES = (
    Puzzle(4, 8, (1, 1, 1), 4, 27),
    Puzzle(4, 8, (2, 2, 1), 4, 49),
    Puzzle(4, 8, (2, 2, 1), 7, 49),
    Puzzle(3, 7, (3, 2, 1), 3, 50),
    Puzzle(5, 8, (1, 2, 1), 5, 40),
    Puzzle(4, 4, (1, 1, 2), 5, 19),
    Puzzle(6, 4, (2, 1, 1), 6, 28),
)

KIND = Cause(f"The kinds are {', '.join(LETTERS)}.")
RANKS = Cause("Return one list of actions for each of the p ranks.")
DEADLOCK = Cause(
    "Deadlock: each of these ranks waits for an output that the other one would send later. An "
    "action needs the same action of its neighbor: F of the stage before, I or B of the one after."
)
TOO_MANY = Cause(
    "A rank holds the activations of a micro-batch from F until W, or B, not only until I: before "
    "the next F, fewer than cap may be in flight."
)
EACH_ONCE = Cause("F comes before I, and I before W; B is both of these in one.")
ENDLESS = Cause("Your loop never ends: every round has to run an action that has not run before.")
CALLERS = Cause("The dictionary of seconds is the caller's: leave it as it is.")


def _cases() -> list[Case]:
    return [(str(one), _arguments(one)) for one in PUZZLES]


def _arguments(one: Puzzle) -> tuple[int, int, Seconds, int]:
    return one.p, one.m, one.seconds, one.cap


def _shown(result: Any, p: int, m: int, seconds: Seconds, cap: int) -> str:
    """Return `a step of 30 s`, or `a step of at most 27 s` if ZB-H1 takes as long or longer."""
    puzzle = next(one for one in PUZZLES if _arguments(one) == (p, m, seconds, cap))
    step_s, enough_s = simulate(judged(result, p, m, cap), puzzle.times).step_s, puzzle.enough_s
    return f"a step of {f'at most {enough_s}' if step_s < enough_s + 1e-9 else f'{step_s:g}'} s"


def judged(result: Any, p: int, m: int, cap: int) -> Schedule:
    """Return a learner's schedule as lists of actions.

    Raises: CheckFailed for no schedule, a broken rule, or too many micro-batches in flight
    """
    schedule = read_schedule(result, LETTERS, KIND)
    if len(schedule) != p:
        raise failed(f"got {len(schedule)} lists", RANKS)
    if (v := num_model_chunks_of(schedule)) == 1:
        demand_own_stages(schedule)
    try:
        check_schedule(schedule, num_micro_batches=m)
    except ScheduleError as error:
        causes = {"circle": DEADLOCK, "each once": EACH_ONCE}
        fitting = (cause for word, cause in causes.items() if word in str(error))
        raise failed(str(error), next(fitting, None)) from None
    for rank, actions in enumerate(schedule):
        for action, count in zip(actions, in_flight(actions), strict=True):
            if count > cap * v:  # a model chunk counts 1/v
                raise failed(f"rank {rank}: {action.label} makes {count / v:g} in flight", TOO_MANY)
    return schedule


# --- wrong answers that are no edit of the right one


def _in_a_circle(p: int, m: int, *_: Any) -> Schedule:
    """Let the last rank begin with its last micro-batch, whose forward the first one defers."""
    schedule = one_f_one_b(p, m)
    schedule[-1] = schedule[-1][-2:] + schedule[-1][:-2]
    return schedule


URGENT = "0 if f - i < p - rank else 2"
INPUT = '("backward_input", i, f, 1)'
WEIGHT = '("backward_weight", w, i, 3)'
RETURNS = "return schedule"

PUZZLE = Exercise(
    key="pipeline-7",
    title="a puzzle: the shortest step within a limit on memory",
    library=(
        "course_lib.pipeline.schedules:interleaved",
        "course_lib.pipeline.schedules:zero_bubble_h1",
        "course_lib.pipeline.v_schedules:zero_bubble_v",
        "course_lib.pipeline.v_schedules:dual_pipe_v",
    ),
    check=Cases(
        cases=_cases,
        show=_shown,
        unchanged=CALLERS,
        endless=ENDLESS,
        library=(interleaved, zero_bubble_h1, zero_bubble_v, dual_pipe_v),
        look=(
            "Valid, and within the limit; but ZB-H1 is faster. Simulate your schedule and look at "
            "its timeline: which rank waits, for which action, and what ran in its place?"
        ),
        success="As fast as ZB-H1 or faster in 7 puzzles, with no more than cap in flight.",
    ),
    wrong=(
        Own(
            lambda p, m, *_: naive(p, m),
            Cause(
                "One micro-batch at a time: one rank computes, the others wait. Run F of the next "
                "micro-batches meanwhile."
            ),
        ),
        Own(
            lambda p, m, *_: one_f_one_b(p, m),
            Cause(
                "That is 1F1B: its backwards are whole, so the stage before waits for W, too. "
                "Split them, and run W where the rank would wait."
            ),
        ),
        Own(lambda p, m, *_: gpipe(p, m), TOO_MANY),
        Own(lambda p, m, *_: zero_bubble_h1(p, m), BORROWED),
        Own(_in_a_circle, DEADLOCK),
        Edit("w + cap", "w + cap + 1", TOO_MANY, also=(("i + cap", "i + cap + 1"),)),
        Edit("w + cap, i", "i + cap, i", TOO_MANY),
        Edit(
            URGENT,
            "2",
            Cause(
                "I always comes before F: a rank then has too few micro-batches under way, and the "
                "ranks after it wait. Below p - r of them, F is more urgent."
            ),
        ),
        Edit(
            WEIGHT,
            '("backward_weight", w, i, -1)',
            Cause(
                "W always comes first, but nobody waits for it: run it where the rank would wait, "
                "or needs the memory."
            ),
        ),
        Edit(
            "min(ready)",
            "min(ready, key=lambda one: one[1:])",
            Cause(
                "The most urgent action was taken, however late it can start: the rank waits for "
                "it, while others could run."
            ),
        ),
        Edit("schedule[action.stage].append(action)", "pass", ENDLESS),
        Edit("3 * p * m", "2 * p * m", EACH_ONCE),
        Edit(INPUT, '("backward_input", i, m, 1)', EACH_ONCE),
        Edit(
            "(source is None or sent in ends)",
            "sent in ends",
            Cause(
                "If `ready` is empty: some actions need no message (F of the first stage, I of the "
                "last one, W), and F needs room, which W makes."
            ),
        ),
        Edit(RETURNS, 'seconds["forward"] = 0\nreturn schedule', CALLERS),
    ),
)
