"""Measured pipelines: emulated stages take the simulated times, and have real gradients."""

import sys

import cloudpickle
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.core import Link
from course_lib.core.records import COMPUTE_KINDS
from course_lib.pipeline import (
    PipelineTimes,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    v_placement,
    zero_bubble_h1,
    zero_bubble_v,
)
from course_lib.pipeline.actions import loop_placement
from course_lib.pipeline.cost import BatchCost
from course_lib.pipeline.lab import PipelineRun, TimedLayer, emulated, measure, measure_times
from course_lib.ranks import Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMES = PipelineTimes(
    forward_s=[0.002, 0.004], backward_input_s=0.003, backward_weight_s=[0.001, 0.002]
)
SLOW = Link(name="slow", latency_s=0.01, bytes_per_s=1e7)
SCHEDULES = {
    "gpipe": gpipe(2, 3),
    "interleaved": interleaved(2, 4, 2),
    "zb-h1": zero_bubble_h1(2, 3),
    "zb-v": zero_bubble_v(2, 3),
    "dualpipe-v": dual_pipe_v(2, 4),
}


def computed(events):
    return {
        rank: [(e.kind, e.label) for e in events if e.rank == rank and e.kind in COMPUTE_KINDS]
        for rank in range(2)
    }


def test_emulated_steps_do_what_is_simulated_and_are_never_faster(pools):
    runs = {name: emulated(schedule, TIMES) for name, schedule in SCHEDULES.items()}
    measured = measure(pools(2), runs, turns=3)
    for name, step in measured.items():
        simulated = simulate(SCHEDULES[name], TIMES)
        assert computed(step.events) == computed(simulated.events())
        assert len(step.seconds) == 3
        assert step.least_s >= simulated.step_s - 1e-4  # what sleeps cannot be too early
        assert step.peak_in_flight == tuple(simulated.peak_in_flight())
        assert min(event.start_s for event in step.events) == 0
        assert 0 < step.bubble_fraction < 1


def test_times_are_found_for_each_chunk_and_each_part_of_backward(pools):
    whole = measure_times(pools(2), emulated(SCHEDULES["interleaved"], TIMES))
    split = measure_times(pools(2), emulated(SCHEDULES["zb-h1"], TIMES))
    given = TIMES.by_depth(loop_placement(2, 2))
    assert whole.backward_input_s == whole.backward_weight_s
    assert len(whole.forward_s) == 4
    for got, wanted in zip(whole.forward_s, given["forward"], strict=True):
        assert got >= wanted
    for got, wanted in zip(whole.backward_input_s, given["backward"], strict=True):
        assert got >= wanted / 2
    given = TIMES.by_depth(loop_placement(2))
    for kind in ("forward", "backward_input", "backward_weight"):
        for got, wanted in zip(getattr(split, f"{kind}_s"), given[kind], strict=True):
            assert got >= wanted
    assert split.message_bytes == 4


def test_times_in_a_v_are_those_of_the_rank_that_holds_the_chunk(pools):
    times = measure_times(pools(2), emulated(SCHEDULES["zb-v"], TIMES))
    given = TIMES.by_depth(v_placement(2))
    assert given["forward"] == [0.001, 0.002, 0.002, 0.001]
    for got, wanted in zip(times.forward_s, given["forward"], strict=True):
        assert got >= wanted


def test_messages_have_the_size_and_the_time_of_the_emulated_wire():
    cost = BatchCost(forward_s=0.01, backward_s=0.01, message_bytes=4000)
    times = cost.times(2, SLOW)
    with Ranks(2, link=SLOW) as ranks:
        step = measure(ranks, {"": emulated(one_f_one_b(2, 2), times)}, turns=1)[""]
        found = measure_times(ranks, emulated(one_f_one_b(2, 2), times), turns=1)
    assert step.least_s >= simulate(one_f_one_b(2, 2), times).step_s - 1e-4
    sends = [event for event in step.events if event.kind == "send"]
    assert [event.num_bytes for event in sends] == [2000] * 4
    assert (found.link, found.message_bytes) == (SLOW, 2000)


def test_a_long_micro_batch_takes_longer(pools):
    times = PipelineTimes(
        forward_s=0.002, backward_input_s=0.001, backward_weight_s=0.001, micro_batch_scale=[1, 4]
    )
    step = measure(pools(2), {"": emulated(gpipe(2, 2), times)}, turns=1)[""]
    assert step.least_s >= simulate(gpipe(2, 2), times).step_s - 1e-4
    lengths = {(e.rank, e.label): e.duration_s for e in step.events}
    assert all(lengths[rank, "F1"] >= 0.008 for rank in range(2))


def test_emulated_layers_have_real_gradients():
    layers = nn.Sequential(*(TimedLayer(0.0, 0.0, 0.0) for _ in range(2)))
    x = torch.ones(3, requires_grad=True)
    (10 * layers(x)[0]).backward()
    assert [layer.weight.grad.tolist() for layer in layers] == [[10.0], [10.0]]
    assert x.grad.tolist() == [10.0, 0.0, 0.0]


def test_any_model_can_be_measured(pools):
    run = PipelineRun(
        build=lambda stage, num_stages: nn.Linear(4, 4),
        schedule=one_f_one_b(2, 3),
        inputs=[torch.randn(2, 4)] * 3,
        targets=[torch.randn(2, 4)] * 3,
        loss_fn=F.mse_loss,
    )
    step = measure(pools(2), {"": run}, turns=2)[""]
    times = measure_times(pools(2), run, turns=1)
    assert computed(step.events) == computed(simulate(run.schedule).events())
    assert times.message_bytes == 2 * 4 * 4
    assert all(seconds > 0 for seconds in times.forward_s)


def test_many_messages_under_way_all_arrive():
    m = 16
    times = BatchCost(forward_s=0.01, backward_s=0.01).times(m, SLOW)
    with Ranks(2, link=SLOW) as ranks:
        step = measure(ranks, {"": emulated(gpipe(2, m), times)}, turns=1)[""]
    assert len([event for event in step.events if event.kind == "send"]) == 2 * m
