"""Exercise 2 of 13_scaling_study: two runs say what is fixed, and so how far a batch scales."""

import math
from dataclasses import replace
from random import Random
from typing import Any

from course_lib.checks.cases import Case, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.scaling_study.parts import Part, Parts, numbers
from course_lib.core.presets import find_model
from course_lib.scaling_study.aggregate import Experiment
from course_lib.scaling_study.study_run import StudyRun

EFFICIENCY, FIXED, MOST = "efficiency", "fixed seconds", "most ranks"
THREE = Cause("Return three numbers: efficiency in per cent, fixed seconds, the most ranks.")
MOST_IS_A_FLOAT = Cause(
    "The most ranks are an int (or math.inf), and // of two floats is a float. Try math.floor."
)
OTHER = Cause(
    "That run of one rank did other work: take the one whose run.work is the same, wherever it "
    "stands in the list."
)
COPIES = Cause("Divided by the copies of the model: the ranks of TP and PP count, too.")
WHOLE_RUNS = Cause(
    "Those are whole runs, which have different numbers of steps: compare the time of a step."
)
AT_ZERO = Cause(
    "Where nothing is fixed, or less than nothing (caches), no number of ranks is too many: "
    "math.inf."
)


def _experiment(run: StudyRun, num_steps: int, step_s: float) -> Experiment:
    return Experiment(
        run=run,
        num_steps=num_steps,
        time_s=num_steps * step_s,
        num_tokens=num_steps * run.tokens_a_step,
        held={},
        machine={},
    )


_TINY = StudyRun(spec=find_model("tiny"), global_batch=16, seq=64, steps=12)
_SMALL = replace(_TINY, spec=find_model("small"))
_OTHER_WORK = (
    _experiment(replace(_TINY, global_batch=32), 9, 3.5),
    _experiment(replace(_TINY, seq=32), 9, 1.75),
    _experiment(replace(_TINY, dtype="bfloat16"), 9, 1.875),
    _experiment(replace(_TINY, warmup=3), 9, 2.25),
)
ALONE = (
    *_OTHER_WORK,
    _experiment(_TINY, 9, 2.0),
    _experiment(replace(_TINY, num_micro_batches=4), 12, 2.5),
    _experiment(_SMALL, 6, 8.0),
    *_OTHER_WORK,
)
DP_2 = replace(_TINY, strategy="ddp", ranks=2)
ZERO_4 = replace(_TINY, strategy="zero1", ranks=4, num_micro_batches=4)
PP_2 = replace(_SMALL, ranks=2, pp=2, num_micro_batches=4)


def _cases() -> list[Case]:
    """Return runs that gain much, little and nothing; a limit met exactly; nothing that is fixed.

    Seconds are sums of powers of two, so that a limit met exactly is met to the last bit.
    """
    cases = (
        ("DP on 2 ranks", _experiment(DP_2, 6, 1.25), 50),
        ("DP on 2 ranks", _experiment(DP_2, 6, 1.25), 80),  # 2 ranks, exactly
        ("TP on 4 ranks, slower than one", _experiment(replace(_TINY, ranks=4, tp=4), 9, 3.0), 50),
        ("ZeRO on 4 ranks, 4 micro-batches", _experiment(ZERO_4, 3, 1.0), 60),
        ("DP 2 x TP 2", _experiment(replace(DP_2, ranks=4, tp=2), 5, 0.75), 70),
        ("PP on 2 ranks", _experiment(PP_2, 4, 5.0), 75),
        ("as fast as can be on 2 ranks", _experiment(DP_2, 6, 1.0), 90),
        ("faster than twice on 2 ranks", _experiment(DP_2, 6, 0.875), 90),
    )
    return [
        (f"{name}, {percent} % asked for", (run, ALONE, percent)) for name, run, percent in cases
    ]


def _drawn(random: Random) -> list[Case]:
    def one(ranks: int, percent: int) -> Case:
        step_s = random.randint(1100, 1900) / 1000 * 2 / ranks
        run = _experiment(replace(DP_2, ranks=ranks), random.randint(4, 8), step_s)
        return f"DP on {ranks} ranks, {percent} % asked for", (run, ALONE, percent)

    return [one(ranks, random.randint(41, 83)) for ranks in (2, 4, 8)]


