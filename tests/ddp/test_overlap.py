"""The model of overlap: its laws on paper, and real ranks on emulated wires that obey it."""

import math
import random
from itertools import pairwise, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from course_lib.core import CourseError, Event, Link
from course_lib.cost.network import collective_s
from course_lib.cost.packing import fill_buckets
from course_lib.ddp import make_buckets
from course_lib.ddp.cost import (
    StepCost,
    best_bucket_bytes,
    best_num_buckets,
    bucket_range,
    ddp_step,
    equal_buckets_s,
    exposed_s,
    on_the_wire,
    ready_by_share,
    step_s,
)
from course_lib.ddp.lab import measure_cost, measure_steps, measure_sweep
from course_lib.display import timeline
from course_lib.models.emulated import emulated_loss, emulated_model
from course_lib.ranks import Ranks

MIB = 2**20
WIRE = Link(latency_s=4e-3, bytes_per_s=140e6)
FREE = Link(latency_s=0.0, bytes_per_s=math.inf)


@st.composite
def costs(draw):
    """Any step: some gradients, each with its share of backward and its bytes."""
    sizes = draw(st.lists(st.integers(1, 10 * MIB), min_size=1, max_size=12))
    seconds = st.floats(0.001, 1.0)
    shares = [draw(seconds) for _ in sizes]
    return StepCost(
        forward_s=draw(seconds),
        ready_s=ready_by_share(shares, draw(seconds)),
        grad_bytes=tuple(sizes),
        optimizer_s=draw(seconds),
    )


links = st.builds(
    lambda latency_s, bytes_per_s: Link(latency_s=latency_s, bytes_per_s=bytes_per_s),
    st.floats(0, 0.01),
    st.floats(1e6, 1e9),
)
groups = st.integers(1, 8)
buckets = st.integers(1, 40 * MIB)


def on_wire_s(cost, bucket_bytes, group, link):
    return sum(
        collective_s("all_reduce", sum(cost.grad_bytes[i] for i in members), group, link)
        for members in fill_buckets(cost.grad_bytes, bucket_bytes)
    )


@settings(max_examples=50)
@given(costs(), buckets, groups, links)
def test_without_overlap_a_step_is_the_sum_of_its_parts(cost, bucket_bytes, group, link):
    total_s = cost.compute_s + on_wire_s(cost, bucket_bytes, group, link)
    assert step_s(cost, bucket_bytes, group, link, overlap=False) == pytest.approx(total_s)


@settings(max_examples=50)
@given(costs(), groups, links)
def test_one_bucket_overlaps_with_nothing(cost, group, link):
    one = sum(cost.grad_bytes)
    without_s = step_s(cost, one, group, link, overlap=False)
    assert step_s(cost, one, group, link) == pytest.approx(without_s)


@settings(max_examples=50)
@given(costs(), buckets, groups, links)
def test_an_infinite_wire_or_a_lone_rank_leaves_computing(cost, bucket_bytes, group, link):
    assert step_s(cost, bucket_bytes, group, FREE) == pytest.approx(cost.compute_s)
    assert step_s(cost, bucket_bytes, 1, link) == pytest.approx(cost.compute_s)


@settings(max_examples=50)
@given(costs(), buckets, groups, links)
def test_a_step_lies_between_its_bounds(cost, bucket_bytes, group, link):
    wire_s = on_wire_s(cost, bucket_bytes, group, link)
    first = fill_buckets(cost.grad_bytes, bucket_bytes)[0][-1]
    least_s = max(cost.compute_s, cost.forward_s + cost.ready_s[first] + wire_s + cost.optimizer_s)
    got_s = step_s(cost, bucket_bytes, group, link)
    assert least_s * (1 - 1e-9) <= got_s
    assert got_s <= step_s(cost, bucket_bytes, group, link, overlap=False) * (1 + 1e-9)
    assert exposed_s(cost, bucket_bytes, group, link) <= wire_s * (1 + 1e-9) + 1e-12


