"""The layers of a model and their weights: the one list that all counting reads.

Parameters, FLOP, saved activations, the planner and the conversion of checkpoints follow from the
rows here: what a matrix is called, its sizes, and which side tensor parallelism may split.
Notebook 01_memory.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from course_lib.core.specs import Experts, LatentAttention, ModelSpec


class LayerKind(NamedTuple):
    """A kind of layer: what the layers of one model may differ in.

    window   tokens that a token attends to; None: all
    routed   experts in place of the MLP
    rotary   queries and keys have rotary positions
    """

    window: int | None = None
    routed: bool = False
    rotary: bool = False


class WeightMatrix(NamedTuple):
    """Linear layer [inputs] -> [outputs] of a layer.

    part     "attention", "mlp", "router" or "experts"
    split    the side that tensor parallelism splits: "outputs", "inputs" or "" (each rank has all)
    pieces   what cannot be split on that side: its heads, or single columns of an MLP
    bias     it has a bias; behind split inputs, every rank has all of it
    copies   experts that have such a matrix
    active   of which a token uses that many
    """

    name: str
    part: str
    inputs: int
    outputs: int
    split: str = ""
    pieces: int = 1
    bias: bool = False
    copies: int = 1
    active: int = 1


class WeightVector(NamedTuple):
    """Weights of a layer that are no matrix: norms, sinks.

    pieces   heads over which tensor parallelism splits it; 1: each rank has all
    """

    name: str
    part: str
    size: int
    pieces: int = 1


@lru_cache(maxsize=1024)
def layers(spec: ModelSpec) -> tuple[LayerKind, ...]:
    """Return the kind of each layer, first to last."""
    windowed = range(spec.num_layers) if spec.window_layers is None else set(spec.window_layers)
    dense = set(spec.experts.dense_layers) if spec.experts else range(spec.num_layers)
    return tuple(
        LayerKind(
            window=spec.window if n in windowed else None,
            routed=n not in dense,
            rotary=spec.positions == "rope" and n not in spec.nope_layers,
        )
        for n in range(spec.num_layers)
    )


@lru_cache(maxsize=4096)
def layer_kinds(spec: ModelSpec) -> dict[LayerKind, int]:
    """Return how many layers of each kind there are."""
    return dict(Counter(layers(spec)))


@lru_cache(maxsize=4096)
def matrices(spec: ModelSpec, layer: LayerKind) -> tuple[WeightMatrix, ...]:
    """Return the matrices of a layer of that kind, in the order in which they are used."""
    attention = _heads(spec) if spec.latent is None else _latent(spec, spec.latent)
    if layer.routed and spec.experts is not None:
        return (*attention, *_experts(spec, spec.experts))
    return (*attention, *_mlp(spec, "", "mlp", spec.ffn_hidden, spec.has_bias("mlp")))


def _heads(spec: ModelSpec) -> list[WeightMatrix]:
    h, kv, bias = spec.hidden, spec.kv_heads, spec.has_bias("qkv")
    out = WeightMatrix("out", "attention", spec.mixed_hidden, h, "inputs", spec.num_heads)
    return [
        WeightMatrix("q", "attention", h, spec.q_hidden, "outputs", spec.num_heads, bias),
        WeightMatrix("k", "attention", h, spec.kv_hidden, "outputs", kv, bias),
        WeightMatrix("v", "attention", h, spec.kv_heads * spec.value_size, "outputs", kv, bias),
        out._replace(bias=spec.has_bias("out")),
    ]


def _latent(spec: ModelSpec, latent: LatentAttention) -> list[WeightMatrix]:
    h, heads, bias = spec.hidden, spec.num_heads, spec.has_bias("qkv")
    queries = [WeightMatrix("q", "attention", h, spec.q_hidden, "outputs", heads)]
    if latent.q_rank is not None:
        queries = [
            WeightMatrix("q_down", "attention", h, latent.q_rank, bias=bias),
            WeightMatrix("q_up", "attention", latent.q_rank, spec.q_hidden, "outputs", heads),
        ]
    both = heads * (latent.nope_dim + latent.value_dim)
    return [
        *queries,
        WeightMatrix("kv_down", "attention", h, latent.kv_rank + latent.rope_dim, bias=bias),
        WeightMatrix("kv_up", "attention", latent.kv_rank, both, "outputs", heads),
        WeightMatrix(
            *("out", "attention", spec.mixed_hidden, h, "inputs", heads), spec.has_bias("out")
        ),
    ]


def _mlp(spec: ModelSpec, before: str, part: str, wide: int, bias: bool) -> list[WeightMatrix]:
    """Return the two or three matrices of an MLP whose names begin with `before`."""
    names = ("gate", "up") if spec.gated else ("up",)
    into = [
        WeightMatrix(before + name, part, spec.hidden, wide, "outputs", wide, bias)
        for name in names
    ]
    return [*into, WeightMatrix(before + "down", part, wide, spec.hidden, "inputs", wide, bias)]


def _experts(spec: ModelSpec, experts: Experts) -> list[WeightMatrix]:
    router = WeightMatrix("router", "router", spec.hidden, experts.count, bias=experts.router_bias)
    routed = [
        one._replace(copies=experts.count, active=experts.active)
        for one in _mlp(spec, "expert ", "experts", experts.ffn_hidden, experts.bias)
    ]
    if not experts.shared_hidden:
        return [router, *routed]
    gate = [WeightMatrix("shared gate of the sum", "router", spec.hidden, 1)] * experts.shared_gate
    shared = _mlp(spec, "shared ", "mlp", experts.shared_hidden, spec.has_bias("mlp"))
    return [router, *routed, *gate, *shared]


def weights(spec: ModelSpec, layer: LayerKind) -> tuple[WeightMatrix | WeightVector, ...]:
    """Return all weights of a layer of that kind."""
    return (*matrices(spec, layer), *vectors(spec))


@lru_cache(maxsize=4096)
def vectors(spec: ModelSpec) -> tuple[WeightVector, ...]:
    """Return the weights of a layer that are no matrices: of its norms, and its sinks."""
    found = [
        one._replace(name=f"norm {n} {one.name}")
        for n in range(spec.norms_per_layer)
        for one in norm_vectors(spec)
    ]
    if spec.qk_norm == "head":
        found += [WeightVector(f"{name} norm", "norms", spec.head_size) for name in "qk"]
    if spec.qk_norm == "whole":
        found += [
            WeightVector("q norm", "norms", spec.q_hidden, spec.num_heads),
            WeightVector("k norm", "norms", spec.kv_hidden, spec.kv_heads),
        ]
    if spec.latent is not None:
        found += [WeightVector("q norm", "norms", spec.latent.q_rank)] if spec.latent.q_rank else []
        found += [WeightVector("kv norm", "norms", spec.latent.kv_rank)]
    if spec.sinks:
        found.append(WeightVector("sinks", "attention", spec.num_heads, spec.num_heads))
    return tuple(found)


def norm_vectors(spec: ModelSpec) -> tuple[WeightVector, ...]:
    """Return the weights of one norm over hidden."""
    bias = spec.norm == "layer" and spec.has_bias("norm")
    return tuple(
        WeightVector(name, "norms", spec.hidden) for name in ("weight", "bias")[: 1 + bias]
    )
