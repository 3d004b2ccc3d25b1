"""Search: nothing invalid, nothing lost, the fastest first, and a front that nothing beats."""

from dataclasses import replace
from itertools import product

import pytest

from course_lib.core import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import ModelSpec
from course_lib.planner import Plan, find_cluster, predict
from course_lib.planner.searching import LONG, search, valid_plans

MODEL = ModelSpec(
    hidden=1024, num_layers=8, num_heads=8, ffn_hidden=4096, vocab=50304, max_seq=2048
)
CLUSTER, BATCH, SEQ = find_cluster("selene-a100"), 8, 2048


def by_brute_force(seq=SEQ, ways=(1,)):
    """Every combination of small numbers that a plan, and the rules of the search, allow."""
    for cp, dp, tp, pp, micro, m, chunks, zero, recompute, schedule in product(
        ways, (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8),
        (1, 2, 4, 8), (0, 1, 2, 3), ("none", "full"), ("1f1b", "interleaved", "zb-h1"),
    ):  # fmt: skip
        if cp * dp * tp * pp != 8 or dp * micro * m != BATCH or (zero and dp * cp == 1):
            continue
        if pp > 1 < zero or (schedule == "zb-h1" and pp == 1) or 8 % (pp * chunks):
            continue
        try:
            axes = Parallelism(dp=dp, cp=cp, tp=tp, pp=pp, zero=zero, sequence_parallel=tp > 1)
            plan = Plan(
                parallelism=axes,
                schedule=schedule,
                num_model_chunks=chunks,
                micro_batch=micro,
                num_micro_batches=m,
                seq=seq,
                recompute=recompute,
            )
            plan.check(replace(MODEL, max_seq=seq))
        except CourseError:
            continue
        yield plan


@pytest.fixture(scope="module")
def found():
    return search(MODEL, CLUSTER, BATCH, seq=SEQ)


def test_it_tries_what_brute_force_finds(found):
    plans = list(valid_plans(MODEL, CLUSTER, BATCH, SEQ))
    assert len(plans) == len(set(plans)) == found.num_plans > 100
    assert set(plans) == set(by_brute_force())


def test_context_parallelism_is_tried_for_long_sequences():
    plans = list(valid_plans(replace(MODEL, max_seq=LONG), CLUSTER, BATCH, LONG))
    assert set(plans) == set(by_brute_force(LONG, (1, 2, 4, 8)))


def test_nothing_that_fits_is_lost_and_the_fastest_is_first(found):
    every = [predict(MODEL, CLUSTER, plan) for plan in valid_plans(MODEL, CLUSTER, BATCH, SEQ)]
    fitting = [step for step in every if step.fits]
    assert len(found.steps) == len(fitting)
    assert found.steps[0].step_s == min(step.step_s for step in fitting)
    times = [step.step_s for step in found.steps]
    assert times == sorted(times)


def test_nothing_beats_the_front_in_time_and_memory(found):
    front = found.pareto_front
    for step in found.steps:
        beaten_by = [
            one
            for one in front
            if one.step_s <= step.step_s and one.memory_bytes <= step.memory_bytes
        ]
        assert beaten_by
        assert step not in front or beaten_by == [step]


def test_the_best_are_ranked_by_simulation(found):
    best = found.best(3)
    assert len(best) == 3
    again = [predict(MODEL, CLUSTER, step.plan, simulated=True).step_s for step in best]
    assert [step.step_s for step in best] == again == sorted(again)


def test_a_batch_that_cannot_be_shared_is_one_sentence():
    one_head = ModelSpec(
        hidden=64, num_layers=1, num_heads=1, ffn_hidden=64, vocab=100, max_seq=2048
    )
    with pytest.raises(CourseError, match="need a batch and a model that 8 GPUs can share; got 3"):
        search(one_head, CLUSTER, 3)