@settings(max_examples=50)
@given(costs(), buckets, groups, st.floats(1e6, 1e9))
def test_without_latency_a_bucket_a_gradient_is_best(cost, bucket_bytes, group, bytes_per_s):
    link = Link(latency_s=0.0, bytes_per_s=bytes_per_s)
    least_s = step_s(cost, 1, group, link)
    assert least_s <= step_s(cost, bucket_bytes, group, link) * (1 + 1e-9)


@settings(max_examples=50)
@given(costs(), groups, links)
def test_the_best_bucket_is_the_best_of_the_range(cost, group, link):
    best = best_bucket_bytes(cost, group, link)
    seconds = [step_s(cost, size, group, link) for size in bucket_range(cost)]
    assert step_s(cost, best, group, link) == min(seconds)
    assert best_bucket_bytes(cost, 1, link) == sum(cost.grad_bytes), "equal: the fewest messages"


def equal_buckets(k, backward_s, num_bytes=MIB):
    """A step whose k equal gradients are complete at an even pace: a bucket each."""
    return StepCost(
        forward_s=0.01,
        ready_s=ready_by_share([1] * k, backward_s),
        grad_bytes=(num_bytes,) * k,
        optimizer_s=0.002,
    )


@settings(max_examples=50)
@given(st.integers(1, 40), st.floats(0.001, 1.0), groups, links)
def test_k_equal_buckets_by_formula_are_the_simulated_step(k, backward_s, group, link):
    cost = equal_buckets(k, backward_s)
    assert equal_buckets_s(cost, k, group, link) == pytest.approx(step_s(cost, MIB, group, link))


MOST = 32  # buckets that the brute-force search tries
SLOWNESS = st.floats(0.01, 3.0)  # time of all bytes on the link, over the time of backward
LATENCIES = st.floats(1e-3, 1.0)  # latency of an all-reduce, over the time of backward


@settings(max_examples=40)
@given(st.integers(2, 8), st.floats(0.01, 1.0), SLOWNESS, LATENCIES)
def test_the_best_number_of_buckets_is_beside_the_formula_in_both_regimes(
    group, backward_s, slowness, latency
):
    """Simulate 1, 2, 3 ... equal buckets of the same bytes, and take the fastest."""
    rounds, total = 2 * (group - 1), 1e9
    link = Link(
        latency_s=latency * backward_s / rounds,
        bytes_per_s=rounds / group * total / (slowness * backward_s),
    )
    seconds = {}
    for k in range(1, MOST + 1):
        cost = equal_buckets(k, backward_s, total / k)
        seconds[k] = step_s(cost, total / k, group, link)
    expected = max(1.0, (1 - slowness) / latency, math.sqrt(1 / latency))
    best = best_num_buckets(equal_buckets(1, backward_s, total), group, link)
    assert best == pytest.approx(expected, rel=1e-6)
    beside = [k for k in (math.floor(best * (1 + 1e-9)), math.ceil(best * (1 - 1e-9))) if k <= MOST]
    least_s = min(seconds[k] for k in beside or [MOST])
    assert least_s == pytest.approx(min(seconds.values()), rel=1e-9)


def test_the_best_number_of_buckets_by_hand():
    """Two ranks, alpha 1 s: an all-reduce has a latency of 2 s."""
    cost = equal_buckets(1, 18.0, 10)
    keeps_up = Link(latency_s=1.0, bytes_per_s=5.0)  # all bytes take 2 s: (18 - 2) / 2
    assert best_num_buckets(cost, 2, keeps_up) == 8
    queues_up = Link(latency_s=1.0, bytes_per_s=0.1)  # 100 s: sqrt(18 / 2)
    assert best_num_buckets(cost, 2, queues_up) == 3
    between = Link(latency_s=1.0, bytes_per_s=10 / 14)  # 14 s: (18 - 14) / 2 is below 3
    assert best_num_buckets(cost, 2, between) == 3
    assert best_num_buckets(cost, 2, FREE) == 1, "no latency, and no time for bytes either"
    assert best_num_buckets(cost, 2, Link(latency_s=0.0, bytes_per_s=1.0)) == math.inf
    assert best_num_buckets(cost, 1, keeps_up) == 1
    assert best_num_buckets(cost, 2, Link(latency_s=100.0, bytes_per_s=1.0)) == 1


