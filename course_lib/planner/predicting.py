"""Predict a step of a plan: seconds by cause, and memory. Notebook 12_planner.

`predict(model, cluster, plan)` is the entry. It adds up what compute.py, communication.py,
pipeline_step.py and memory.py say. What plans have in common is computed once and cached, so that a
search prices many thousands of plans per second.
"""

from functools import lru_cache
from typing import NamedTuple

from course_lib.core.errors import MeshError
from course_lib.core.layers import LayerKind, layer_kinds
from course_lib.core.specs import ModelSpec
from course_lib.planner.cluster import Cluster
from course_lib.planner.communication import StageWork, context_s, gradients_s, tensor_s
from course_lib.planner.compute import LayerTime, head_time, layer_time, optimizer_s
from course_lib.planner.experts import routed_s
from course_lib.planner.memory import StageContents, plan_memory, stages_of
from course_lib.planner.pipeline_step import StepTimes, pipeline_step, simulated_step
from course_lib.planner.plan import Plan
from course_lib.planner.prediction import PredictedStep

# of a layer: computation, exposed messages, launches, and messages of its experts
LayerParts = tuple[LayerTime, LayerTime, LayerTime, LayerTime]


class MicroBatchTime(NamedTuple):
    """Seconds of one micro-batch on one rank: of one layer, and of the ends of the model.

    Layers of several kinds count as their mean: stages whose layers differ take equally long.

    layer, head   computation
    sent, ends    exposed messages of tensor and context parallelism: of a layer, and of the ends
    launched      more per layer, where the host launches kernels too slowly
    routed        exposed messages of expert parallelism
    """

    layer: LayerTime
    head: LayerTime
    sent: LayerTime
    ends: LayerTime
    launched: LayerTime
    routed: LayerTime


def predict(
    model: ModelSpec, cluster: Cluster, plan: Plan, *, simulated: bool = False
) -> PredictedStep:
    """Return the predicted step of a plan on a cluster.

    simulated   simulate the pipeline's schedule action by action, instead of its closed form

    Raises:  MeshError for axes that the model or the cluster does not allow; CourseError for a
             sequence or model chunks that the model does not allow
    """
    plan.check(model)
    axes, software = plan.parallelism, cluster.software
    if plan.world_size > cluster.num_gpus:
        raise MeshError(
            f"predict: need at most the {cluster.num_gpus} GPUs of {cluster.name}; got "
            f"{plan.world_size} ranks. Try cluster.with_nodes"
            f"({-(-plan.world_size // cluster.gpus_per_node)})."
        )
    stages = stages_of(model, plan, software.balances_head)
    one = micro_batch(model, cluster, _alike(plan))
    m, pp = plan.num_micro_batches, axes.pp
    compute_s = m * _total(one.layer, one.head, model.num_layers) / pp
    tp_s = m * _total(one.sent, one.ends, model.num_layers) / pp
    ep_s = m * model.num_layers * sum(one.routed) / pp
    launch_s = m * model.num_layers * sum(one.launched) / pp
    times = stage_times(
        one, tuple(stage.num_layers for stage in stages), message_s(model, cluster, plan)
    )
    play = simulated_step if simulated and pp > 1 else pipeline_step
    step = play(plan.schedule, m, times, plan.num_model_chunks)
    largest = max(stages, key=lambda stage: stage.num_params)
    layer, backward_s = _sum(one.layer, one.sent), max(times.backward_input_s) * 2
    return PredictedStep(
        model=model,
        cluster=cluster,
        plan=plan,
        compute_s=compute_s,
        launch_s=launch_s + software.step_s,
        tp_s=tp_s,
        ep_s=ep_s,
        bubble_s=max(0.0, step.step_s - compute_s - tp_s - launch_s - ep_s),
        pp_s=step.messages_s,
        dp_s=gradients_s(model, cluster, plan, StageWork(largest, layer, backward_s)),
        optimizer_s=optimizer_s(cluster, _owned(plan, largest)),
        memory=plan_memory(model, plan, software),
    )


def _owned(plan: Plan, stage: StageContents) -> float:
    """Return the parameters that a rank of a stage updates: its share with ZeRO, else all."""
    axes = plan.parallelism
    if not axes.zero:
        return stage.num_params
    others = stage.num_params - stage.expert_params
    return others / axes.zero_ranks + stage.expert_params / axes.expert_zero_ranks


