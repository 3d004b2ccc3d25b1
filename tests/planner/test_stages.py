"""Stages by dynamic programming: the best of all layouts, and better than equal stages."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.core import CourseError
from course_lib.core.presets import find_model
from course_lib.planner import Plan, find_cluster
from course_lib.planner.stages import (
    MeshStage,
    StageLayout,
    SubMesh,
    choose_stages,
    equal_stages,
    num_items,
    stage_clock,
    sub_meshes,
)


def shared(layer_times, overhead_s=0.0, fits=lambda first, end, mesh, behind: True):
    """A clock: layers share GPUs, and each further GPU costs a little."""

    def stage_s(first, end, mesh, behind):
        if not fits(first, end, mesh, behind):
            return math.inf
        return sum(layer_times[first:end]) / mesh.num_gpus + overhead_s * (mesh.num_gpus - 1)

    return stage_s


def every_layout(stage_s, num_layers, nodes, gpus, m):
    """Every way to cut the layers, with every sub-mesh for each stage, as far as they fit."""
    for cuts in product((False, True), repeat=num_layers - 1):
        ends = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), num_layers]
        last = len(ends) - 2
        for meshes in product(sub_meshes(nodes, gpus), repeat=last + 1):
            stages = [
                MeshStage(first, end, mesh, stage_s(first, end, mesh, last - stage))
                for stage, (first, end, mesh) in enumerate(
                    zip(ends, ends[1:], meshes, strict=False)
                )
            ]
            used = sum(mesh.num_gpus for mesh in meshes)
            if used == nodes * gpus and all(one.time_s < math.inf for one in stages):
                yield StageLayout(stages, m)


@given(
    layer_times=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (3, 1)]),
    m=st.integers(1, 12),
    overhead_s=st.sampled_from([0.0, 0.5, 3.0]),
    room=st.integers(2, 30),
)
def test_no_layout_is_faster(layer_times, shape, m, overhead_s, room):
    """Also where memory counts: a stage holds a micro-batch for each one behind it, and its own."""

    def fits(first, end, mesh, behind):
        return (end - first) * (behind + 1) / mesh.num_gpus <= room / 4

    stage_s = shared(layer_times, overhead_s, fits)
    best_s = min(
        (one.step_s for one in every_layout(stage_s, len(layer_times), *shape, m)),
        default=math.inf,
    )
    if best_s == math.inf:
        with pytest.raises(CourseError, match="that fit into"):
            choose_stages(stage_s, len(layer_times), *shape, m)
        return
    found = choose_stages(stage_s, len(layer_times), *shape, m)
    assert found.step_s == pytest.approx(best_s)
    assert [one.first for one in found.stages] == [0, *(one.end for one in found.stages[:-1])]
    assert found.stages[-1].end == len(layer_times)
    assert sum(one.mesh.num_gpus for one in found.stages) == math.prod(shape)


def test_unequal_layers_get_unequal_stages():
    """Two heavy layers at the end: half of the GPUs for them, or stages of fewer layers."""
    stage_s = shared([1, 1, 1, 1, 1, 1, 9, 9], overhead_s=0.5)
    found = choose_stages(stage_s, 8, 2, 4, num_micro_batches=16)
    equal = [equal_stages(stage_s, 8, 2, 4, 16, count) for count in (1, 2, 4, 8)]
    assert found.step_s < 0.85 * min(one.step_s for one in equal)
    assert len({one.end - one.first for one in found.stages}) > 1
    assert len({one.mesh for one in found.stages}) > 1


def test_equal_layers_get_equal_stages():
    found = choose_stages(shared([1] * 8, overhead_s=0.4), 8, 2, 2, num_micro_batches=64)
    assert [one.end - one.first for one in found.stages] == [2, 2, 2, 2]
    assert {one.mesh for one in found.stages} == {SubMesh(1, 1)}


def test_a_model_with_a_large_vocabulary_has_fewer_layers_before_its_head():
    """Llama 3 1B has 16 layers, and an output layer that computes as long as four of them."""
    model, cluster = find_model("llama-1b"), find_cluster("selene-a100", gpus_per_node=4)
    plan = Plan(micro_batch=1, num_micro_batches=64, seq=4096)
    stage_s, count = stage_clock(model, cluster, plan), num_items(model)
    found = choose_stages(stage_s, count, 1, 4, 64)
    equal = [equal_stages(stage_s, count, 1, 4, 64, stages) for stages in (1, 2, 4)]
    assert found.step_s < 0.95 * min(one.step_s for one in equal)
    last, *others = [one.end - one.first for one in reversed(found.stages)]
    assert last < min(others)


def test_the_clock_counts_memory_and_messages():
    model, cluster = find_model("llama-8b"), find_cluster("selene-a100", 2)
    clock = stage_clock(model, cluster, Plan(micro_batch=2, num_micro_batches=8), 8)
    assert num_items(model, 8) == 5
    assert clock(0, 5, SubMesh(1, 1), 0) == math.inf  # 8B parameters do not fit into one GPU
    one, two = (clock(0, 1, SubMesh(1, n), 0) for n in (4, 8))
    assert one / 2 < two < one  # more GPUs are faster, and send more
    assert clock(0, 2, SubMesh(1, 4), 0) < clock(0, 2, SubMesh(1, 4), 40) == math.inf
    whole_s = clock(0, 4, SubMesh(1, 8), 0)
    assert clock(0, 5, SubMesh(1, 8), 0) > whole_s > 3.9 * clock(1, 2, SubMesh(1, 8), 0)


def test_the_clock_spreads_the_gradients_of_copies_over_the_micro_batches():
    """One sequence has no copies in a node; two nodes hold two, as tp stays inside a node."""
    model, cluster = find_model("llama-8b"), find_cluster("selene-a100", 2)

    def time_s(mesh, num_micro_batches):
        plan = Plan(micro_batch=mesh.nodes, num_micro_batches=num_micro_batches)
        return stage_clock(model, cluster, plan)(0, 4, mesh, 0)

    assert time_s(SubMesh(1, 8), 1) == time_s(SubMesh(1, 8), 10)
    once_s, often_s = (time_s(SubMesh(2, 8), count) for count in (1, 10))
    assert once_s > often_s > time_s(SubMesh(1, 8), 10)


def test_sub_meshes_are_parts_of_a_node_or_whole_nodes():
    assert sub_meshes(3, 4) == [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sub_meshes(2, 6), "need nodes with 1, 2, 4, 8, ... GPUs each; got 2 nodes of 6"),
        (lambda: sub_meshes(0, 8), "got 0 nodes of 8"),
        (lambda: equal_stages(shared([1] * 8), 8, 1, 8, 4, 3), "stages that share 1 nodes of 8"),
        (lambda: equal_stages(shared([1] * 2), 2, 1, 4, 4, 4), "GPUs and 2 layers; got 4"),
        (
            lambda: equal_stages(shared([1] * 4, fits=lambda *stage: stage[0] < 2), 4, 1, 2, 4, 2),
            "layers 2 to 3 do not fit into 1 GPUs",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(call, says):
    with pytest.raises(CourseError, match=says):
        call()
