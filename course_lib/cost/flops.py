"""FLOP of a training step: its multiplications and additions, operation by operation.

A matrix product of [m, k] and [k, n] is 2mkn FLOP, and only matrix products are counted: norms,
softmax and dropout take time, but hardly any FLOP. For each product of the forward pass, the
backward pass has two: the gradient of each factor.

A causal mask makes half of the attention scores superfluous. There are two conventions: count all
scores (`causal=False`, the default here), as Megatron (Narayanan et al. 2021, appendix) and PaLM
(Chowdhery et al. 2022, appendix B) do, or half of them, which is what a causal kernel computes, as
FlashAttention-2 does (Dao 2023, section 4.1). Compare MFUs of one convention only.
Notebook 01b_speed.
"""

from course_lib.core.errors import CourseError
from course_lib.core.layers import LayerKind, layer_kinds, layers, matrices
from course_lib.core.specs import ModelSpec

EXPERTS = ("experts", "router")  # operations that only a model with experts has
RECOMPUTE = ("none", "selective", "full")


def forward_flop(spec: ModelSpec, batch: int, seq: int, *, causal: bool = False) -> dict[str, int]:
    """Return the FLOP of one forward pass by operation, all layers together.

    causal   count only the half of the scores that a causal kernel computes; False: all scores

    Experts count as often as a token is sent to one; layers with a window count its scores only.

    Source:  Narayanan et al. 2021 (Megatron-LM), appendix: 24Bsh² + 4Bs²h per layer, 2BshV
    """
    flop = dict.fromkeys(("attention projections", "attention scores", "mlp", *EXPERTS), 0)
    for kind, count in layer_kinds(spec).items():
        for name, one in layer_flop(spec, batch, seq, kind, causal=causal).items():
            flop[name] += count * one
    flop["logits"] = 2 * batch * seq * spec.hidden * spec.padded_vocab
    return flop if spec.experts else {k: v for k, v in flop.items() if k not in EXPERTS}


def layer_flop(
    spec: ModelSpec, batch: int, seq: int, kind: LayerKind, *, causal: bool = False
) -> dict[str, int]:
    """Return the FLOP of one forward pass of a layer of that kind, by operation."""
    heads = spec.num_heads * (spec.head_size + spec.value_size)  # q times k, weights times v
    pairs = score_pairs(seq, kind.window, spec.chunked, causal)
    flop = {"attention projections": 0, "attention scores": 2 * batch * heads * pairs}
    for one in matrices(spec, kind):
        name = "attention projections" if one.part == "attention" else one.part
        flop[name] = flop.get(name, 0) + 2 * batch * seq * one.inputs * one.outputs * one.active
    return flop


def layers_flop(spec: ModelSpec, batch: int, seq: int) -> list[int]:
    """Return the FLOP of one forward pass of each layer, first to last."""
    each = {kind: sum(layer_flop(spec, batch, seq, kind).values()) for kind in layer_kinds(spec)}
    return [each[kind] for kind in layers(spec)]


def score_pairs(
    seq: int, window: int | None = None, chunked: bool = False, causal: bool = False
) -> int:
    """Return the pairs of query and key of one sequence whose score counts.

    Without a window seq² of them, or half with causal=True. A sliding window leaves each query
    `window` keys; chunks of that size, of which the last may be shorter, leave it those of its own.
    """
    size = seq if window is None else min(window, seq)
    if chunked:
        whole, rest = divmod(seq, size)
        pairs = whole * size * size + rest * rest
        return pairs // 2 if causal else pairs
    return seq * size - size * size // 2 if causal else seq * size


def train_step_flop(
    spec: ModelSpec, batch: int, seq: int, *, recompute: str = "none", causal: bool = False
) -> int:
    """Return the FLOP of forward, backward and recomputation.

    recompute   "none", "selective" (the scores again) or "full" (the layers again, not the logits)

    Raises:  CourseError for another kind of recomputation
    Source:  Korthikanti et al. 2022, appendix A
    """
    forward = forward_flop(spec, batch, seq, causal=causal)
    return 3 * sum(forward.values()) + recompute_flop(forward, recompute)


def recompute_flop(forward: dict[str, int], recompute: str) -> int:
    """Return the FLOP that recomputation adds to a step whose forward pass has `forward`.

    Raises: CourseError for another kind than "none", "selective" or "full"
    """
    if recompute not in RECOMPUTE:
        raise CourseError(f"recompute: need one of {', '.join(RECOMPUTE)}; got {recompute!r}.")
    again = {
        "none": 0,
        "selective": forward["attention scores"],
        "full": sum(forward.values()) - forward["logits"],
    }
    return again[recompute]


def six_n_d(num_params: int, num_tokens: int) -> int:
    """Return 6 FLOP per parameter and token, the rule of thumb: 2 in forward, 4 in backward."""
    return 6 * num_params * num_tokens


def mfu(
    step_flop: float, step_time_s: float, peak_flop_per_s: float, *, world_size: int = 1
) -> float:
    """Return the model FLOP utilization: the share of the peak that the model's own FLOP used.

    step_flop          of the whole batch, without recomputation (with it, the share is called HFU)
    peak_flop_per_s    dense, of one device

    Raises: CourseError when a time or a peak is not above 0
    """
    if not (step_time_s > 0 and peak_flop_per_s > 0 and world_size > 0):
        raise CourseError(
            "mfu: need a step time, a peak and a world size above 0; got "
            f"{step_time_s}, {peak_flop_per_s} and {world_size}."
        )
    return step_flop / (step_time_s * peak_flop_per_s * world_size)
