"""Exercise 1 of 08_pipeline, with its planted mistakes: the order of 1F1B."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.cost import schedules
from course_lib.cost.actions import Action, Schedule, ScheduleError, as_text, in_flight
from course_lib.cost.bubbles import one_f_one_b_in_flight
from course_lib.cost.schedule_rules import check_schedule
from course_lib.cost.schedule_simulation import simulate

SIZES = [(p, m) for p in (3, 4, 1, 2, 5) for m in (4, 8, 1, 2, 3, 7)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """The right answer: warm up, then one forward and one backward in turn, then cool down."""
    return _with_warmup(p, m, lambda rank: min(p - 1 - rank, m))


def _with_warmup(p: int, m: int, warmup_of: Callable[[int], int]) -> Schedule:
    schedule = []
    for rank in range(p):
        warmup = warmup_of(rank)
        letters = "F" * warmup + "FB" * (m - warmup) + "B" * warmup
        schedule.append(_actions(rank, letters))
    return schedule


def _actions(rank: int, letters: Iterable[str]) -> list[Action]:
    """`FFBB` as F0 F1 B0 B1."""
    kinds, done = {"F": "forward", "B": "backward"}, {"F": 0, "B": 0}
    actions = []
    for letter in letters:
        actions.append(Action(kinds[letter], rank, done[letter]))
        done[letter] += 1
    return actions


# --- planted mistakes, which are also what the check compares a wrong answer with


def _warmup_too_short(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(max(p - 2 - rank, 0), m))


def _warmup_too_long(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(p - rank, m))


def _same_on_all(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(p - 1, m))


def _other_way_round(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(rank, m))


def _no_min(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: p - 1 - rank)


def _no_warmup(p: int, m: int) -> Schedule:
    return [_actions(rank, "FB" * m) for rank in range(p)]


def _backward_first(p: int, m: int) -> Schedule:
    made = []
    for rank in range(p):
        warmup = min(p - 1 - rank, m)
        made.append(_actions(rank, "F" * warmup + "BF" * (m - warmup) + "B" * warmup))
    return made


def _no_cooldown(p: int, m: int) -> Schedule:
    return [
        _actions(rank, "F" * min(p - 1 - rank, m) + "FB" * (m - min(p - 1 - rank, m)))
        for rank in range(p)
    ]


def _newest_first(p: int, m: int) -> Schedule:
    made = []
    for actions in one_f_one_b(p, m):
        waiting, order = list[int](), list[Action]()
        for action in actions:
            if action.kind == "forward":
                waiting.append(action.micro_batch)
                order.append(action)
            else:
                order.append(action._replace(micro_batch=waiting.pop()))
        made.append(order)
    return made


def _stage_0(p: int, m: int) -> Schedule:
    return [[action._replace(stage=0) for action in actions] for actions in one_f_one_b(p, m)]


def _from_1(p: int, m: int) -> Schedule:
    return [
        [action._replace(micro_batch=action.micro_batch + 1) for action in actions]
        for actions in one_f_one_b(p, m)
    ]


def _for_four(_p: int, m: int) -> Schedule:
    return one_f_one_b(4, m)


Answer = Callable[[int, int], Any]
WRONG: tuple[tuple[str, Answer, str], ...] = (
    (
        "GPipe",
        schedules.gpipe,
        "That is GPipe: as soon as a backward can run, it comes in turn with the forwards.",
    ),
    (
        "warm-up one too short",
        _warmup_too_short,
        "One forward too few in the warm-up: a rank then waits for a backward that is not there "
        "yet. How many ranks are behind it?",
    ),
    (
        "warm-up one too long",
        _warmup_too_long,
        "One forward too many in the warm-up: the last rank needs none. The steady phase begins "
        "with a forward, too.",
    ),
    (
        "the same warm-up on all",
        _same_on_all,
        "All ranks warm up alike; but the last one can go backward after its first forward.",
    ),
    (
        "the other way round",
        _other_way_round,
        "The warm-up is the other way round: rank 0 runs ahead the most, the last rank not at all.",
    ),
    (
        "m < p forgotten",
        _no_min,
        "Right for m >= p. With few micro-batches there are not enough for a whole warm-up.",
    ),
    (
        "no warm-up",
        _no_warmup,
        "Without a warm-up only one micro-batch is on its way: one rank works, the others wait.",
    ),
    (
        "a backward before its forward",
        _backward_first,
        "In the steady phase the forward comes first: on the last rank, nothing is there to go "
        "backward with.",
    ),
    (
        "no cool-down",
        _no_cooldown,
        "The backwards of the warm-up's micro-batches are missing: they are the cool-down.",
    ),
    (
        "the newest first",
        _newest_first,
        "Backwards go in the order of the forwards, the oldest micro-batch first: its gradient "
        "comes first, and its activations wait the longest.",
    ),
    ("all on stage 0", _stage_0, "Rank r runs stage r: Action(kind, rank, micro_batch)."),
    ("counted from 1", _from_1, "Micro-batches are counted from 0."),
    ("for four ranks only", _for_four, "That is right for 4 ranks only: use p."),
)


# --- the check


def check_order(answer: Answer) -> str:
    """For many p and m: each action once, nobody waits for ever, short and small enough."""
    made = [_read(answer(p, m), p, m) for p, m in SIZES]
    for (p, m), schedule in zip(SIZES, made, strict=True):
        problem = _problem(schedule, p, m)
        if problem:
            text = as_text(schedule) if p * m <= 16 else ""
            says = f"p = {p}, m = {m}: {problem} {_why(made)}".rstrip()
            raise CheckFailed(f"{says}\n{text}".rstrip())
    return "No longer than GPipe, at most p - rank micro-batches in flight, and m < p works."


def _read(made: Any, p: int, m: int) -> Schedule:
    """The answer's lists as a schedule, of whatever kind of lists it is made."""
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
    """The first thing that is wrong, in one sentence."""
    if len(schedule) != p:
        return f"need {p} lists, one a rank; got {len(schedule)}."
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


def _why(made: Sequence[Schedule]) -> str:
    """The cause that fits every case."""
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