@settings(max_examples=50)
@given(costs(), buckets, groups, links, st.booleans())
def test_events_leave_in_order_one_after_the_other(cost, bucket_bytes, group, link, overlap):
    events = ddp_step(cost, bucket_bytes, group, link, overlap=overlap)
    for rank in range(group):
        own = [event for event in events if event.rank == rank]
        calls = [event for event in own if event.kind == "all_reduce"]
        assert sum(event.num_bytes for event in calls) == sum(cost.grad_bytes)
        assert all(a.end_s <= b.start_s for a, b in pairwise(calls))
        compute_s = sum(e.duration_s for e in own if e.kind not in ("all_reduce", "wait"))
        assert compute_s == pytest.approx(cost.compute_s)
        wait_s = sum(event.duration_s for event in own if event.kind == "wait")
        exposed = exposed_s(cost, bucket_bytes, group, link, overlap=overlap)
        assert wait_s == pytest.approx(exposed, abs=1e-9)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 120))
def test_buckets_hold_everything_once_in_order(sizes, bucket_bytes):
    found = fill_buckets(sizes, bucket_bytes)
    assert [number for members in found for number in members] == list(range(len(sizes)))
    for members, after in zip_longest(found, found[1:]):
        total = sum(sizes[number] for number in members)
        assert total <= bucket_bytes or len(members) == 1
        assert after is None or total + sizes[after[0]] > bucket_bytes, "it would have fitted"


def test_an_example_by_hand():
    cost = StepCost(forward_s=1, ready_s=(1, 2, 3), grad_bytes=(100, 100, 100), optimizer_s=0.5)
    link = Link(latency_s=0.25, bytes_per_s=100)  # two ranks: 2 * (0.25 + 0.5) s for 100 bytes
    calls = [e for e in ddp_step(cost, 100, 2, link) if e.rank == 1 and e.kind == "all_reduce"]
    assert [(e.start_s, e.end_s) for e in calls] == [(2.0, 3.5), (3.5, 5.0), (5.0, 6.5)]
    assert step_s(cost, 100, 2, link) == 7.0
    assert step_s(cost, 200, 2, link) == 1 + 2 + 2.5 + 1.5 + 0.5
    assert step_s(cost, 300, 2, link) == step_s(cost, 300, 2, link, overlap=False) == 8.0
    assert exposed_s(cost, 100, 2, link) == 2.5
    assert best_bucket_bytes(cost, 2, link) == 100


def test_shares_of_backward_add_up():
    assert ready_by_share([1, 3, 4], 16.0) == (2.0, 8.0, 16.0)


@pytest.mark.parametrize(
    ("ready_s", "grad_bytes"), [((1.0,), (1, 2)), ((), ()), ((2.0, 1.0), (1, 2)), ((-1.0,), (1,))]
)
def test_a_step_that_cannot_be_is_told(ready_s, grad_bytes):
    with pytest.raises(CourseError, match="StepCost: need one time per gradient"):
        StepCost(forward_s=0.0, ready_s=ready_s, grad_bytes=grad_bytes)


def test_calls_wait_in_line_before_they_are_on_the_wire():
    moments = [(0.0, 3.0), (1.0, 5.0), (7.0, 8.0)]
    calls = [
        Event(rank=r, kind="all_reduce", start_s=s, end_s=e) for r in (0, 1) for s, e in moments
    ]
    random.Random(0).shuffle(calls)
    for rank in (0, 1):
        found = [(e.start_s, e.end_s) for e in on_the_wire(calls) if e.rank == rank]
        assert found == [(0.0, 3.0), (3.0, 5.0), (7.0, 8.0)]


# --- real ranks on an emulated wire


