"""Exercise 4 of 14_checkpoint: the best interval, from measurements, and what it costs."""

from random import Random
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

PAIR = Cause("Need two numbers: the steps between checkpoints, and the expected overhead.")
# seconds of a save, of a step, of a restart; failures seen, in how many seconds, on how many GPUs
MEASURED = (
    (30.0, 5.0, 600.0, 419, 54 * 86_400.0, 16_384, 16_384),
    (30.0, 5.0, 600.0, 419, 54 * 86_400.0, 16_384, 2_048),
    (12.0, 0.5, 90.0, 3, 30 * 86_400.0, 64, 512),
    (0.2, 0.01, 2.0, 10, 3_600.0, 4, 4),
    (400.0, 20.0, 900.0, 40, 10 * 86_400.0, 1_000, 250),
    (0.001, 30.0, 5.0, 9, 3_600.0, 8, 8),
)


def _cases(measured: Any = MEASURED) -> list[Case]:
    return [
        (
            f"saves of {one[0]:g} s, steps of {one[1]:g} s, restarts of {one[2]:g} s, {one[3]} "
            f"failures in {one[4]:g} s on {one[5]} GPUs, now {one[6]} GPUs",
            one,
        )
        for one in measured
    ]


def _drawn(random: Random) -> list[Case]:
    return _cases(
        [
            (
                random.randint(1, 90) / 2,
                random.randint(1, 40) / 4,
                float(random.randint(20, 900)),
                random.randint(2, 60),
                random.randint(3, 60) * 86_400.0,
                2 ** random.randint(3, 14),
                2 ** random.randint(3, 14),
            )
            for _ in range(4)
        ]
    )


def _shown(result: Any, *_arguments: Any) -> dict[str, Any]:
    try:
        steps, overhead = result
        return {"steps": float(steps), "overhead": float(overhead)}
    except (TypeError, ValueError):
        raise failed(f"got {result!r}"[:200], PAIR) from None


OTHER_COUNT = Cause("The failures were seen on another number of GPUs: more fail more often.")
HALVED = Cause("Twice the GPUs fail twice as often: the time between failures is halved.")
PER_SECOND = Cause("That is failures per second; the formula has seconds per failure.")
WITHOUT_2 = Cause("Where is the 2? A failure loses half an interval on average.")
HALF = Cause("A failure can come at any moment: half an interval is lost on average.")
RESTARTS = Cause("Every failure costs a restart, too.")
PER_FAILURE = Cause("A restart comes with every failure, not with every checkpoint.")
ONE_STEP = Cause("There is no shorter interval than one step.")
RETURNED = Cause("Compute the overhead of the interval that you return: a whole number of steps.")
IN_STEPS = Cause("Those are seconds: return the number of steps between two checkpoints.")
LEAVES_OUT = Cause("Use the sum in the exercise: it leaves out failures during saves.")
DALYS = Cause("That is Daly's formula, as in the library: use the sum in the exercise.")
FRACTION = Cause("The overhead is a fraction, such as 0.07, not a percentage.")
SAVES = Cause("A save costs time, too, once per interval.")
NEAREST = Cause("Round to the nearest whole number of steps; int() drops the decimals.")

MTBF, AFTER = "mtbf_s = seen_s / failures * gpus_then / gpus", "interval_s = steps * step_s"
ROOT = "sqrt(2 * save_s * mtbf_s)"
LOST, COSTS = "(interval_s / 2 + restart_s) / mtbf_s", "save_s / interval_s"
OVERHEAD = f"{COSTS} + {LOST}"
EXPECTED = "expected_overhead(interval_s, save_s, mtbf_s, restart_s)"
LIBRARY = "from course_lib.checkpoint.cost import expected_overhead"

INTERVAL = Exercise(
    key="checkpoint-4",
    title="the best interval",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=_shown,
        look="For one failure, write down the saves before it, the lost work, and the restart.",
        success="Right for 4 GPUs and for 16,384.",
    ),
    wrong=(
        Edit(MTBF, "mtbf_s = seen_s / failures", OTHER_COUNT),
        Edit(MTBF, "mtbf_s = seen_s / failures / gpus_then * gpus", HALVED),
        Edit(MTBF, "mtbf_s = failures / seen_s * gpus / gpus_then", PER_SECOND),
        Edit(ROOT, "sqrt(save_s * mtbf_s)", WITHOUT_2),
        Edit(LOST, "(interval_s + restart_s) / mtbf_s", HALF),
        Edit(LOST, "interval_s / 2 / mtbf_s", RESTARTS),
        Edit(OVERHEAD, "(save_s + restart_s) / interval_s + interval_s / 2 / mtbf_s", PER_FAILURE),
        Edit(
            "max(1, round(",
            "max(0, round(",
            ONE_STEP,
            also=((AFTER, "interval_s = max(steps, 1) * step_s"),),
        ),
        Edit(AFTER, f"interval_s = {ROOT}", RETURNED),
        Edit("return steps,", "return interval_s,", IN_STEPS),
        Edit(LOST, f"{LOST} * (1 + {COSTS})", LEAVES_OUT),
        Edit(OVERHEAD, EXPECTED, DALYS, also=((MTBF, f"{LIBRARY}\n{MTBF}"),)),
        Edit(OVERHEAD, f"100 * ({OVERHEAD})", FRACTION),
        Edit(f"{COSTS} + ", "", SAVES),
        Edit(f"round({ROOT} / step_s)", f"int({ROOT} / step_s)", NEAREST),
    ),
)
