"""Exposed communication of a plan: tensor and context parallelism, gradients, sharded parameters.

The messages are those that each method's `cost.py` lists; this file says which link they use and
what computation hides of them. Notebook 12_planner.
"""

from dataclasses import replace
from typing import NamedTuple

from course_lib.context_parallel.cost import (
    AttentionSizes,
    PassBytes,
    ring_bytes,
    ring_exposed_s,
)
from course_lib.core.layers import LayerKind, layer_kinds, layers
from course_lib.core.specs import ModelSpec
from course_lib.cost.params import kind_params
from course_lib.cost.traffic import CollectiveCall
from course_lib.planner.cluster import Cluster
from course_lib.planner.compute import NO_TIME, LayerTime, attention_time
from course_lib.planner.memory import StageContents
from course_lib.planner.plan import Plan
from course_lib.tensor_parallel.cost import region_traffic

# messages in front of a region: with sequence parallelism in both passes, else in backward
ENTERING = (("forward", "all_gather"), ("backward", "reduce_scatter"), ("backward", "all_reduce"))


def one_layer(model: ModelSpec, kind: LayerKind | None = None) -> ModelSpec:
    """Return the model with a single layer of a kind; None: of its last layer's."""
    kind = kind or layers(model)[-1]
    return replace(
        model,
        num_layers=1,
        window=kind.window,
        window_layers=None,
        chunked=model.chunked and kind.window is not None,
        nope_layers=(0,) if model.positions == "rope" and not kind.rotary else (),
        experts=replace(model.experts, dense_layers=()) if model.experts and kind.routed else None,
    )


def tensor_s(
    model: ModelSpec, cluster: Cluster, plan: Plan, kind: LayerKind | None = None
) -> tuple[LayerTime, LayerTime]:
    """Return the exposed seconds of tensor parallelism: of a layer, and of embedding and head.

    With full recomputation the forward's messages are sent again. With sequence parallelism the
    inputs of regions are gathered again in backward, too, but behind a product. Experts need none
    of these messages, but experts that every token uses do. Latent attention sends its small
    vectors in place of its input.

    Source: Korthikanti et al. 2022, section 4.2.2 (the last is overlapped)
    """
    axes = plan.parallelism
    if axes.tp == 1:
        return NO_TIME, NO_TIME
    single = one_layer(model, kind)
    parts = ["attention 0", "mlp 0"]
    if single.experts and not single.experts.shared_hidden:
        parts.remove("mlp 0")
    calls = region_traffic(
        single,
        plan.micro_batch,
        plan.seq // axes.cp,
        4 if plan.precision == "fp32" else 2,
        sequence_parallel=axes.sequence_parallel,
    )
    layer, ends = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    for call in calls:
        if call.part in (*parts, "embedding", "head", "loss"):
            inside = call.part in parts
            if call.part == "attention 0" and (call.phase, call.kind) in ENTERING:
                call = replace(call, num_bytes=_entering_bytes(model, call.num_bytes))
            (layer if inside else ends)[call.phase] += _call_s(call, cluster, axes.tp)
    again_s = layer["forward"] if plan.recompute == "full" else 0.0
    return (
        LayerTime(layer["forward"], layer["backward"] + again_s),
        LayerTime(ends["forward"], ends["backward"]),
    )


def _entering_bytes(model: ModelSpec, num_bytes: int) -> int:
    """Return the bytes in front of the matrices of attention that are split, of those of hidden."""
    if (latent := model.latent) is None:
        return num_bytes
    width = (latent.q_rank or model.hidden) + latent.kv_rank + latent.rope_dim
    return num_bytes // model.hidden * width


def _call_s(call: CollectiveCall, cluster: Cluster, size: int) -> float:
    return cluster.collective_s(call.kind, call.num_bytes, size)


def context_s(
    model: ModelSpec, cluster: Cluster, plan: Plan, kind: LayerKind | None = None
) -> LayerTime:
    """Return the exposed seconds of ring attention in a layer: what its products do not hide.

    Keys and values go around the ring once forward; in backward they go around with their gradients
    in fp32. With a window they go all the way, too; its work counts as equal in all hops.

    Source: Liu et al. 2023 (Ring Attention), section 3; `context_parallel/cost.py`
    """
    p = plan.parallelism.cp
    if p == 1:
        return NO_TIME
    link = cluster.link(p, plan.parallelism.tp)
    both = zip(context_bytes(model, plan), attention_time(model, cluster, plan, kind), strict=True)
    return LayerTime(
        *(ring_exposed_s(link.time_s(size / (p - 1)), compute_s, p) for size, compute_s in both)
    )