def _three(result: Any, *_case: Any) -> dict[str, Any]:
    efficiency, fixed_s, most = numbers(result, (EFFICIENCY, FIXED, MOST), THREE).values()
    if isinstance(most, float) and not _endless(most):
        raise failed(f"got {result!r}", MOST_IS_A_FLOAT)
    return {EFFICIENCY: efficiency, FIXED: fixed_s, MOST: most if _endless(most) else whole(most)}


def _endless(most: Any) -> bool:
    return isinstance(most, float) and math.isinf(most)


FOUND = "found.run.work == experiment.run.work"
EFFICIENT = "one.step_s / (ranks * step_s) * 100"
SHARED = "(one.step_s - step_s) / (1 - 1 / ranks)"
NONE_FIXED = "if fixed_s <= 0:"
LIMIT = "math.floor((one.step_s * 100 / percent - shared_s) / fixed_s)"

LINEAR = Cause("p ranks that are p times as fast are 100 % efficient: divide by the ranks, too.")
UPSIDE_DOWN = Cause("Upside down: the more efficient, the shorter the step on p ranks.")
STILL_SHARED = Cause("T_1 - T_p is not all that is shared: on p ranks, 1/p of it is still there.")
ONLY_A_PART = Cause("In T_p is only 1/p of the shared part: subtract that, or all of it from T_1.")
ONE_TOO_MANY = Cause("Round down: on one rank more than fits, the efficiency is below the limit.")
STILL_FITS = Cause("Exactly the limit is still at least the limit: it counts.")
PER_CENT = Cause("The limit is given in per cent: 50 of them are one half.")
ONCE = Cause("p T_p is p times the fixed part and, once, the shared part: subtract that first.")
AMDAHL = Cause("That is the largest factor of all: how many ranks still keep the efficiency?")
RANKS_AND_S = "ranks, step_s = experiment.run.ranks, experiment.step_s"
FIXED_S, RETURN = "fixed_s = one.step_s - shared_s", "return efficiency, fixed_s, math.floor"
OF_WHOLE_RUNS = tuple(
    (old, old.replace("one.step_s", "one.time_s")) for old in (EFFICIENT, SHARED, FIXED_S, LIMIT)
)

LIMIT_OF = Exercise(
    key="scaling_study-2",
    title="how far a fixed batch scales",
    check=Parts(
        cases=_cases,
        drawn=_drawn,
        show=_three,
        parts={
            EFFICIENCY: Part("A step's seconds on one rank, over p times those on p.", " %"),
            FIXED: Part("Write T_1 and T_p as fixed and shared parts; subtract the two.", " s"),
            MOST: Part("Solve T_1 / (p T_p) = limit, with T_p = fixed + shared / p.", " ranks"),
        },
        success="Two runs: what is fixed, and how many ranks are efficient.",
    ),
    wrong=(
        Edit(FOUND, "True", OTHER),
        Edit(EFFICIENT, "one.step_s / step_s * 100", LINEAR),
        Edit(EFFICIENT, "ranks * step_s / one.step_s * 100", UPSIDE_DOWN),
        Edit(RANKS_AND_S, RANKS_AND_S.replace("run.ranks", "run.parallelism.dp"), COPIES),
        Edit(
            RANKS_AND_S,
            RANKS_AND_S.replace("experiment.step_s", "experiment.time_s"),
            WHOLE_RUNS,
            also=OF_WHOLE_RUNS,
        ),
        Edit(SHARED, "one.step_s - step_s", STILL_SHARED),
        Edit(FIXED_S, "fixed_s = step_s - shared_s", ONLY_A_PART),
        Edit(NONE_FIXED, "if fixed_s == 0:", AT_ZERO),
        Edit(LIMIT, LIMIT.replace("floor", "ceil"), ONE_TOO_MANY),
        Edit(LIMIT, f"{LIMIT.replace('floor', 'ceil')} - 1", STILL_FITS),
        Edit("math.floor(", "float(", MOST_IS_A_FLOAT),
        Edit(LIMIT, LIMIT.replace("* 100 / percent", "/ percent"), PER_CENT),
        Edit(LIMIT, LIMIT.replace(" - shared_s", ""), ONCE),
        Edit(LIMIT, "math.floor(one.step_s / fixed_s)", AMDAHL),
        Edit(RETURN, "return fixed_s, math.floor", THREE),
    ),
)
