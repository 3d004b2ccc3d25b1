"""The predicted step: parts that add up, closed forms equal to the simulator, and monotone laws."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.cost.hardware import find_device
from course_lib.cost.network import collective_s
from course_lib.ddp.cost import StepCost, equal_buckets_s
from course_lib.planner import CAUSES, Plan, cluster_for, cluster_names, find_cluster, predict
from course_lib.planner.cluster import read_profile
from course_lib.planner.communication import exposed_s
from course_lib.planner.compute import Product, product_s
from course_lib.planner.pipeline_step import StepTimes, pipeline_step, simulated_step
from course_lib.planner.plan import SCHEDULES, schedule_named

MODEL = MODELS["llama-8b"]
CLUSTER = find_cluster("hf-h100", 8)
PLAN = Plan(
    parallelism=Parallelism(dp=8, tp=4, pp=2, zero=1, sequence_parallel=True),
    micro_batch=2,
    num_micro_batches=16,
)


def test_the_causes_add_up_to_the_step():
    said = predict(MODEL, CLUSTER, PLAN)
    assert list(said.seconds) == list(CAUSES)
    assert sum(said.seconds.values()) == pytest.approx(said.step_s, rel=1e-12)
    assert min(said.seconds.values()) >= 0
    assert said.tokens_per_s_per_gpu == pytest.approx(PLAN.tokens / 64 / said.step_s)
    assert 0.2 < said.mfu < 0.6
    assert "%" in said.bound


# --- closed forms and the simulator


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@given(st.integers(2, 6), st.integers(1, 5), st.integers(2, 3))
@settings(max_examples=12, deadline=None)
def test_the_closed_form_is_the_simulated_step(schedule, p, rounds, chunks):
    m = p * rounds
    times = StepTimes([1.0] * p, [1.2] * p, [0.6] * p)
    v = chunks if schedule == "interleaved" else 1
    wanted = simulated_step(schedule, m, times, v).step_s
    assert pipeline_step(schedule, m, times, v).step_s == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@given(st.integers(2, 6), st.integers(1, 4))
@settings(max_examples=12, deadline=None)
def test_exposed_messages_are_the_simulated_ones(schedule, p, rounds):
    times = StepTimes([1.0] * p, [1.0] * p, [1.0] * p, 0.01)
    v = 2 if schedule == "interleaved" else 1
    wanted = simulated_step(schedule, p * rounds, times, v).messages_s
    found = pipeline_step(schedule, p * rounds, times, v).messages_s
    assert found == pytest.approx(wanted, rel=1e-6)


@given(st.integers(2, 6), st.integers(1, 12), st.floats(1.0, 2.0))
@settings(max_examples=40, deadline=None)
def test_a_slow_last_stage_sets_the_pace(p, m, slow):
    seconds = [1.0] * (p - 1) + [slow]
    times = StepTimes(seconds, seconds, seconds)
    wanted = simulated_step("1f1b", m, times).step_s
    assert pipeline_step("1f1b", m, times).step_s == pytest.approx(wanted, rel=1e-9)
    first = StepTimes(seconds[::-1], seconds[::-1], seconds[::-1])
    assert pipeline_step("1f1b", m, first).step_s >= simulated_step("1f1b", m, first).step_s - 1e-9


def test_a_prediction_can_be_simulated():
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1)):
        plan = replace(PLAN, schedule=schedule, num_model_chunks=chunks)
        even = replace(MODEL, vocab=1024)
        closed, played = (predict(even, CLUSTER, plan, simulated=word) for word in (False, True))
        assert closed.step_s == pytest.approx(played.step_s, rel=0.03)


def test_two_published_bubbles_of_zero_bubble():
    """Qi et al. 2024, table 5: 1.5B, 24 micro-batches, ZB-H1 and ZB-H2."""
    times = StepTimes([18.522] * 8, [18.086] * 8, [9.337] * 8)
    ideal = 24 * (18.522 + 18.086 + 9.337)
    for schedule, rate in (("zb-h1", 0.1585), ("zb-h2", 0.1083)):
        step = pipeline_step(schedule, 24, times).step_s
        assert 1 - ideal / step == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (16, 1), (8, 8), (64, 4), (3, 2)])
def test_collectives_cost_as_in_lesson_04(kind, size, stride):
    """But for the latency of an all_reduce, which has p-1 steps' here."""
    even = replace(CLUSTER, gather_share=1.0)
    link = even.link(size, stride)
    wanted = collective_s(kind, 1e8, size, link)
    wanted -= (size - 1) * link.latency_s * (kind == "all_reduce")
    assert even.collective_s(kind, 1e8, size, stride) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("num_buckets", [1, 2, 10, 100])
