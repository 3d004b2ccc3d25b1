"""Exercise 2 of 12_planner: what of a step's communication stays exposed."""

from random import Random

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise

NO_BUBBLE = Cause("The bubble is forgotten: to fill and empty takes num_stages - 1 micro-batches.")
TP_HIDDEN = Cause("TP's messages are counted as hidden: the next product waits for each of them.")
TP_OUTSIDE = Cause("The bubble is made of whole micro-batches: TP's messages are in it, too.")
ALL_HIDDEN = Cause("The gradients are counted as hidden: at least the last bucket is not.")
NONE_HIDDEN = Cause("The gradients are counted as exposed: buckets travel while backward computes.")
LAST_HIDDEN = Cause("The last bucket is ready when backward ends: all of it is exposed.")
ALL_BACKWARD = Cause("Only the last micro-batch's backward has final gradients to send.")
FORWARD = Cause("Gradients are ready during backward, 2/3 of the computation.")
EACH = Cause("The gradients travel once per step, not per micro-batch.")
LONGER = Cause("What is exposed comes on top: a step is the sum, not the longer of the two.")
NEGATIVE = Cause("A bucket that is sent before the next one is ready saves no time: at least 0.")
ROUNDED = Cause("Do not round: a small model's step takes a few milliseconds.")
WHOLE_STAGES = Cause("The bubble is num_stages - 1 micro-batches, not num_stages.")


def _case(*arguments: float) -> Case:
    compute_s, tp_s, num_micro_batches, num_stages, dp_s, num_buckets = arguments
    text = f"{num_micro_batches:g} micro-batches of {compute_s:g} + {tp_s:g} s, {num_stages:g} "
    return f"{text}stages, gradients {dp_s:g} s in {num_buckets:g} buckets", arguments


def _cases() -> list[Case]:
    return [
        _case(0.3, 0.0, 1, 1, 0.1, 5),
        _case(0.3, 0.0, 1, 1, 0.9, 5),
        _case(0.3, 0.0, 1, 1, 0.25, 5),  # faster than the whole computation, not than backward
        _case(0.3, 0.06, 8, 4, 0.15, 5),  # and faster than backward, not than forward
        _case(0.3, 0.06, 8, 1, 0.9, 10),
        _case(0.3, 0.06, 8, 4, 0.0, 1),
        _case(0.3, 0.06, 8, 4, 0.1, 4),
        _case(0.03, 0.01, 64, 8, 0.5, 20),
        _case(0.6, 0.2, 2, 2, 0.3, 1),
        _case(0.5, 0.5, 2, 8, 0.0, 1),
        _case(3e-4, 6e-5, 8, 4, 1e-4, 4),
    ]


def _drawn(random: Random) -> list[Case]:
    def one() -> Case:
        compute_s, tp_s = random.randint(1, 90) / 100, random.randint(1, 20) / 100
        counts = random.randint(2, 16), random.randint(2, 8)
        return _case(compute_s, tp_s, *counts, random.randint(1, 200) / 100, random.randint(2, 9))

    return [one() for _ in range(3)]


PIPELINE, BUCKETS = "num_micro_batches + num_stages - 1", "max(0.0, bucket_s - ready_s)"
ALL_S = f"({PIPELINE}) * one_s"
EXPOSED_S = f"bucket_s + (num_buckets - 1) * {BUCKETS}"

EXPOSED = Exercise(
    key="planner-2",
    title="what stays exposed",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        unit=" s",
        show=real,
        look="With dp_s = 0: how many micro-batches of compute_s + tp_s is a step long? Then draw "
        "the last one's backward, and below it the buckets, each as it is ready.",
        success="Right for eleven steps: bubble and TP exposed, gradients in part.",
    ),
    wrong=(
        Edit(PIPELINE, "num_micro_batches", NO_BUBBLE),
        Edit(PIPELINE, "num_micro_batches + num_stages", WHOLE_STAGES),
        Edit("compute_s + tp_s", "compute_s", TP_HIDDEN),
        Edit(ALL_S, f"({PIPELINE}) * compute_s + num_micro_batches * tp_s", TP_OUTSIDE),
        Edit(EXPOSED_S, "0.0", ALL_HIDDEN),
        Edit(EXPOSED_S, "dp_s", NONE_HIDDEN),
        Edit(EXPOSED_S, "max(0.0, dp_s - 2 / 3 * compute_s)", LAST_HIDDEN),
        Edit("2 / 3 * compute_s", "2 / 3 * num_micro_batches * compute_s", ALL_BACKWARD),
        Edit("2 / 3 * compute_s", "compute_s", FORWARD),
        Edit("+ exposed_s", "+ num_micro_batches * exposed_s", EACH),
        Edit("pipeline_s + exposed_s", "max(pipeline_s, dp_s)", LONGER),
        Edit(BUCKETS, "(bucket_s - ready_s)", NEGATIVE),
        Edit("return pipeline_s + exposed_s", "return round(pipeline_s + exposed_s, 3)", ROUNDED),
    ),
)
