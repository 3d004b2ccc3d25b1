"""Exercise 1 of 08_pipeline: the order of 1F1B; mistakes in `order_answers.py`."""

from collections.abc import Sequence
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.pipeline.order_answers import WRONG, Answer, one_f_one_b
from course_lib.pipeline import schedules
from course_lib.pipeline.actions import Action, Schedule, ScheduleError, as_text, in_flight
from course_lib.pipeline.cost import one_f_one_b_in_flight
from course_lib.pipeline.schedule_rules import check_schedule
from course_lib.pipeline.simulation import simulate

SIZES = [(p, m) for p in (3, 4, 1, 2, 5) for m in (4, 8, 1, 2, 3, 7)]


KINDS = ("forward", "backward")


def check_order(answer: Answer) -> str:
    """Check many p and m: each action once, no deadlock, short and small enough."""
    made = [_read(answer(p, m), p, m) for p, m in SIZES]
    for (p, m), schedule in zip(SIZES, made, strict=True):
        problem = _problem(schedule, p, m)
        if problem:
            text = as_text(schedule) if p * m <= 16 else ""
            says = f"p = {p}, m = {m}: {problem} {_why(made)}".rstrip()
            raise CheckFailed(f"{says}\n{text}".rstrip())
    return "No longer than GPipe, at most p - rank micro-batches in flight, and m < p works."


def _read(made: Any, p: int, m: int) -> Schedule:
    """Return the answer's lists as a schedule, of whatever kind of lists it is made."""
    if made is None:
        raise CheckFailed(f"p = {p}, m = {m}: got None. Does your function return the schedule?")
    try:
        schedule = [[Action(*action) for action in actions] for actions in made]
    except TypeError:
        raise CheckFailed(
            f"p = {p}, m = {m}: need a list of Action(kind, stage, micro_batch) for each rank; "
            f"got {str(made)[:80]}."
        ) from None
    return schedule


def _problem(schedule: Schedule, p: int, m: int) -> str:
    """Return the first problem, in one sentence."""
    if len(schedule) != p:
        return f"need {p} lists, one a rank; got {len(schedule)}."
    for rank, actions in enumerate(schedule):
        problem = _foreign(actions, rank, m)
        if problem:
            return f"rank {rank}: {problem}"
    try:
        check_schedule(schedule, num_micro_batches=m)
    except ScheduleError as broken:
        return str(broken)
    for rank, actions in enumerate(schedule):
        held, bound = max(in_flight(actions)), one_f_one_b_in_flight(p, m, rank)
        if held > bound:
            return f"rank {rank} has {held} micro-batches in flight; need at most {bound}."
    took_s, least_s = simulate(schedule).step_s, simulate(schedules.gpipe(p, m)).step_s
    if took_s > least_s:
        return f"forward 1 s, backward 2 s: need a step of {least_s:g} s; got {took_s:g} s."
    return ""


def _foreign(actions: Sequence[Action], rank: int, m: int) -> str:
    """Return what does not belong into the list of a rank, or is missing there."""
    for action in actions:
        if action.kind not in KINDS:
            return f"need the kinds 'forward' and 'backward'; got {action.kind!r}."
        if action.stage != rank:
            return f"need stage {rank}; got {tuple(action[:3])}. The order is kind, stage, number."
    for kind in KINDS:
        numbers = [action.micro_batch for action in actions if action.kind == kind]
        if sorted(numbers) != list(range(m)):
            return f"need each {kind} from 0 to {m - 1} once; got {numbers or 'none'}."
    return ""


def _why(made: Sequence[Schedule]) -> str:
    """Return the cause that fits every case."""
    for _, wrong, says in WRONG:
        if made == [wrong(p, m) for p, m in SIZES]:
            return says
    return "Play it by hand for p = 2: rank 0 is one forward ahead."


ORDER = Exercise(
    key="pipeline-1",
    title="the order of 1F1B",
    check=check_order,
    reference=one_f_one_b,
    mistakes=tuple(Mistake(name, wrong, says[:45]) for name, wrong, says in WRONG),
)