def test_exposed_gradients_are_those_of_lesson_06(num_buckets):
    link = CLUSTER.link(64)
    cost = StepCost(forward_s=0.1, ready_s=(0.2,), grad_bytes=(10**9,))
    bucket_s = collective_s("all_reduce", 1e9 / num_buckets, 64, link)
    wanted = equal_buckets_s(cost, num_buckets, 64, link) - cost.compute_s
    assert exposed_s(num_buckets, bucket_s, 0.2) == pytest.approx(wanted, rel=1e-9)


# --- laws


def faster(**factors):
    """The cluster with links so many times as fast."""
    links = {
        name: replace(getattr(CLUSTER, name), bytes_per_s=getattr(CLUSTER, name).bytes_per_s * by)
        for name, by in factors.items()
    }
    return replace(CLUSTER, **links)


PLANS = st.builds(
    lambda dp, tp, pp, zero, micro_batch, recompute: Plan(
        parallelism=Parallelism(dp=dp, tp=tp, pp=pp, zero=zero, sequence_parallel=tp > 1),
        micro_batch=micro_batch,
        num_micro_batches=8,
        recompute=recompute,
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "full"]),
)


@given(PLANS, st.floats(1.0, 10.0), st.floats(1.0, 10.0))
@settings(max_examples=40, deadline=None)
def test_more_bandwidth_is_never_slower(plan, inside, outside):
    quick = faster(inside=inside, outside=outside)
    assert predict(MODEL, quick, plan).step_s <= predict(MODEL, CLUSTER, plan).step_s * (1 + 1e-9)


@given(PLANS)
@settings(max_examples=40, deadline=None)
def test_more_of_the_same_takes_longer_and_pays_off(plan):
    once = predict(MODEL, CLUSTER, plan)
    twice = predict(MODEL, CLUSTER, replace(plan, num_micro_batches=16))
    assert once.step_s < twice.step_s
    assert once.mfu <= twice.mfu * (1 + 1e-9)
    full = predict(MODEL, CLUSTER, replace(plan, recompute="full"))
    assert full.step_s >= once.step_s
    assert full.memory["activations"] <= once.memory["activations"]


@given(st.integers(1, 4096), st.integers(1, 8192), st.integers(1, 8192))
@settings(max_examples=40, deadline=None)
def test_a_product_takes_at_least_its_flop_and_its_bytes(m, depth, n):
    h100 = find_device("h100")
    seconds = product_s(Product(m, depth, n), h100)
    assert seconds >= 2 * m * depth * n / h100.peak()
    assert seconds >= 2 * (m * depth + depth * n + m * n) / h100.bytes_per_s
    assert product_s(Product(2 * m, depth, n), h100) >= seconds


def test_a_slow_host_shows_as_launches():
    tiny = Plan(parallelism=Parallelism(tp=8, sequence_parallel=True), seq=512)
    large = replace(tiny, seq=8192, micro_batch=8)
    every_step_s = CLUSTER.software.step_s
    assert predict(MODEL, CLUSTER, tiny).launch_s > 2 * every_step_s
    assert predict(MODEL, CLUSTER, large).launch_s == every_step_s


def test_tensor_parallelism_over_nodes_is_slow():
    def tp_s(tp):
        plan = Plan(parallelism=Parallelism(tp=tp))
        return predict(MODELS["megatron-530b"], CLUSTER, plan).tp_s

    assert tp_s(8) < tp_s(16) / 2


# --- clusters


@pytest.mark.parametrize("name", cluster_names())
def test_a_profile_is_near_its_measured_points(name):
    """The two-number curve against large messages; NCCL changes its algorithm for small ones."""
    cluster, profile = find_cluster(name), read_profile(name)
    assert len(profile.source) > 20
    ratios = [
        cluster.all_reduce_bandwidth(size, int(nodes)) / (1e9 * measured)
        for nodes, size, measured in profile.measured
        if size >= 2**26
    ]
    assert all(0.35 < ratio < 1.4 for ratio in ratios)


def test_a_newer_cluster_trains_faster_and_a_rack_reduces_gradients_on_nvlink():
    plan = Plan(num_micro_batches=8).with_axes(dp=8, tp=8, sequence_parallel=True)
    names = ("torchtitan-h100", "dgx-h200", "dgx-b200", "gb200-nvl72")
    steps = [predict(MODELS["llama-70b"], find_cluster(name, 8), plan) for name in names]
    times_s = [step.step_s for step in steps]
    assert times_s == sorted(times_s, reverse=True)
    assert steps[-1].dp_s < steps[-2].dp_s / 3  # 64 GPUs are eight nodes of 8, or one rack


