"""Sentences beside plans: whose constants, how far to trust them, what short words mean."""

from dataclasses import replace

import pytest

from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import find_model
from course_lib.planner import Plan, find_cluster, predict
from course_lib.planner.communication import context_bytes, context_s
from course_lib.planner.compute import attention_time
from course_lib.planner.constants import SOFTWARE
from course_lib.planner.notes import (
    legend,
    plan_notes,
    roofline_note,
    room_note,
    software_note,
    table_notes,
    trust_note,
)

MODEL = find_model("llama2-13b")
SELENE = find_cluster("selene-a100", 4)
SHARDED = Plan(micro_batch=2, num_micro_batches=8).with_axes(dp=32, zero=3)
SPLIT = Plan(micro_batch=2, num_micro_batches=16).with_axes(
    dp=16, tp=2, zero=1, sequence_parallel=True
)
PIPED = Plan(
    parallelism=Parallelism(dp=8, pp=4, zero=1),
    schedule="interleaved",
    num_model_chunks=5,
    micro_batch=1,
    num_micro_batches=64,
)


def steps_of(*plans, cluster=SELENE):
    return [predict(MODEL, cluster, plan, simulated=True) for plan in plans]


def test_what_megatron_cannot_run_is_priced_with_the_constants_of_what_runs_it():
    steps = steps_of(SHARDED, SPLIT, PIPED)
    elsewhere = replace(SELENE, software=SOFTWARE["torchtitan"])
    (fsdp,) = steps_of(SHARDED, cluster=elsewhere)
    assert fsdp.step_s > steps[0].step_s
    seconds = f"{fsdp.step_s:.2f} s instead of {steps[0].step_s:.2f} s"
    said = software_note(steps)
    assert "Megatron-LM of 2021 and 2022, which has no ZeRO-2 or ZeRO-3 (FSDP)" in said
    assert "so it cannot run plan 1. The time of plan 1 is optimistic for FSDP" in said
    assert seconds in said
    assert said.endswith("The first plan that Megatron-LM of 2021 and 2022 runs is plan 2.")
    alone = plan_notes(steps[0])[1]
    assert "so it cannot run this plan. The time of this plan is optimistic" in alone
    assert seconds in alone
    zero_bubble = replace(PIPED, schedule="zb-h1", num_model_chunks=1)
    assert software_note(steps_of(zero_bubble)).endswith(", which has no schedule zb-h1.")
    assert software_note(steps[1:]) == "Times assume the constants of Megatron-LM of 2021 and 2022."


LONG = Plan(micro_batch=1, num_micro_batches=2, seq=2**17).with_axes(
    dp=2, cp=8, tp=2, sequence_parallel=True
)


def test_a_ring_sends_what_lesson_15_counts_and_attention_hides_it():
    model = find_model("llama-8b")  # 8 heads of keys and values of 128, 4 of them on a rank
    forward, backward = context_bytes(model, LONG)
    assert forward == 7 * 2**17 // 8 * 2 * 4 * 128 * 2
    assert backward == 3 * forward
    step = predict(model, SELENE, LONG)
    assert (
        "rank sends 224 MiB and 672 MiB in forward and backward; computing" in plan_notes(step)[-1]
    )
    assert "attention hides all of it." in plan_notes(step)[-1]
    assert sum(context_s(model, SELENE, LONG)) == 0
    assert "cp: ranks that split every sequence" in legend([step])


def test_what_a_short_sequence_does_not_hide_is_in_the_step():
    short, model = replace(LONG, seq=2**11), find_model("llama-8b")
    hop_s = SELENE.link(8, 2).time_s(context_bytes(model, short).forward / 7)
    compute_s = attention_time(model, SELENE, short).forward_s
    forward_s, backward_s = context_s(model, SELENE, short)
    assert forward_s == pytest.approx(7 * (hop_s - compute_s / 8))
    assert min(forward_s, backward_s) > 0
    without = predict(model, SELENE, short.with_axes(cp=1, dp=16))
    step = predict(model, SELENE, short)
    assert step.tp_s > 2 * 32 * (forward_s + backward_s) > 0
    assert "hides all but" in plan_notes(step)[-1]
    assert len(plan_notes(without)) == len(plan_notes(step)) - 1


def test_the_bias_has_its_direction():
    steps = steps_of(SPLIT, SHARDED, cluster=find_cluster("torchtitan-h100", 4))
    said = software_note(steps)
    assert "which has no ZeRO-1, so it cannot run plan 1" in said
    assert "pessimistic for ZeRO-1: with the constants of Megatron-LM" in said


