"""Exercise 4 of 13_scaling_study: the cost before the job."""

from random import Random
from typing import Any

from course_lib.checks.cases import A_FLOAT, TOO_NARROW, Case, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.scaling_study.parts import CHANGED, Part, Parts, numbers
from course_lib.scaling_study.lab import PlannedRun

RUNS = (
    PlannedRun(gpus_per_node=1, start_s=30, steps=201, step_s=1.502),
    PlannedRun(gpus_per_node=4, start_s=45, steps=200, step_s=0.5),
    PlannedRun(nodes=2, gpus_per_node=4, start_s=60, steps=1000, step_s=0.9),
    PlannedRun(nodes=3, gpus_per_node=2, start_s=20, steps=101, step_s=0.257),
)
HALF_HOURS = (  # 0.5 GPU-hours each, to the last bit
    PlannedRun(gpus_per_node=1, start_s=900, steps=100, step_s=9.0),
    PlannedRun(gpus_per_node=2, start_s=450, steps=100, step_s=4.5),
    PlannedRun(nodes=2, gpus_per_node=1, start_s=450, steps=50, step_s=9.0),
)


def _cases() -> list[Case]:
    """Return limits in the middle, above all and below all; runs that use them up exactly; none."""
    cases = (
        *((RUNS, allowed) for allowed in (0.5, 0.2, 0.05, 8.0)),
        (RUNS[2:], 2.2),
        ((RUNS[1], RUNS[0], RUNS[3]), 0.2),
        (HALF_HOURS, 1.0),
        (HALF_HOURS, 1.5),
        (RUNS[:1], 0.0),
        ((), 1.0),
    )
    return [
        (f"{len(runs)} runs, {allowed:g} GPU-hours allowed", ([*runs], allowed))
        for runs, allowed in cases
    ]


def _drawn(random: Random) -> list[Case]:
    def one() -> PlannedRun:
        return PlannedRun(
            nodes=random.randint(1, 4),
            gpus_per_node=random.randint(1, 8),
            start_s=random.randint(10, 90),
            steps=random.randint(50, 900),
            step_s=random.randint(100, 2000) / 1000,
        )

    runs = [[one() for _ in range(count)] for count in (2, 3, 5)]
    return [(f"{len(each)} runs, 1.5 GPU-hours allowed", (each, 1.5)) for each in runs]


BILL_PART, FIT_PART = "the bill", "those that fit"
PAIR = Cause("Return two numbers: the GPU-hours of all runs, and how many of the first ones fit.")

SWAPPED = Cause("GPU-hours first, then the number of runs.")


def _bill_and_fit(result: Any, *_case: Any) -> dict[str, Any]:
    hours, fit = numbers(result, (BILL_PART, FIT_PART), PAIR).values()
    if isinstance(hours, int) and isinstance(fit, float):
        raise failed(f"got {result!r}", SWAPPED)
    return {BILL_PART: hours, FIT_PART: whole(fit)}


GPUS, START, STEPS = "run.nodes * run.gpus_per_node * ", "run.start_s + ", "run.steps * run.step_s"
BOTH = "return sum(hours_of), fit"
LOOP = """\
    while fit < len(runs) and sum(hours_of[: fit + 1]) <= allowed:
        fit += 1"""
LATER_ONES = """\
    used = 0.0
    for hours in hours_of:
        if used + hours <= allowed:
            used, fit = used + hours, fit + 1"""

WALL_CLOCK = Cause("Those are wall-clock hours: each GPU of a run is paid for as long as it lasts.")
ALL_NODES = Cause("Those are the GPUs of one node: a run on two nodes holds twice as many.")
NO_START = Cause("The start is missing: while ranks start, the GPUs are yours already.")
START_ONCE = Cause("A run starts once, not before each step.")
MINUTES = Cause("Those are minutes: an hour has 3,600 seconds.")
NOT_FULL = Cause("An hour that is not full costs, too: divide with /.")
ONE_STEP = Cause("That is one step of each run: step_s is a step's, and a run has `steps` of them.")
OF_ALL = Cause("Those are the GPU-hours of the runs that fit: the bill is for all of them.")
TOGETHER = Cause("Each run fits by itself; the limit is for all together.")
ONE_MORE = Cause("The last of them goes over the limit: leave it out.")
EXACTLY = Cause("A sum that is exactly the limit fits, too: <=, not <.")
AT_THE_FIRST = Cause("After the first run that is refused, a smaller one is counted: stop there.")

BILL = Exercise(
    key="scaling_study-4",
    title="the bill before the job",
    check=Parts(
        cases=_cases,
        drawn=_drawn,
        show=_bill_and_fit,
        unchanged=CHANGED,
        parts={
            BILL_PART: Part("By hand: GPUs times the hours that a run holds them.", " GPU-hours"),
            FIT_PART: Part("Add up run by run: how many are in when one would go over?", " runs"),
        },
        success="GPU-hours of all runs, and how many of them a limit lets through.",
    ),
    wrong=(
        Edit(GPUS, "", WALL_CLOCK),
        Edit("run.nodes * ", "", ALL_NODES),
        Edit(START, "", NO_START),
        Edit(START + STEPS, "run.steps * (run.start_s + run.step_s)", START_ONCE),
        Edit("/ 3600", "/ 60", MINUTES),
        Edit("/ 3600", "// 3600", NOT_FULL),
        Edit("run.steps * ", "", ONE_STEP),
        Edit(BOTH, "import torch\nreturn float(torch.tensor(hours_of).sum()), fit", TOO_NARROW),
        Edit(BOTH, "return sum(hours_of[:fit]), fit", OF_ALL),
        Edit(BOTH, "return fit, sum(hours_of)", SWAPPED),
        Edit(BOTH, "return sum(hours_of)", PAIR),
        Edit(BOTH, "return sum(hours_of), float(fit)", A_FLOAT),
        Edit(BOTH, "return sum(hours_of), sum(hours <= allowed for hours in hours_of)", TOGETHER),
        Edit(BOTH, "return sum(hours_of), min(len(runs), fit + 1)", ONE_MORE),
        Edit("<=", "<", EXACTLY),
        Edit(LOOP, LATER_ONES, AT_THE_FIRST),
        Edit("fit = 0", "runs.reverse()\nfit = 0", CHANGED),
    ),
)
