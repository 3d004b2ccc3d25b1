"""Time of a layer on one rank: matrix products at the efficiency of their shape, and the rest.

A product is slower than the peak for three reasons: what large products reach at all, its depth,
and the last wave of tiles, which does not fill the device. Between the products, kernels read and
write activations at the speed of memory. All functions are for a layer of one kind; with experts,
the rank that gets most tokens sets the pace. Notebook 12_planner.
"""

import math
from itertools import groupby
from typing import NamedTuple

from course_lib.core.layers import LayerKind, WeightMatrix, layers, matrices
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import score_pairs
from course_lib.cost.hardware import Device
from course_lib.planner import constants as k
from course_lib.planner.cluster import Cluster
from course_lib.planner.plan import Plan


class Product(NamedTuple):
    """A matrix product [m, k] x [k, n] of a forward pass; its backward has two of the same FLOP.

    number   products of that size in one grouped kernel: those of the experts on a rank
    """

    m: int
    depth: int
    n: int
    number: int = 1


class LayerTime(NamedTuple):
    """Seconds of computation of one micro-batch: forward, and backward with recomputation."""

    forward_s: float
    backward_s: float


NO_TIME = LayerTime(0.0, 0.0)


def product_s(
    product: Product, device: Device, precision: str = "bf16", speed: float = 1.0
) -> float:
    """Return the seconds of a matrix product, or of a group of them, on a device.

    speed   of a program's products, relative to `REACHED`
    """
    m, depth, n, number = product
    peak = _reached(device, precision) * (k.FP8_SPEED if precision == "fp8" else 1) * speed
    shape = (1 + k.HALF_DEPTH / depth) * _wave_factor(product, device)
    streamed_s = 2 * number * (m * depth + depth * n + m * n) / (device.bytes_per_s * k.STREAMED)
    return max(2 * number * m * depth * n / peak * shape, streamed_s)


def _reached(device: Device, precision: str) -> float:
    """Return the FLOP/s that large products reach; fp8 only speeds up those with weights."""
    reached = k.REACHED.get(device.name, k.REACHED_ELSEWHERE)
    return device.peak("bf16" if precision == "fp8" else precision) * reached


def _wave_factor(product: Product, device: Device) -> float:
    """Return how much longer the tiles take than their numbers would: padding, and half a wave."""
    m, _, n, number = product
    rows, columns = k.TILE
    tiles = number * math.ceil(m / rows) * math.ceil(n / columns)
    processors = k.MULTIPROCESSORS.get(device.name, k.MULTIPROCESSORS_ELSEWHERE)
    return (tiles + processors / 2) * rows * columns / (number * m * n)


def trained_s(product: Product, cluster: Cluster, precision: str) -> LayerTime:
    """Return the seconds of a product and of its two gradients."""
    m, depth, n, number = product
    device, speed = cluster.device, cluster.software.products
    backward = (Product(m, n, depth, number), Product(depth, m, n, number))
    return LayerTime(
        product_s(product, device, precision, speed),
        sum(product_s(one, device, precision, speed) for one in backward),
    )


