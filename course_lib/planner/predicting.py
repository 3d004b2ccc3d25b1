"""Predict a step of a plan: seconds by cause, and memory. Notebook 12_planner.

`predict(model, cluster, plan)` is the entry. It adds up what compute.py, communication.py,
pipeline_step.py and memory.py say. What plans have in common is computed once and cached, so that a
search prices many thousands of plans per second.
"""

from functools import lru_cache
from typing import NamedTuple

from course_lib.core.errors import MeshError
from course_lib.core.specs import ModelSpec
from course_lib.planner.cluster import Cluster
from course_lib.planner.communication import StageWork, context_s, gradients_s, tensor_s
from course_lib.planner.compute import LayerTime, head_time, layer_time, optimizer_s
from course_lib.planner.memory import plan_memory, stage_layers, stage_params
from course_lib.planner.pipeline_step import StepTimes, pipeline_step, simulated_step
from course_lib.planner.plan import Plan
from course_lib.planner.prediction import PredictedStep


class MicroBatchTime(NamedTuple):
    """Seconds of one micro-batch on one rank: of one layer, and of the ends of the model.

    layer, head   computation
    sent, ends    exposed messages of tensor and context parallelism: of a layer, and of the ends
    launched      more per layer, where the host launches kernels too slowly
    """

    layer: LayerTime
    head: LayerTime
    sent: LayerTime
    ends: LayerTime
    launched: LayerTime


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
    layers = stage_layers(model, axes.pp, software.balances_head)
    params = stage_params(model, axes.tp, layers)
    one = micro_batch(model, cluster, _alike(plan))
    m, pp = plan.num_micro_batches, axes.pp
    compute_s = m * _total(one.layer, one.head, model.num_layers) / pp
    tp_s = m * _total(one.sent, one.ends, model.num_layers) / pp
    launch_s = m * model.num_layers * sum(one.launched) / pp
    times = stage_times(one, layers, message_s(model, cluster, plan))
    play = simulated_step if simulated and pp > 1 else pipeline_step
    step = play(plan.schedule, m, times, plan.num_model_chunks)
    most = max(range(pp), key=params.__getitem__)
    work = StageWork(
        layers[most], params[most], _sum(one.layer, one.sent), max(times.backward_input_s) * 2
    )
    owned = params[most] / (axes.zero_ranks if axes.zero else 1)
    return PredictedStep(
        model=model,
        cluster=cluster,
        plan=plan,
        compute_s=compute_s,
        launch_s=launch_s + software.step_s,
        tp_s=tp_s,
        bubble_s=max(0.0, step.step_s - compute_s - tp_s - launch_s),
        pp_s=step.messages_s,
        dp_s=gradients_s(model, cluster, plan, work),
        optimizer_s=optimizer_s(cluster, owned),
        memory=plan_memory(model, plan, software),
    )


def _alike(plan: Plan) -> Plan:
    """Return the plan whose micro-batch takes as long on a rank: without its other axes."""
    axes = plan.parallelism
    return _stripped(
        plan.micro_batch,
        plan.seq,
        (plan.recompute, plan.flash, plan.precision),
        (axes.tp, axes.cp, axes.sequence_parallel),
    )


@lru_cache(maxsize=4096)
def _stripped(
    size: int, seq: int, options: tuple[str, bool, str], sizes: tuple[int, int, bool]
) -> Plan:
    recompute, flash, precision = options
    tp, cp, sequence_parallel = sizes
    plan = Plan(micro_batch=size, seq=seq, recompute=recompute, flash=flash, precision=precision)
    return plan.with_axes(tp=tp, cp=cp, sequence_parallel=sequence_parallel)


@lru_cache(maxsize=16384)
def micro_batch(model: ModelSpec, cluster: Cluster, plan: Plan) -> MicroBatchTime:
    """Return the seconds of one micro-batch, whatever the other axes of the plan."""
    software = cluster.software
    layer, head = layer_time(model, cluster, plan), head_time(model, cluster, plan)
    sent, ends = tensor_s(model, cluster, plan)
    sent = _sum(sent, context_s(model, cluster, plan))
    host_s = software.host_s + software.host_tp_s * (plan.parallelism.tp > 1)
    again = 2 + (plan.recompute == "full")
    launched = LayerTime(
        max(0.0, host_s - layer.forward_s - sent.forward_s),
        max(0.0, again * host_s - layer.backward_s - sent.backward_s),
    )
    return MicroBatchTime(layer, head, sent, ends, launched)


def stage_times(one: MicroBatchTime, layers: tuple[int, ...], sent_s: float) -> StepTimes:
    """Return the seconds of each stage's micro-batch: its layers, and the head on the last one."""
    layer, ends = _sum(_sum(one.layer, one.sent), one.launched), _sum(one.head, one.ends)
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
