"""Exposed communication of a plan: tensor and context parallelism, gradients, sharded parameters.

The messages are those that each method's `cost.py` lists; this file says which link they use and
what computation hides of them. Notebook 12_planner.
"""

from dataclasses import replace
from typing import NamedTuple

from course_lib.core.specs import ModelSpec
from course_lib.cost.params import layer_params
from course_lib.cost.traffic import CollectiveCall
from course_lib.planner.cluster import Cluster
from course_lib.planner.compute import LayerTime, attention_time
from course_lib.planner.plan import Plan
from course_lib.tensor_parallel.cost import tensor_traffic


def one_layer(model: ModelSpec) -> ModelSpec:
    """Return the model with a single layer."""
    return replace(model, num_layers=1)


def tensor_s(model: ModelSpec, cluster: Cluster, plan: Plan) -> tuple[LayerTime, LayerTime]:
    """Return the exposed seconds of tensor parallelism: of a layer, and of embedding and head.

    With full recomputation the forward's messages are sent again. With sequence parallelism the
    inputs of regions are gathered again in backward, too, but behind a product.

    Source: Korthikanti et al. 2022, section 4.2.2 (the last is overlapped)
    """
    axes = plan.parallelism
    if axes.tp == 1:
        return LayerTime(0.0, 0.0), LayerTime(0.0, 0.0)
    calls = tensor_traffic(
        one_layer(model),
        plan.micro_batch,
        plan.seq // axes.cp,
        4 if plan.precision == "fp32" else 2,
        sequence_parallel=axes.sequence_parallel,
    )
    layer, ends = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    for call in calls:
        if call.phase != "finish":
            inside = call.part in ("attention 0", "mlp 0")
            (layer if inside else ends)[call.phase] += _call_s(call, cluster, axes.tp)
    again_s = layer["forward"] if plan.recompute == "full" else 0.0
    return (
        LayerTime(layer["forward"], layer["backward"] + again_s),
        LayerTime(ends["forward"], ends["backward"]),
    )


def _call_s(call: CollectiveCall, cluster: Cluster, size: int) -> float:
    return cluster.collective_s(call.kind, call.num_bytes, size)


def context_s(model: ModelSpec, cluster: Cluster, plan: Plan) -> LayerTime:
    """Return the exposed seconds of ring attention in a layer: what its products do not hide.

    Keys and values go around the ring once forward; in backward they go around with their gradients
    in fp32.

    Source: Liu et al. 2023 (Ring Attention), section 3
    """
    axes = plan.parallelism
    if axes.cp == 1:
        return LayerTime(0.0, 0.0)
    tokens = plan.micro_batch * plan.seq // axes.cp
    num_bytes = 2 * tokens * model.kv_hidden // axes.tp * 2
    hop_s = cluster.link(axes.cp, axes.tp).time_s(num_bytes)
    sent_s, scores = (axes.cp - 1) * hop_s, attention_time(model, cluster, plan)
    return LayerTime(max(0.0, sent_s - scores.forward_s), max(0.0, 3 * sent_s - scores.backward_s))


class StageWork(NamedTuple):
    """Computation and memory of a stage's ranks per micro-batch: the pace of its gradients.

    layer        seconds of one layer with its exposed messages
    backward_s   seconds of the whole stage's backward
    """

    num_layers: int
    num_params: float
    layer: LayerTime
    backward_s: float


def gradients_s(model: ModelSpec, cluster: Cluster, plan: Plan, stage: StageWork) -> float:
    """Return the exposed seconds of a step's communication between replicas or their shards."""
    axes, software = plan.parallelism, cluster.software
    size, stride = axes.dp * axes.cp, axes.tp
    if size == 1:
        return 0.0
    if axes.zero == 3:
        return _sharded_s(model, cluster, plan, stage)
    grad_bytes = stage.num_params * max(software.recipe.grad_bytes, 4)
    kind = "reduce_scatter" if axes.zero else "all_reduce"
    num_buckets = max(1.0, grad_bytes // software.bucket_bytes) if software.bucket_bytes else 1.0
    bucket_s = cluster.collective_s(kind, grad_bytes / num_buckets, size, stride)
    hidden_s = stage.backward_s if software.overlaps else 0.0
    each_s = exposed_s(num_buckets, bucket_s, hidden_s)
    sends = plan.num_micro_batches if axes.zero == 2 else 1
    whole_s = 0.0
    if axes.zero:
        weight_bytes = stage.num_params * software.recipe.weight_bytes
        whole_s = cluster.collective_s("all_gather", weight_bytes, size, stride)
    return sends * each_s + whole_s


def exposed_s(num_buckets: float, bucket_s: float, backward_s: float) -> float:
    """Return what backward does not hide of equal buckets, of which the last is never hidden.

    It is `ddp.cost.equal_buckets_s` less the computation: (k-1) max(B/k, c) + c - (k-1) B/k.
    """
    ready_s = backward_s / num_buckets
    return (num_buckets - 1) * max(0.0, bucket_s - ready_s) + bucket_s


def _sharded_s(model: ModelSpec, cluster: Cluster, plan: Plan, stage: StageWork) -> float:
    """Return the exposed seconds of FSDP: each layer is gathered while the one before computes.

    The first gather and the last reduction are always exposed. What is hidden slows computation,
    because it takes memory bandwidth and multiprocessors.
    """
    axes, software = plan.parallelism, cluster.software
    size, stride, num_params = axes.dp * axes.cp, axes.tp, layer_params(model, axes)
    gather_s = cluster.collective_s("all_gather", 2 * num_params, size, stride)
    reduce_s = cluster.collective_s("reduce_scatter", 4 * num_params, size, stride)
    forward_s, backward_s = stage.layer
    exposed = max(0.0, gather_s - forward_s) + max(0.0, gather_s + reduce_s - backward_s)
    hidden = min(gather_s, forward_s) + min(gather_s + reduce_s, backward_s)
    layer_s = exposed + software.contention * hidden
    return plan.num_micro_batches * (stage.num_layers * layer_s + gather_s + reduce_s)