def layer_products(
    model: ModelSpec, plan: Plan, kind: LayerKind | None = None, load: float = 1.0
) -> list[Product]:
    """Return the products of a layer's forward on a rank, without those of attention's scores.

    Matrices with one input are one product: q, k and v; gate and up. Experts are one grouped
    product of each matrix. What tensor parallelism does not split (routers, the first products of
    latent attention) is computed for this rank's tokens under sequence parallelism, else for all.

    kind   None: of the model's last layer
    load   tokens of this rank's experts, relative to the mean of all ranks
    """
    axes = plan.parallelism
    tokens = plan.micro_batch * plan.seq // axes.cp
    own_tokens = tokens // (axes.tp if axes.sequence_parallel else 1)
    found = []
    for (part, inputs, split), fused in groupby(
        matrices(model, kind or layers(model)[-1]), lambda one: (one.part, one.inputs, one.split)
    ):
        some, ranks = list(fused), axes.expert_tensor if part == "experts" else axes.tp
        rows, number = tokens if split else own_tokens, 1
        if part == "experts":
            number = some[0].copies // axes.ep
            rows = math.ceil(routed_tokens(model, plan, load) * axes.expert_tensor / number)
        depth = inputs // ranks if split == "inputs" else inputs
        columns = sum(one.outputs // _ways(one, ranks) for one in some)
        found.append(Product(rows, depth, columns, number))
    return found


def large_products(model: ModelSpec, plan: Plan) -> list[Product]:
    """Return those of `layer_products` with 1 % of their FLOP or more: routers have less."""
    found = [(math.prod(one), one) for one in layer_products(model, plan)]
    least = sum(flop for flop, _ in found) / 100
    return [one for flop, one in found if flop >= least]


def _ways(one: WeightMatrix, ranks: int) -> int:
    """Return into how many parts the outputs of a matrix are split: fewer heads than ranks stay."""
    return min(ranks, one.pieces) if one.split == "outputs" else 1


def routed_tokens(model: ModelSpec, plan: Plan, load: float = 1.0) -> float:
    """Return the copies of tokens that a rank sends to experts: one for each that a token uses.

    load   relative to the mean of all ranks; a capacity takes its place
    """
    if model.experts is None:
        return 0.0
    axes = plan.parallelism
    tokens = plan.micro_batch * plan.seq // axes.cp / axes.tp
    return tokens * model.experts.active * (model.experts.capacity or load)


def layer_time(
    model: ModelSpec, cluster: Cluster, plan: Plan, kind: LayerKind | None = None
) -> LayerTime:
    """Return the seconds of one layer of one micro-batch on a rank, without communication.

    kind   None: of the model's last layer
    """
    kind = kind or layers(model)[-1]
    found = layer_products(model, plan, kind, cluster.software.imbalance)
    products = [trained_s(one, cluster, plan.precision) for one in found]
    scores = attention_time(model, cluster, plan, kind)
    between_s = _between_s(model, cluster, plan, kind)
    forward_s = sum(one.forward_s for one in products) + scores.forward_s + between_s
    backward_s = sum(one.backward_s for one in products) + scores.backward_s + 2 * between_s
    selective_s = scores.forward_s
    if plan.flash:
        selective_s = cluster.software.selective_share * forward_s
    again = {"none": 0.0, "selective": selective_s, "full": forward_s}
    return LayerTime(forward_s, backward_s + again[plan.recompute])


def attention_time(
    model: ModelSpec, cluster: Cluster, plan: Plan, kind: LayerKind | None = None
) -> LayerTime:
    """Return the seconds of attention's scores: half of them in a fused causal kernel, or all.

    A fused kernel computes only those of a window. Its backward has 5 products instead of 2
    forward, as it computes the scores again.

    Source: Dao et al. 2022 (FlashAttention), algorithm 4 (backward)
    """
    device, axes, kind = cluster.device, plan.parallelism, kind or layers(model)[-1]
    tokens = plan.micro_batch * plan.seq // axes.cp
    both = model.num_heads * (model.head_size + model.value_size)  # q times k, weights times v
    flop = 2 * tokens * plan.seq * both / axes.tp
    peak = _reached(device, plan.precision)
    if plan.flash:
        forward_s = flop * _seen_share(model, plan, kind) / (peak * cluster.software.attention)
        return LayerTime(forward_s, 2.5 * forward_s)
    scores = tokens * plan.seq * model.num_heads / axes.tp
    streamed_s = scores * k.BYTES_PER_SCORE / (device.bytes_per_s * k.STREAMED)
    forward_s = flop / (peak * k.BATCHED_PRODUCTS) + streamed_s
    return LayerTime(forward_s, 2 * forward_s)


def _seen_share(model: ModelSpec, plan: Plan, kind: LayerKind) -> float:
    """Return the part of all pairs of tokens that the mask leaves: half, or those of a window."""
    if kind.window is None or kind.window >= plan.seq:
        return 0.5
    return score_pairs(plan.seq, kind.window, model.chunked, causal=True) / plan.seq**2


def _between_s(model: ModelSpec, cluster: Cluster, plan: Plan, kind: LayerKind) -> float:
    """Return the seconds of norms, residual sums, activation and rotation in a layer's forward.

    With one fused kernel for each, a token's numbers are read or written twice per norm and six
    times for two sums, 2 or 3 times per MLP input, and twice per rotated or normed query and key,
    or vector of latent attention. With experts, also once for each step of `PERMUTED`.
    """
    axes, latent, experts = plan.parallelism, model.latent, model.experts
    tokens = plan.micro_batch * plan.seq // axes.cp
    passes = 3 if model.gated else 2
    routed = experts if kind.routed else None
    split = (routed.shared_hidden if routed else model.ffn_hidden) * passes
    touched = kind.rotary + (model.qk_norm != "none")
    split += 2 * (model.q_hidden + model.kv_hidden) * touched
    undivided = (6 + 2 * model.norms_per_layer) * model.hidden
    undivided += 2 * (latent.kv_rank + (latent.q_rank or 0)) if latent else 0
    whole = undivided / (axes.tp if axes.sequence_parallel else 1)
    numbers: float = tokens * (split / axes.tp + whole)
    if routed:
        wide = passes * routed.ffn_hidden + k.PERMUTED * model.hidden
        numbers += routed_tokens(model, plan, cluster.software.imbalance) * wide
    number_bytes = 4 if plan.precision == "fp32" else 2
    num_bytes = number_bytes * numbers * cluster.software.passes
    return num_bytes / (cluster.device.bytes_per_s * k.STREAMED)


def head_time(model: ModelSpec, cluster: Cluster, plan: Plan) -> LayerTime:
    """Return the seconds of the output projection and the loss, on the last stage's ranks."""
    axes, device = plan.parallelism, cluster.device
    tokens = plan.micro_batch * plan.seq // axes.cp
    projection = trained_s(
        Product(tokens, model.hidden, -(-model.padded_vocab // axes.tp)), cluster, plan.precision
    )
    num_bytes = tokens * model.padded_vocab / axes.tp * k.BYTES_PER_LOGIT
    streamed_s = num_bytes / (device.bytes_per_s * k.STREAMED)
    return LayerTime(
        projection.forward_s + streamed_s / 3, projection.backward_s + 2 * streamed_s / 3
    )


def optimizer_s(cluster: Cluster, num_params: float) -> float:
    """Return the seconds of AdamW on the parameters that a rank owns.

    It reads gradient, master and two moments, and writes all but the gradient, and the weight.
    """
    recipe = cluster.software.recipe
    touched = recipe.grad_bytes + 2 * (recipe.master_bytes + 2 * recipe.moment_bytes)
    touched += recipe.weight_bytes * (1 if recipe.master_bytes else 2)
    return num_params * touched / (cluster.device.bytes_per_s * k.STREAMED)