def context_bytes(model: ModelSpec, plan: Plan) -> PassBytes:
    """Return the bytes that a rank of the ring sends for a layer of a micro-batch."""
    kv_heads = model.kv_heads // min(plan.parallelism.tp, model.kv_heads)
    sizes = AttentionSizes(
        batch=plan.micro_batch,
        seq=plan.seq,
        num_heads=kv_heads,  # those of queries stay
        kv_heads=kv_heads,
        head_dim=(model.kv_hidden // model.kv_heads + model.value_size) // 2,  # of keys and values
        number_bytes=4 if plan.precision == "fp32" else 2,
    )
    return ring_bytes(sizes, plan.parallelism.cp)


class StageWork(NamedTuple):
    """Computation and memory of a stage's ranks per micro-batch: the pace of its gradients.

    layer        seconds of one layer with its exposed messages
    backward_s   seconds of the whole stage's backward
    """

    stage: StageContents
    layer: LayerTime
    backward_s: float


class Replicas(NamedTuple):
    """Ranks that hold the same parameters, `stride` ranks apart, and how many parameters."""

    num_params: float
    size: int
    stride: int


def replicas(plan: Plan, num_params: float, expert_params: float) -> list[Replicas]:
    """Return the groups over which a rank's gradients are summed: experts have fewer replicas."""
    axes = plan.parallelism
    found = [Replicas(num_params - expert_params, axes.dp * axes.cp, axes.tp)]
    if expert_params:
        stride = axes.ep * axes.expert_tensor
        found.append(Replicas(expert_params, axes.expert_zero_ranks, stride))
    return [group for group in found if group.size > 1]


def gradients_s(model: ModelSpec, cluster: Cluster, plan: Plan, work: StageWork) -> float:
    """Return the exposed seconds of a step's communication between replicas or their shards.

    Experts and the other parameters have groups of their own; the first ones are sent after the
    others, and backward hides both in proportion to their bytes.
    """
    if plan.parallelism.zero == 3:
        return _sharded_s(model, cluster, plan, work)
    groups = replicas(plan, work.stage.num_params, work.stage.expert_params)
    total = sum(group.num_params for group in groups)
    each = (
        _replicas_s(cluster, plan, group, work.backward_s * (group.num_params / total))
        for group in groups
    )
    return sum(each, 0.0)


def _replicas_s(cluster: Cluster, plan: Plan, group: Replicas, backward_s: float) -> float:
    """Return the exposed seconds of the gradients of one group, without ZeRO-3."""
    software, zero = cluster.software, plan.parallelism.zero
    num_params, size, stride = group
    grad_bytes = num_params * max(software.recipe.grad_bytes, 4)
    kind = "reduce_scatter" if zero else "all_reduce"
    num_buckets = max(1.0, grad_bytes // software.bucket_bytes) if software.bucket_bytes else 1.0
    bucket_s = cluster.collective_s(kind, grad_bytes / num_buckets, size, stride)
    each_s = exposed_s(num_buckets, bucket_s, backward_s if software.overlaps else 0.0)
    sends = plan.num_micro_batches if zero == 2 else 1
    whole_s = 0.0
    if zero:
        weight_bytes = num_params * software.recipe.weight_bytes
        whole_s = cluster.collective_s("all_gather", weight_bytes, size, stride)
    return sends * each_s + whole_s


def exposed_s(num_buckets: float, bucket_s: float, backward_s: float) -> float:
    """Return what backward does not hide of equal buckets, of which the last is never hidden.

    It is `ddp.cost.equal_buckets_s` less the computation: (k-1) max(B/k, c) + c - (k-1) B/k.
    """
    ready_s = backward_s / num_buckets
    return (num_buckets - 1) * max(0.0, bucket_s - ready_s) + bucket_s


def _sharded_s(model: ModelSpec, cluster: Cluster, plan: Plan, work: StageWork) -> float:
    """Return the exposed seconds of FSDP: each layer is gathered while the one before computes.

    The first gather and the last reduction are always exposed. What is hidden slows computation,
    because it takes memory bandwidth and multiprocessors. Layers of several kinds count as their
    mean.
    """
    groups = replicas(plan, *_mean_params(model, plan))
    gather_s, reduce_s = (
        sum(cluster.collective_s(kind, size * one.num_params, *one[1:]) for one in groups)
        for kind, size in (("all_gather", 2), ("reduce_scatter", 4))
    )
    forward_s, backward_s = work.layer
    exposed = max(0.0, gather_s - forward_s) + max(0.0, gather_s + reduce_s - backward_s)
    hidden = min(gather_s, forward_s) + min(gather_s + reduce_s, backward_s)
    layer_s = exposed + cluster.software.contention * hidden
    return plan.num_micro_batches * (work.stage.num_layers * layer_s + gather_s + reduce_s)


def _mean_params(model: ModelSpec, plan: Plan) -> tuple[float, float]:
    """Return the mean parameters of a layer on a rank, and those of them that are experts."""
    kinds, total = layer_kinds(model), [0, 0]
    for kind, count in kinds.items():
        for n, params in enumerate(kind_params(model, kind, plan.parallelism)):
            total[n] += count * params
    every, experts = (params / model.num_layers for params in total)
    return every, experts
