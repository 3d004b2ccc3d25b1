"""Time of a layer on one rank: matrix products at the efficiency of their shape, and the rest.

A product is slower than the peak for three reasons: what large products reach at all, its depth,
and the last wave of tiles, which does not fill the device. Between the products, kernels read and
write activations at the speed of memory. Notebook 12_planner.
"""

import math
from typing import NamedTuple

from course_lib.core.specs import ModelSpec
from course_lib.cost.hardware import Device
from course_lib.planner import constants as k
from course_lib.planner.cluster import Cluster
from course_lib.planner.plan import Plan


class Product(NamedTuple):
    """A matrix product [m, k] x [k, n] of a forward pass; its backward has two of the same FLOP."""

    m: int
    depth: int
    n: int


class LayerTime(NamedTuple):
    """Seconds of computation of one micro-batch: forward, and backward with recomputation."""

    forward_s: float
    backward_s: float


def product_s(product: Product, device: Device, precision: str = "bf16") -> float:
    """Return the seconds of a matrix product on a device."""
    m, depth, n = product
    reached = k.REACHED.get(device.name, k.REACHED_ELSEWHERE)
    peak = device.peak("bf16" if precision == "fp8" else precision) * reached
    peak *= k.FP8_SPEED if precision == "fp8" else 1
    shape = (1 + k.HALF_DEPTH / depth) * _wave_factor(m, n, device)
    streamed_s = 2 * (m * depth + depth * n + m * n) / (device.bytes_per_s * k.STREAMED)
    return max(2 * m * depth * n / peak * shape, streamed_s)


def _wave_factor(m: int, n: int, device: Device) -> float:
    """Return how much longer the tiles take than their numbers would: padding, and half a wave."""
    rows, columns = k.TILE
    tiles = math.ceil(m / rows) * math.ceil(n / columns)
    processors = k.MULTIPROCESSORS.get(device.name, k.MULTIPROCESSORS_ELSEWHERE)
    return (tiles + processors / 2) * rows * columns / (m * n)


def trained_s(product: Product, device: Device, precision: str) -> LayerTime:
    """Return the seconds of a product and of its two gradients."""
    m, depth, n = product
    backward = (Product(m, n, depth), Product(depth, m, n))
    return LayerTime(
        product_s(product, device, precision),
        sum(product_s(one, device, precision) for one in backward),
    )


def layer_products(model: ModelSpec, plan: Plan) -> list[Product]:
    """Return the products of one layer's forward on a rank, without those of attention's scores."""
    tokens, tp = plan.micro_batch * plan.seq // plan.parallelism.cp, plan.parallelism.tp
    h, f = model.hidden, model.ffn_hidden
    return [
        Product(tokens, h, (h + 2 * model.kv_hidden) // tp),
        Product(tokens, h // tp, h),
        Product(tokens, h, (2 if model.gated else 1) * f // tp),
        Product(tokens, f // tp, h),
    ]


def layer_time(model: ModelSpec, cluster: Cluster, plan: Plan) -> LayerTime:
    """Return the seconds of one layer of one micro-batch on a rank, without communication."""
    device = cluster.device
    products = [trained_s(one, device, plan.precision) for one in layer_products(model, plan)]
    scores = attention_time(model, cluster, plan)
    between_s = _between_s(model, cluster, plan)
    forward_s = sum(one.forward_s for one in products) + scores.forward_s + between_s
    backward_s = sum(one.backward_s for one in products) + scores.backward_s + 2 * between_s
    selective_s = scores.forward_s
    if plan.flash:
        selective_s = cluster.software.selective_share * forward_s
    again = {"none": 0.0, "selective": selective_s, "full": forward_s}
    return LayerTime(forward_s, backward_s + again[plan.recompute])


def attention_time(model: ModelSpec, cluster: Cluster, plan: Plan) -> LayerTime:
    """Return the seconds of attention's scores: half of them in a fused causal kernel, or all.

    A fused backward has 5 products instead of 2 forward, as it computes the scores again.

    Source: Dao et al. 2022 (FlashAttention), algorithm 4 (backward)
    """
    device, axes = cluster.device, plan.parallelism
    tokens = plan.micro_batch * plan.seq // axes.cp
    flop = 4 * tokens * plan.seq * model.hidden / axes.tp
    reached = k.REACHED.get(device.name, k.REACHED_ELSEWHERE)
    peak = device.peak("bf16" if plan.precision == "fp8" else plan.precision) * reached
    if plan.flash:
        forward_s = flop / 2 / (peak * cluster.software.attention)
        return LayerTime(forward_s, 2.5 * forward_s)
    scores = tokens * plan.seq * model.num_heads / axes.tp
    streamed_s = scores * k.BYTES_PER_SCORE / (device.bytes_per_s * k.STREAMED)
    forward_s = flop / (peak * k.BATCHED_PRODUCTS) + streamed_s
    return LayerTime(forward_s, 2 * forward_s)


def _between_s(model: ModelSpec, cluster: Cluster, plan: Plan) -> float:
    """Return the seconds of norms, residual sums, activation and rotation in a layer's forward.

    With one fused kernel for each, a token's numbers are read or written 10 times per hidden (two
    norms, two sums), 2 or 3 times per MLP input, and twice per rotated query and key.
    """
    axes = plan.parallelism
    tokens = plan.micro_batch * plan.seq // axes.cp
    split = model.ffn_hidden * (3 if model.gated else 2)
    split += 2 * (model.hidden + model.kv_hidden) * (model.positions == "rope")
    whole = 10 * model.hidden / (axes.tp if axes.sequence_parallel else 1)
    number_bytes = 4 if plan.precision == "fp32" else 2
    num_bytes = tokens * number_bytes * (split / axes.tp + whole) * cluster.software.passes
    return num_bytes / (cluster.device.bytes_per_s * k.STREAMED)


def head_time(model: ModelSpec, cluster: Cluster, plan: Plan) -> LayerTime:
    """Return the seconds of the output projection and the loss, on the last stage's ranks."""
    axes, device = plan.parallelism, cluster.device
    tokens = plan.micro_batch * plan.seq // axes.cp
    projection = trained_s(
        Product(tokens, model.hidden, -(-model.vocab // axes.tp)), device, plan.precision
    )
    num_bytes = tokens * model.vocab / axes.tp * k.BYTES_PER_LOGIT
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