@pytest.mark.parametrize("name", ["laptop", "a6000-pcie"])
def test_a_profile_without_measured_runs_says_so(name):
    small = find_model("tiny")
    step = predict(small, find_cluster(name), Plan(seq=64).with_axes(dp=2))
    assert trust_note([step]).startswith(f"No measured runs score the profile {name}")


def test_plans_within_the_error_count_as_equal():
    (step,) = steps_of(SHARDED)
    near = replace(step, compute_s=step.compute_s + 0.041 * step.step_s)
    far = replace(step, compute_s=step.compute_s + 0.043 * step.step_s)
    assert "The first 2 of these 3 plans are within that of plan 1" in trust_note([step, near, far])
    assert "All 2 plans are within" in trust_note([step, near])
    assert "None of the other 1 plans here is within" in trust_note([step, far])
    assert "4.2 % on 54 runs" in trust_note([step])


def test_only_words_that_occur_are_explained():
    steps = steps_of(SHARDED, SPLIT, PIPED)
    said = legend(steps[:1])
    assert said.startswith("8 x 2: per step, each of the dp replicas computes 8 micro-batches of 2")
    assert "zero3" in said
    (one,) = steps_of(replace(SHARDED, num_micro_batches=1))
    assert "computes 1 micro-batch of 2;" in legend([one])
    assert not any(word in said for word in ("zero1", "sp:", "chunks", "1f1b", "recompute"))
    said = legend(steps)
    assert all(word in said for word in ("zero1:", "sp:", "chunks:", "interleaved:"))
    again = steps_of(replace(SPLIT, recompute="full"))
    assert "recompute full:" in legend(again)


def test_a_full_gpu_names_the_next_plan_with_room():
    full, split, roomy = steps_of(SHARDED, SPLIT, PIPED)
    assert full.memory_bytes > 0.9 * SELENE.usable_bytes
    assert roomy.memory_bytes < 0.9 * SELENE.usable_bytes
    said = room_note([full, split, roomy])
    assert said.startswith("Plan 1 needs 96 % of the usable memory; the next")
    assert f"is plan 3: 57.1 GiB (79 %), {roomy.step_s:.2f} s per step (+" in said
    assert f"is {PIPED}: " in room_note([full], [split, roomy])
    assert "no plan that fits leaves more than 10 %" in room_note([full, split])
    assert room_note([roomy]) == ""
    assert len(table_notes([roomy])) == 3


def test_compute_is_all_of_a_step_only_if_nothing_else_is():
    (step,) = steps_of(SHARDED)
    assert 0.995 < step.compute_s / step.step_s < 1
    assert step.bound == "Bound by compute: 99 % of the step."
    assert list(step.shown_seconds) == ["compute_s", "dp_s", "optimizer_s"]
    assert step.cells[:3] == ("dp32 zero3", "no pipeline", "8 x 2")
    assert step.cells[-1] == "DP messages 0 %"
    assert step.peak_s == pytest.approx(step.mfu * step.step_s)


def test_the_roofline_of_a_plan_is_that_of_lesson_01():
    whole, split = (roofline_note(step) for step in steps_of(SHARDED, SPLIT))
    # selene-a100: 312e12 FLOP/s, 2.039e12 bytes/s; [8192, 5120] @ [5120, 5120] in bf16
    intensity = 2 * 8192 * 5120 * 5120 / (2 * (8192 * 5120 * 2 + 5120 * 5120))
    assert f"[8192, 5120] @ [5120, 5120], has {intensity:,.0f} FLOP per byte" in whole
    assert "the ridge is 153: bound by compute" in whole
    ring = SELENE.link(32).bytes_per_s
    assert f"gathers of parameters from {31 / 32 * 312e12 / ring:,.0f} tokens" in whole
    assert "here are 8,192" in whole
    # ZeRO-1 reduce-scatters 4 bytes per gradient, half of an all-reduce, with 16 ranks, tp between
    ring = SELENE.link(16, 2).bytes_per_s
    assert f"of gradients from {15 / 16 * 312e12 / ring:,.0f} tokens" in split


def test_a_product_too_thin_for_the_device_is_bound_by_memory():
    thin = Plan(seq=64).with_axes(tp=8)
    (step,) = steps_of(thin, cluster=find_cluster("hf-h100", 1))
    said = roofline_note(step)
    assert said.endswith("bound by memory.")
    assert "[64, 640] @ [640, 5120]" in said
