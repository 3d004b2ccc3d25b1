"""The exercises of lesson 12: right answers in another style pass, subtle wrong ones do not."""

import pytest

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.units import GIB
from course_lib.planner import search


def per_parameter(num_params, dp=1, tp=1, pp=1, zero=0):
    shares = [dp if zero >= stage else 1 for stage in (3, 2, 1)]
    each = sum(n / share for n, share in zip((2, 4, 12), shares, strict=True))
    return each * num_params / tp / pp / GIB


def on_two_clocks(compute_s, tp_s, num_micro_batches, num_stages, dp_s, num_buckets):
    """Plays the last backward bucket by bucket, each with a link of its own."""
    before = (num_micro_batches + num_stages - 1) * (compute_s + tp_s)
    late, part = 0.0, compute_s * 2 / 3 / num_buckets
    for _ in range(num_buckets - 1):
        late += max(dp_s / num_buckets - part, 0)
    return before + late + dp_s / num_buckets


def by_loop(plans, job, memory):
    left = []
    for plan in plans:
        if plan["dp"] * plan["tp"] * plan["pp"] != job["gpus"] or memory(plan) > job["gib"]:
            continue
        if job["heads"] % plan["tp"] or plan["tp"] > job["gpus_per_node"]:
            continue
        together = plan["dp"] * plan["micro_batch"] * plan["num_micro_batches"]
        if plan["pp"] <= job["layers"] and together == job["batch"]:
            left.insert(0, dict(plan))
    return left


def by_gpu_hours(plans, num_tokens, days, price):
    best = None
    for number, (gpus, rate, fits) in enumerate(plans):
        gpu_hours = num_tokens / rate / 3600
        on_time = gpu_hours / gpus <= days * 24
        if fits and on_time and (best is None or gpu_hours * price < best[1]):
            best = [number, gpu_hours * price]
    return best


def by_search(model, cluster, batch, seq):
    return search(model, cluster, batch, seq=seq).steps[0].plan


RIGHT = {"1": per_parameter, "2": on_two_clocks, "3": by_loop, "4": by_gpu_hours, "5": by_search}


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_answer_in_another_style_passes(number):
    assert find_exercise(f"planner-{number}").verdict(RIGHT[number])


def the_slowest_that_fits(model, cluster, batch, seq):
    return search(model, cluster, batch, seq=seq).steps[-1].plan


def the_least_memory(model, cluster, batch, seq):
    steps = search(model, cluster, batch, seq=seq).steps
    return min(steps, key=lambda step: step.memory_bytes).plan


@pytest.mark.parametrize("answer", [the_slowest_that_fits, the_least_memory])
def test_a_plan_far_from_the_best_does_not(answer):
    with pytest.raises(CheckFailed, match="a step; the best one"):
        find_exercise("planner-5").verdict(answer)
