"""Messages of expert parallelism: every token to its experts, and their results back.

The ranks of a stage are numbered tp innermost, then cp, then dp. Those that split one expert are
neighbors, the ranks that share the experts of a layer come next, and ranks that hold the same
experts are the farthest apart. So expert parallelism gets the nodes' inner links as far as it fits.
Notebook 12_planner.
"""

from typing import NamedTuple

from course_lib.core.layers import LayerKind
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import ModelSpec
from course_lib.expert_parallel.cost import level_bytes
from course_lib.planner.cluster import Cluster
from course_lib.planner.compute import NO_TIME, LayerTime, routed_tokens
from course_lib.planner.plan import Plan


class ExpertGroup(NamedTuple):
    """Ranks that share the experts of a layer, and how many of them are on one node."""

    ranks: int
    on_node: int


def expert_group(cluster: Cluster, axes: Parallelism) -> ExpertGroup:
    """Return the group of ranks that exchange tokens."""
    on_node = max(1, cluster.gpus_per_node // axes.expert_tensor)
    return ExpertGroup(axes.ep, min(axes.ep, on_node))


def exchange_s(cluster: Cluster, group: ExpertGroup, num_bytes: float, active: int) -> float:
    """Return the seconds of an all-to-all in which a rank's copies have `num_bytes` in all.

    The copies go to all ranks alike, those for other ranks of the node along its links and the
    others through the adapters, at the same time (`expert_parallel.cost.level_bytes`).
    """
    ranks, on_node = group
    if ranks == 1:
        return 0.0
    inside_bytes, outside_bytes = level_bytes(
        num_bytes, ranks, on_node, active, sends_once=cluster.software.sends_once
    )
    inside, outside = cluster.inside, cluster.outside
    inside_s = (on_node - 1) * inside.latency_s + inside_bytes / inside.bytes_per_s
    if ranks == on_node:
        return inside_s
    nodes = ranks / on_node
    sent_s = outside_bytes / (outside.bytes_per_s * cluster.gather_share)
    return max(inside_s, (nodes - 1) * outside.latency_s + sent_s)


def routed_s(
    model: ModelSpec, cluster: Cluster, plan: Plan, kind: LayerKind, layer: LayerTime
) -> LayerTime:
    """Return the exposed seconds of dispatch and combine in a layer, on the fullest rank.

    Two exchanges forward and two backward, in 16 bits, or 32 with fp32. Where several ranks split
    an expert, they gather each other's copies before it and sum their results after it. Full
    recomputation sends the forward's messages again.

    layer   its computation, behind which a program may hide them (`Software.hides_routing`)
    """
    experts, axes, software = model.experts, plan.parallelism, cluster.software
    if experts is None or not kind.routed:
        return NO_TIME
    copies = routed_tokens(model, plan, software.imbalance)
    num_bytes = copies * model.hidden * (4 if plan.precision == "fp32" else 2)
    once_s = exchange_s(cluster, expert_group(cluster, axes), num_bytes, experts.active)
    split = axes.expert_tensor
    gathered_s = sum(
        cluster.collective_s(name, num_bytes * split, split)
        for name in ("all_gather", "reduce_scatter")
    )
    forward_s = 2 * once_s + gathered_s
    again_s = forward_s if plan.recompute == "full" else 0.0
    sent = LayerTime(forward_s, forward_s + again_s)
    if not software.hides_routing:
        return sent
    return LayerTime(
        _behind(sent.forward_s, layer.forward_s, software.contention),
        _behind(sent.backward_s, layer.backward_s, software.contention),
    )


def _behind(sent_s: float, computed_s: float, contention: float) -> float:
    """Return what a message takes that runs while the rank computes for another micro-batch."""
    hidden_s = min(sent_s, computed_s)
    return sent_s - hidden_s + contention * hidden_s
