"""Inter-operator parallelism: layers into stages, and GPUs into one sub-mesh for each stage.

Alpa's first half. Stages need not have equally many layers, nor equally many GPUs. With B
micro-batches and stages that take t_1 .. t_S, a pipeline's step takes

    T = t_1 + ... + t_S + (B - 1) * max(t_i)

Neither term alone decides: few large stages have a small sum, many small ones a small maximum. So
every possible maximum is tried, and for each one dynamic programming finds the least sum of stages
that do not exceed it. The answer is optimal: `tests/planner/test_stages.py` compares it with all
ways to cut. Messages between stages are not counted. Notebook 12_planner.

Source: Zheng et al. 2022 (Alpa), section 5.1 (shapes of sub-meshes), section 5.2 (the program)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from course_lib.core.errors import CourseError
from course_lib.core.layers import layer_kinds
from course_lib.core.specs import ModelSpec
from course_lib.cost.params import layer_params, norm_params
from course_lib.memory.formulas import model_states
from course_lib.planner.cluster import Cluster
from course_lib.planner.memory import saved_bytes
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import micro_batch


class SubMesh(NamedTuple):
    """Nodes, and GPUs used on each of them."""

    nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        """GPUs of the sub-mesh."""
        return self.nodes * self.gpus_per_node


# stage_s(first, end, mesh, behind): seconds of one micro-batch, forward and backward, in the layers
# first .. end-1 on a sub-mesh with `behind` stages behind it; infinite where it does not fit
StageClock = Callable[[int, int, SubMesh, int], float]


class MeshStage(NamedTuple):
    """A stage: the layers first .. end-1, the GPUs that compute them, seconds of a micro-batch."""

    first: int
    end: int
    mesh: SubMesh
    time_s: float


@dataclass(frozen=True)
class StageLayout:
    """Stages in the order of the layers, and the micro-batches that pass through them."""

    stages: Sequence[MeshStage]
    num_micro_batches: int

    @property
    def step_s(self) -> float:
        """Seconds of a step: sum + (B - 1) * slowest."""
        times = [stage.time_s for stage in self.stages]
        return sum(times) + (self.num_micro_batches - 1) * max(times)


def sub_meshes(num_nodes: int, gpus_per_node: int) -> list[SubMesh]:
    """Return the shapes that a stage may have: part of a node, 1, 2, 4, .. GPUs, or whole nodes.

    Stages of these shapes whose GPUs add up to all fill the cluster without gaps: whole nodes
    first, and powers of two, the largest first, fill the others.

    Raises: CourseError for nodes whose GPUs are no power of two
    Source: Zheng et al. 2022, section 5.1
    """
    if num_nodes < 1 or gpus_per_node < 1 or gpus_per_node & (gpus_per_node - 1):
        raise CourseError(
            "sub_meshes: need nodes with 1, 2, 4, 8, ... GPUs each; got "
            f"{num_nodes} nodes of {gpus_per_node}. Try 8 GPUs a node."
        )
    parts = [SubMesh(1, 2**k) for k in range(gpus_per_node.bit_length())]
    return parts + [SubMesh(nodes, gpus_per_node) for nodes in range(2, num_nodes + 1)]


def choose_stages(
    stage_s: StageClock,
    num_layers: int,
    num_nodes: int,
    gpus_per_node: int,
    num_micro_batches: int,
) -> StageLayout:
    """Return the stages that make a step fastest; together they use every GPU.

    Raises: CourseError where no layout fits
    """
    meshes = sub_meshes(num_nodes, gpus_per_node)
    clock = cache(stage_s)
    best: tuple[MeshStage, ...] = ()
    best_s = math.inf
    for slowest_s in _possible_times(clock, num_layers, meshes):
        if num_micro_batches * slowest_s >= best_s:
            break  # T >= t_max + (B - 1) * t_max, and those to come have a larger t_max
        sum_s, stages = _least_sum(clock, num_layers, num_nodes * gpus_per_node, meshes, slowest_s)
        if sum_s + (num_micro_batches - 1) * slowest_s < best_s:
            best_s, best = sum_s + (num_micro_batches - 1) * slowest_s, stages
    if not best:
        raise CourseError(
            f"choose_stages: need stages of {num_layers} layers that fit into {num_nodes} nodes of "
            f"{gpus_per_node} GPUs; got none. Try more nodes, or a smaller micro-batch."
        )
    return StageLayout(best, num_micro_batches)


def _possible_times(clock: StageClock, num_layers: int, meshes: Sequence[SubMesh]) -> list[float]:
    """Return every time that a stage can take, in ascending order: the candidates for t_max."""
    found = {
        clock(first, end, mesh, behind)
        for end in range(1, num_layers + 1)
        for first in range(end)
        for behind in range(min(1, num_layers - end), num_layers - end + 1)
        for mesh in meshes
    }
    return sorted(found - {math.inf})


def _least_sum(
    clock: StageClock,
    num_layers: int,
    num_gpus: int,
    meshes: Sequence[SubMesh],
    slowest_s: float,
) -> tuple[float, tuple[MeshStage, ...]]:
    """Return the stages with the least sum of times, none of them above `slowest_s`."""

    @cache
    def until(end: int, free: int, behind: int) -> tuple[float, tuple[MeshStage, ...]]:
        """Return the best stages of the first `end` layers on exactly `free` GPUs."""
        if end == 0:
            return (0.0 if free == 0 else math.inf), ()
        best: tuple[float, tuple[MeshStage, ...]] = math.inf, ()
        for mesh in (mesh for mesh in meshes if mesh.num_gpus <= free):
            for first in range(end):
                time_s = clock(first, end, mesh, behind)
                if time_s <= slowest_s:
                    sum_s, before = until(first, free - mesh.num_gpus, behind + 1)
                    if sum_s + time_s < best[0]:
                        best = sum_s + time_s, (*before, MeshStage(first, end, mesh, time_s))
        return best

    return until(num_layers, num_gpus, 0)


def equal_stages(
    stage_s: StageClock,
    num_layers: int,
    num_nodes: int,
    gpus_per_node: int,
    num_micro_batches: int,
    num_stages: int,
) -> StageLayout:
    """Return the usual layout: equally many GPUs for each stage, and layers as equal as they can.

    Raises: CourseError where the stages are no sub-meshes, more than the layers, or do not fit
    """
    size, rest = divmod(num_nodes * gpus_per_node, num_stages)
    meshes = {mesh.num_gpus: mesh for mesh in sub_meshes(num_nodes, gpus_per_node)}
    if rest or size not in meshes or num_stages > num_layers:
        raise CourseError(
            f"equal_stages: need stages that share {num_nodes} nodes of {gpus_per_node} GPUs and "
            f"{num_layers} layers; got {num_stages}. Try {num_nodes}."
        )
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    stages = []
    for stage, (first, end) in enumerate(pairwise(ends)):
        time_s = stage_s(first, end, meshes[size], num_stages - 1 - stage)
        if time_s == math.inf:
            raise CourseError(
                f"equal_stages: need stages that fit; layers {first} to {end - 1} do not fit into "
                f"{size} GPUs. Try fewer stages, or a smaller micro-batch."
            )
        stages.append(MeshStage(first, end, meshes[size], time_s))
    return StageLayout(stages, num_micro_batches)


def stage_clock(
    model: ModelSpec, cluster: Cluster, plan: Plan, layers_per_item: int = 1
) -> StageClock:
    """Return the predicted seconds of a micro-batch of `plan` on a stage, for `choose_stages`.

    The items are groups of `layers_per_item` layers, and the output layer with its loss as the last
    one: `num_items(model, layers_per_item)` in all. On each sub-mesh, tensor and data parallelism
    share the GPUs in the fastest way that fits; its all_reduce is spread over the micro-batches.

    Raises: CourseError for a model whose layers differ, as with experts in some or a window
    """
    if model.experts is not None or len(layer_kinds(model)) > 1:
        raise CourseError(
            f"stage_clock: need a dense model whose layers are alike; got {model.name}. "
            "Try predict or search."
        )
    last = num_items(model, layers_per_item) - 1

    def stage_s(first: int, end: int, mesh: SubMesh, behind: int) -> float:
        num_layers = min(end * layers_per_item, model.num_layers) - first * layers_per_item
        part = _Part(num_layers, first == 0, end > last, behind + 1)
        ways = _ways(model, plan, mesh)
        return min((_part_s(model, cluster, way, part) for way in ways), default=math.inf)

    return stage_s


def num_items(model: ModelSpec, layers_per_item: int = 1) -> int:
    """Return how many items `stage_clock` divides a model into: groups of layers, and the head."""
    return -(-model.num_layers // layers_per_item) + 1


class _Part(NamedTuple):
    """Layers of a stage, whether it has embedding and head, and micro-batches in flight (1F1B)."""

    num_layers: int
    embeds: bool
    has_head: bool
    in_flight: int


def _ways(model: ModelSpec, plan: Plan, mesh: SubMesh) -> list[Plan]:
    """Return the plan with each tp and dp that fill a sub-mesh; tp stays inside a node."""
    found = []
    for k in range(mesh.gpus_per_node.bit_length()):
        tp, dp = 2**k, mesh.num_gpus // 2**k
        heads = (model.num_heads, model.kv_heads, model.ffn_hidden)
        if plan.micro_batch % dp == 0 and not any(size % tp for size in heads):
            is_split = tp > 1 and plan.seq % tp == 0
            found.append(plan.with_axes(tp=tp, dp=dp, pp=1, cp=1, sequence_parallel=is_split))
    return found


def _part_s(model: ModelSpec, cluster: Cluster, way: Plan, part: _Part) -> float:
    """Return the seconds of a stage that is split that way; infinite where it does not fit."""
    axes, software = way.parallelism, cluster.software
    alike = Plan(
        micro_batch=way.micro_batch // axes.dp,
        seq=way.seq,
        recompute=way.recompute,
        flash=way.flash,
        precision=way.precision,
    ).with_axes(tp=axes.tp, sequence_parallel=axes.sequence_parallel)
    one = micro_batch(model, cluster, alike)
    time_s = part.num_layers * (sum(one.layer) + sum(one.sent) + sum(one.launched))
    time_s += part.has_head * (sum(one.head) + sum(one.ends))
    table = model.padded_vocab * model.hidden // axes.tp
    num_params = part.num_layers * layer_params(model, axes) + part.embeds * table
    num_params += part.has_head * (table + norm_params(model))
    saved = saved_bytes(
        model,
        (axes.tp, 1, axes.sequence_parallel, axes.tp),
        alike.micro_batch,
        way.seq,
        (way.recompute, way.flash, software.recipe.activation_bytes, software.kernels),
    )
    held = part.in_flight * (part.num_layers * saved.layer + part.embeds * saved.embedding)
    held += saved.recomputed + part.has_head * saved.head
    states = model_states(num_params, software.recipe, parallelism=axes)
    if sum(states.values()) + held > cluster.usable_bytes:
        return math.inf
    synced_s = cluster.collective_s("all_reduce", 4 * num_params, axes.dp, axes.tp)
    return time_s + synced_s / way.num_micro_batches
