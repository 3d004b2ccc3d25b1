"""Exercise 4 of 14_checkpoint: the best interval, from measurements, and what it costs."""

from math import sqrt
from random import Random
from typing import Any

from course_lib.checkpoint.cost import expected_overhead
from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit, Own
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


def _young(*measured: float) -> tuple[int, float, float]:
    """Return steps, the seconds of their interval, and the mean time between failures."""
    save_s, step_s, _, failures, seen_s, gpus_then, gpus = measured
    mtbf_s = seen_s / failures * gpus_then / gpus
    steps = max(1, round(sqrt(2 * save_s * mtbf_s) / step_s))
    return steps, steps * step_s, mtbf_s


def _from_measured(*measured: float) -> tuple[int, float]:
    steps, interval_s, mtbf_s = _young(*measured)
    return steps, (measured[0] + measured[2]) / interval_s + interval_s / 2 / mtbf_s


def _dalys_cost(*measured: float) -> tuple[int, float]:
    steps, interval_s, mtbf_s = _young(*measured)
    return steps, expected_overhead(interval_s, measured[0], mtbf_s, measured[2])


def _in_percent(*measured: float) -> tuple[int, float]:
    steps, interval_s, mtbf_s = _young(*measured)
    return steps, 100 * (measured[0] / interval_s + (interval_s / 2 + measured[2]) / mtbf_s)


_MTBF = "mtbf_s = seen_s / failures * gpus_then / gpus"

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
        Edit(
            _MTBF,
            "mtbf_s = seen_s / failures",
            Cause("The failures were seen on another number of GPUs: more GPUs fail more often."),
        ),
        Edit(
            _MTBF,
            "mtbf_s = seen_s / failures / gpus_then * gpus",
            Cause("Twice the GPUs fail twice as often: the time between failures is halved."),
        ),
        Edit(
            _MTBF,
            "mtbf_s = failures / seen_s * gpus / gpus_then",
            Cause("That is failures per second; the formula has seconds per failure."),
        ),
        Edit(
            "sqrt(2 * save_s * mtbf_s)",
            "sqrt(save_s * mtbf_s)",
            Cause("Where is the 2? A failure loses half an interval on average."),
        ),
        Edit(
            "interval_s / 2 + restart_s",
            "interval_s + restart_s",
            Cause("A failure can come at any moment: half an interval is lost on average."),
        ),
        Edit(
            "(interval_s / 2 + restart_s)",
            "interval_s / 2",
            Cause("Every failure costs a restart, too."),
        ),
        Own(
            _from_measured,
            Cause("A restart comes with every failure, not with every checkpoint."),
        ),
        Edit(
            "max(1, round(",
            "max(0, round(",
            Cause("There is no shorter interval than one step."),
            also=(("interval_s = steps * step_s", "interval_s = max(steps, 1) * step_s"),),
        ),
        Edit(
            "interval_s = steps * step_s",
            "interval_s = sqrt(2 * save_s * mtbf_s)",
            Cause("Compute the overhead of the interval that you return: a whole number of steps."),
        ),
        Edit(
            "sqrt(2 * save_s * mtbf_s) / step_s",
            "sqrt(2 * save_s * mtbf_s)",
            Cause("Those are seconds: divide by the seconds of a step."),
        ),
        Edit(
            "return steps, save_s / interval_s",
            "return interval_s, save_s / interval_s",
            Cause("Those are seconds: return the number of steps between two checkpoints."),
        ),
        Edit(
            "(interval_s / 2 + restart_s) / mtbf_s",
            "(interval_s / 2 + restart_s) / mtbf_s * (1 + save_s / interval_s)",
            Cause("Use the sum in the exercise: it leaves out failures during saves."),
        ),
        Own(
            _dalys_cost,
            Cause("That is Daly's formula, as in the library: use the sum in the exercise."),
        ),
        Own(
            _in_percent,
            Cause("The overhead is a fraction, such as 0.07, not a percentage."),
        ),
        Edit(
            "save_s / interval_s + ",
            "",
            Cause("A save costs time, too, once per interval."),
        ),
        Edit(
            "max(1, round(sqrt(2 * save_s * mtbf_s) / step_s))",
            "max(1, int(sqrt(2 * save_s * mtbf_s) / step_s))",
            Cause("Round to the nearest whole number of steps; int() drops the decimals."),
        ),
    ),
)
