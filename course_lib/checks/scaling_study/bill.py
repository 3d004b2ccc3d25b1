"""Exercise 4 of 13_scaling_study, with its planted mistakes: the cost before the job."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.scaling_study.parts import near, shown
from course_lib.scaling_study.lab import PlannedRun

Runs = Sequence[PlannedRun]
Bill = tuple[float, int]


def bill(runs: Runs, allowed: float) -> Bill:
    """Compute the cost of runs: the right answer."""
    hours = [_hours(run) for run in runs]
    fits = [number for number in range(len(hours) + 1) if sum(hours[:number]) <= allowed]
    return sum(hours), max(fits)


def _hours(run: PlannedRun) -> float:
    return run.nodes * run.gpus_per_node * (run.start_s + run.steps * run.step_s) / 3600


# --- planted mistakes, which are also what the check compares a wrong answer with


def _priced(price: Callable[[PlannedRun], float]) -> Callable[[Runs, float], Bill]:
    """Return the bill with another price per run: a run of one GPU that takes as many hours."""

    def answer(runs: Runs, allowed: float) -> Bill:
        alike = PlannedRun(gpus_per_node=1, start_s=0, steps=1, step_s=0)
        return bill([replace(alike, step_s=3600 * price(run)) for run in runs], allowed)

    return answer


def _longest(runs: Runs, allowed: float) -> Bill:
    return max(map(_hours, runs), default=0.0), bill(runs, allowed)[1]


def _each_alone(runs: Runs, allowed: float) -> Bill:
    return bill(runs, allowed)[0], sum(_hours(run) <= allowed for run in runs)


def _one_too_many(runs: Runs, allowed: float) -> Bill:
    total, number = bill(runs, allowed)
    return total, min(len(runs), number + 1)


def _below_only(runs: Runs, allowed: float) -> Bill:
    hours = [_hours(run) for run in runs]
    fits = [number for number in range(len(hours) + 1) if sum(hours[:number]) < allowed]
    return sum(hours), max(fits)


def _later_ones(runs: Runs, allowed: float) -> Bill:
    used, number = 0.0, 0
    for run in runs:
        if used + _hours(run) <= allowed:
            used, number = used + _hours(run), number + 1
    return bill(runs, allowed)[0], number


def _whole_or_nothing(runs: Runs, allowed: float) -> Bill:
    total, _ = bill(runs, allowed)
    return total, len(runs) if total <= allowed else 0


WRONG: tuple[tuple[str, Callable[[Runs, float], Bill], str], ...] = (
    (
        "ranks forgotten",
        _priced(lambda run: (run.start_s + run.steps * run.step_s) / 3600),
        "Those are hours on the wall: every GPU of a run is paid for as long as it lasts.",
    ),
    (
        "nodes forgotten",
        _priced(lambda run: _hours(run) / run.nodes),
        "Those are the GPUs of one node: a run on two nodes holds twice as many.",
    ),
    (
        "nodes twice",
        _priced(lambda run: _hours(run) * run.nodes),
        "The nodes are counted twice: GPUs are nodes times gpus_per_node, once.",
    ),
    (
        "start forgotten",
        _priced(lambda run: _hours(replace(run, start_s=0))),
        "The start is missing: while ranks start and PyTorch is read, the GPUs are yours already.",
    ),
    (
        "a start for each step",
        _priced(lambda run: _hours(replace(run, step_s=run.step_s + run.start_s, start_s=0))),
        "A run starts once, not before each step.",
    ),
    (
        "start on one GPU",
        _priced(
            lambda run: (
                run.start_s + run.nodes * run.gpus_per_node * run.steps * run.step_s
            ) / 3600
        ),
        "The start counts for one GPU only: all of them wait for it.",
    ),
    (
        "minutes",
        _priced(lambda run: 60 * _hours(run)),
        "Those are minutes: an hour has 3,600 seconds.",
    ),
    (
        "one step",
        _priced(lambda run: _hours(replace(run, steps=1))),
        "That is one step of each run: step_s is a step's, and a run has `steps` of them.",
    ),
    (
        "the longest only",
        _longest,
        "That is the dearest run: hours of all runs add up, also of runs at the same time.",
    ),
)  # fmt: skip
FITS: tuple[tuple[str, Callable[[Runs, float], Bill], str], ...] = (
    ("each by itself", _each_alone, "Each run fits by itself; the limit is for all together."),
    ("one too many", _one_too_many, "The last of them goes over the limit: leave it out."),
    ("below only", _below_only, "A sum that is exactly the limit fits, too: <=, not <."),
    (
        "later ones",
        _later_ones,
        "After the first run that is refused, a smaller one is counted: stop at the first.",
    ),
    (
        "all or nothing",
        _whole_or_nothing,
        "Those are all or none: the first ones may fit where the whole list does not.",
    ),
)


# --- the check

_RUNS = (
    PlannedRun(gpus_per_node=1, start_s=30, steps=200, step_s=1.5),
    PlannedRun(gpus_per_node=4, start_s=45, steps=200, step_s=0.5),
    PlannedRun(nodes=2, gpus_per_node=4, start_s=60, steps=1000, step_s=0.9),
    PlannedRun(nodes=3, gpus_per_node=2, start_s=20, steps=100, step_s=0.25),
)
_HALF_HOURS = (  # 0.5 GPU-hours each, to the last bit
    PlannedRun(gpus_per_node=1, start_s=900, steps=100, step_s=9.0),
    PlannedRun(gpus_per_node=2, start_s=450, steps=100, step_s=4.5),
    PlannedRun(nodes=2, gpus_per_node=1, start_s=450, steps=50, step_s=9.0),
)
CASES: tuple[tuple[Runs, float], ...] = (
    (_RUNS, 0.5),
    (_RUNS, 0.2),
    (_RUNS, 0.05),
    (_RUNS, 8.0),
    (_RUNS[2:], 2.2),
    (_HALF_HOURS, 1.0),
    ((), 1.0),
)


def check_bill(answer: Any) -> str:
    """Check runs on one node and on several; limits in the middle, above all and below all."""
    got = [answer(*case) for case in CASES]
    for (runs, allowed), one in zip(CASES, got, strict=True):
        where = f"{len(runs)} runs, {allowed:g} GPU-hours allowed"
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise CheckFailed(f"{where}: need GPU-hours and a number of runs; got {one!r}.")
        total, number = bill(runs, allowed)
        if not near(one[0], total):
            says = _why(0, got, WRONG)
            raise CheckFailed(f"{where}: need {total:.3f} GPU-hours; got {shown(one[0])}. {says}")
        if one[1] != number:
            says = _why(1, got, FITS)
            raise CheckFailed(f"{where}: {number} of them fit; got {shown(one[1])}. {says}")
    return "GPU-hours of all runs, and how many of them a limit lets through."


def _why(place: int, got: Sequence[Any], wrong: Sequence[tuple[str, Any, str]]) -> str:
    """Return the sentence of the first mistake that fits every case."""
    for _, rule, says in wrong:
        told = zip(got, CASES, strict=True)
        if all(near(one[place], rule(*case)[place]) for one, case in told):
            return says
    return "Try one run by hand."


BILL = Exercise(
    key="scaling_study-4",
    title="the bill before the job",
    check=check_bill,
    reference=bill,
    mistakes=tuple(Mistake(name, wrong, says[:40]) for name, wrong, says in (*WRONG, *FITS)),
)