def _alike(plan: Plan) -> Plan:
    """Return the plan whose micro-batch takes as long on a rank: without its other axes."""
    axes = plan.parallelism
    return _stripped(
        plan.micro_batch,
        plan.seq,
        (plan.recompute, plan.flash, plan.precision),
        (axes.tp, axes.cp, axes.sequence_parallel, axes.ep, axes.expert_tensor),
    )


@lru_cache(maxsize=4096)
def _stripped(
    size: int, seq: int, options: tuple[str, bool, str], sizes: tuple[int, int, bool, int, int]
) -> Plan:
    recompute, flash, precision = options
    tp, cp, sequence_parallel, ep, expert_tp = sizes
    plan = Plan(micro_batch=size, seq=seq, recompute=recompute, flash=flash, precision=precision)
    return plan.with_axes(
        dp=ep * expert_tp if ep > 1 or expert_tp != tp else 1,
        tp=tp,
        cp=cp,
        sequence_parallel=sequence_parallel,
        ep=ep,
        expert_tp=expert_tp,
    )


@lru_cache(maxsize=16384)
def micro_batch(model: ModelSpec, cluster: Cluster, plan: Plan) -> MicroBatchTime:
    """Return the seconds of one micro-batch, whatever the other axes of the plan."""
    kinds = layer_kinds(model)
    each = [(count, _layer_parts(model, cluster, plan, kind)) for kind, count in kinds.items()]
    layer, sent, launched, routed = each[0][1] if len(each) == 1 else _mean(each)
    head, (_, ends) = head_time(model, cluster, plan), tensor_s(model, cluster, plan)
    return MicroBatchTime(layer, head, sent, ends, launched, routed)


def _mean(each: list[tuple[int, LayerParts]]) -> list[LayerTime]:
    """Return the mean layer of some layers, whose numbers are given with each."""
    total = sum(count for count, _ in each)
    return [
        LayerTime(*(sum(count * parts[n][way] for count, parts in each) / total for way in (0, 1)))
        for n in range(4)
    ]


def _layer_parts(model: ModelSpec, cluster: Cluster, plan: Plan, kind: LayerKind) -> LayerParts:
    """Return the times of a layer of that kind."""
    software = cluster.software
    layer = layer_time(model, cluster, plan, kind)
    sent, _ = tensor_s(model, cluster, plan, kind)
    sent = _sum(sent, context_s(model, cluster, plan, kind))
    host_s = software.host_s + software.host_tp_s * (plan.parallelism.tp > 1)
    host_s += software.host_routed_s * kind.routed
    again = 2 + (plan.recompute == "full")
    routed = routed_s(model, cluster, plan, kind, layer)
    launched = LayerTime(
        max(0.0, host_s - layer.forward_s - sent.forward_s - routed.forward_s),
        max(0.0, again * host_s - layer.backward_s - sent.backward_s - routed.backward_s),
    )
    return layer, sent, launched, routed


def stage_times(one: MicroBatchTime, layers: tuple[int, ...], sent_s: float) -> StepTimes:
    """Return the seconds of each stage's micro-batch: its layers, and the head on the last one."""
    layer, ends = _sum(_sum(one.layer, one.sent), one.launched), _sum(one.head, one.ends)
    layer = _sum(layer, one.routed)
    forward_s = [count * layer.forward_s for count in layers]
    half_s = [count * layer.backward_s / 2 for count in layers]
    forward_s[-1] += ends.forward_s
    half_s[-1] += ends.backward_s / 2
    return StepTimes(forward_s, half_s, half_s, sent_s)


def message_s(model: ModelSpec, cluster: Cluster, plan: Plan) -> float:
    """Return the seconds of an activation, or its gradient, between two stages."""
    axes = plan.parallelism
    if axes.pp == 1:
        return 0.0
    splits = axes.tp if axes.sequence_parallel or cluster.software.splits_messages else 1
    number_bytes = 4 if plan.precision == "fp32" else 2
    tokens = plan.micro_batch * plan.seq // axes.cp
    link = cluster.send_link(axes.tp * axes.cp * axes.dp)
    return link.time_s(tokens * model.hidden * number_bytes / splits)


def _sum(one: LayerTime, other: LayerTime) -> LayerTime:
    return LayerTime(one.forward_s + other.forward_s, one.backward_s + other.backward_s)


def _total(layer: LayerTime, ends: LayerTime, num_layers: int) -> float:
    return num_layers * sum(layer) + sum(ends)