def test_the_curve_grows_with_the_message_and_falls_with_the_nodes():
    curve = [CLUSTER.all_reduce_bandwidth(2.0**k, 8) for k in range(16, 32)]
    assert curve == sorted(curve)
    nodes = [CLUSTER.all_reduce_bandwidth(2**28, n) for n in (1, 2, 4, 16, 64)]
    assert nodes == sorted(nodes, reverse=True)


def test_groups_beside_each_other_share_the_adapters():
    alone = CLUSTER.link(8, 8)
    whole = CLUSTER.link(64, 1)
    assert whole.bytes_per_s == 8 * alone.bytes_per_s
    assert CLUSTER.link(8).bytes_per_s == CLUSTER.inside.bytes_per_s


def test_a_row_of_a_table_gets_a_cluster():
    assert cluster_for("a100-40gb", 2).device.name == "a100-40"
    assert cluster_for("a100-80gb", 4, 8, "vtrain-a100").name == "vtrain-a100"
    assert cluster_for("h100", 2, 4).num_gpus == 8
    assert schedule_named("1F1B-I") == "interleaved"
    assert [schedule_named(word) for word in SCHEDULES] == list(SCHEDULES)


# --- bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plan(micro_batch=0), "micro_batch"),
        (lambda: Plan(num_micro_batches=1.5), "num_micro_batches"),
        (lambda: Plan(schedule="1f2b"), "schedule"),
        (lambda: Plan(recompute="some"), "recompute"),
        (lambda: Plan(precision="int4"), "precision"),
        (lambda: Plan(num_model_chunks=2), "model chunks"),
        (lambda: Plan(schedule="interleaved", num_model_chunks=2), "pp above 1"),
        (lambda: schedule_named("2F2B"), "2F2B"),
        (lambda: find_cluster("moon"), "moon"),
        (lambda: cluster_for("abacus"), "abacus"),
        (lambda: CLUSTER.with_nodes(0), "num_nodes"),
        (lambda: predict(MODEL, CLUSTER.with_nodes(1), PLAN), "64 ranks"),
        (lambda: predict(MODEL, CLUSTER, PLAN.with_axes(tp=3)), "divisible by tp"),
        (lambda: predict(MODEL, CLUSTER, replace(PLAN, seq=4095)), "seq divisible"),
        (
            lambda: predict(
                MODEL, CLUSTER, replace(PLAN, schedule="interleaved", num_model_chunks=17)
            ),
            "model chunks",
        ),
        (
            lambda: predict(
                MODEL,
                CLUSTER,
                replace(PLAN, schedule="interleaved", num_model_chunks=2, num_micro_batches=15),
            ),
            "divisible by pp",
        ),
    ],
)
def test_bad_input_gets_a_sentence(make, words):
    with pytest.raises(CourseError, match=words):
        make()


# --- speed


def test_thousands_of_plans_per_second():
    """Ten thousand and more with a core of its own; here in processor time, with room to spare."""
    plans = [
        Plan(
            parallelism=Parallelism(dp=dp, tp=tp, pp=pp, zero=zero, sequence_parallel=tp > 1),
            micro_batch=micro_batch,
            num_micro_batches=16,
        )
        for dp in (1, 2, 4)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for zero in (0, 1, 2, 3)
        for micro_batch in (1, 2, 4)
    ]
    for plan in plans:
        predict(MODEL, CLUSTER, plan)
    begin = time.process_time()
    for plan in plans:
        predict(MODEL, CLUSTER, plan)
    assert len(plans) / (time.process_time() - begin) > 3000


def test_the_links_that_a_study_measured_make_a_cluster_of_ones_own(tmp_path):
    path = tmp_path / "links.json"
    path.write_text('{"2": [2e-4, 5e8], "4": [4e-4, 2e8]}')
    own = find_cluster(str(path))
    assert (own.num_gpus, own.device.name) == (4, "laptop")
    assert (own.inside.latency_s, own.inside.bytes_per_s) == (4e-4, 2e8)
    slower, faster = own, find_cluster("laptop")
    plan = Plan(parallelism=Parallelism(dp=4), seq=256, precision="fp32")
    assert predict(MODEL, slower, plan).dp_s > predict(MODEL, faster, plan).dp_s


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"4": [1e-4]}', r"need latency and bytes per second .* got \[0.0001\] for 4"),
        ('{"4": [1e-4, -1]}', "need latency and bytes per second"),
        ('{"gpu": "h100"}', "gpus_per_node"),
        ("[]", "links.json"),
        ("{", "a cluster profile or measured links"),
    ],
)
def test_a_file_that_is_no_cluster_says_so(tmp_path, text, told):
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(CourseError, match=told):
        find_cluster(str(path))