def is_undisturbed(cost, steps):
    """Has nobody else kept the processors from the layers that sleep, and from the wire?"""
    return cost.compute_s < 1.1 * 12 * (0.005 + 0.01) and all(
        step.least_s < 1.2 * step_s(cost, size, 2, WIRE, overlap=overlap)
        for (size, overlap), step in steps.items()
    )


@pytest.fixture(scope="module")
def measured():
    """Cost, and steps by (bucket bytes, overlap), of layers that sleep: each at its calmest."""
    with Ranks(2, link=WIRE) as ranks:
        runs = {(size, True): {"bucket_bytes": size} for size in (MIB, 2 * MIB, 12 * MIB)}
        for size in (2 * MIB, 12 * MIB):
            runs[size, False] = {"bucket_bytes": size, "overlap": False}
        costs, tries = [], []
        for _ in range(8):
            costs.append(measure_cost(ranks, emulated_model, emulated_loss, turns=3))
            tries.append(measure_steps(ranks, emulated_model, emulated_loss, runs, turns=5))
            cost = min(costs, key=lambda one: one.compute_s)
            steps = {run: min((t[run] for t in tries), key=lambda s: s.least_s) for run in runs}
            if is_undisturbed(cost, steps):
                break
        return cost, steps


def test_the_measured_cost_is_that_of_the_layers(measured):
    cost, _ = measured
    assert cost.grad_bytes == (MIB,) * 12
    assert cost.forward_s == pytest.approx(12 * 0.005, rel=0.25)
    assert cost.backward_s == pytest.approx(12 * 0.01, rel=0.25)
    assert [len(bucket.names) for bucket in make_buckets(emulated_model(), 2 * MIB)] == [2] * 6


def test_steps_take_what_the_model_says(measured):
    cost, steps = measured
    for (size, overlap), step in steps.items():
        predicted_s = step_s(cost, size, 2, WIRE, overlap=overlap)
        assert step.least_s == pytest.approx(predicted_s, rel=0.25), (size, overlap)


def test_the_best_bucket_and_both_ends_are_where_the_model_says(measured):
    cost, steps = measured
    seconds = {size: step.least_s for (size, overlap), step in steps.items() if overlap}
    assert best_bucket_bytes(cost, 2, WIRE) == 2 * MIB
    assert seconds[2 * MIB] < min(seconds[MIB], seconds[12 * MIB])


def test_overlap_saves_a_fifth_where_the_wire_takes_half_of_computing(measured):
    cost, steps = measured
    wire_s = exposed_s(cost, 2 * MIB, 2, WIRE, overlap=False)
    assert 0.4 * cost.compute_s < wire_s < 0.8 * cost.compute_s
    assert steps[2 * MIB, True].least_s <= 0.8 * steps[2 * MIB, False].least_s


def test_predicted_and_measured_events_are_of_the_same_kinds(measured):
    cost, steps = measured
    predicted = ddp_step(cost, 2 * MIB, 2, WIRE)
    events = on_the_wire(steps[2 * MIB, True].events)
    for rank in (0, 1):
        kinds = [{e.kind for e in found if e.rank == rank} for found in (predicted, events)]
        assert kinds[0] == kinds[1]
    calls, ours = ([e for e in x if e.kind == "all_reduce"] for x in (events, predicted))
    assert sorted(e.num_bytes for e in calls) == sorted(e.num_bytes for e in ours)
    assert min(event.start_s for event in events) == 0.0
    assert isinstance(timeline(events, "measured", link=WIRE), Figure)
    assert isinstance(timeline(predicted, "predicted", link=WIRE), Figure)


def test_a_sweep_goes_through_the_sizes():
    def small():
        return emulated_model(num_layers=2, layer_bytes=64, forward_s=0.001, backward_s=0.001)

    with Ranks(2) as ranks:
        sweep = measure_sweep(ranks, small, emulated_loss, (64, 128), turns=1)
    calls = {
        size: [e.num_bytes for e in step.events if (e.kind, e.rank) == ("all_reduce", 0)]
        for size, step in sweep.items()
    }
    assert calls == {64: [64, 64], 128: [128]}
    assert all(step.step_s == step.least_s > 0.004 for step in sweep.values())
