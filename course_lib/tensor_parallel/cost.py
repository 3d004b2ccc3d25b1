"""Communication of tensor parallelism: every collective of a step, in program order.

A parallel region costs one all_reduce of [batch, seq, hidden] in forward and one in backward, or an
all_gather and a reduce_scatter instead of each; with the ring the bytes sent are the same. In the
plain version the communication is fully exposed, because the next matrix multiplication needs its
result; `overlap_saves_s` counts what `overlap=True` hides of it. Notebook 07_tensor_parallel.
"""

from dataclasses import dataclass

from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.layers import vectors
from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import train_step_flop
from course_lib.cost.params import norm_params, param_parts
from course_lib.cost.published import rows
from course_lib.cost.traffic import CollectiveCall, sent_bytes


def tensor_traffic(
    spec: ModelSpec,
    batch: int,
    seq: int,
    number_bytes: int = 2,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    gathers_again: bool = False,
) -> list[CollectiveCall]:
    """Return the collectives of one step in the order in which each rank calls them.

    `num_bytes` is the size of the whole tensor, as in `Event.num_bytes`, whatever the number of
    ranks. All parameters are trained, and the logits stay split. The phase is forward, backward or
    finish (`finish_gradients`).

    tp              ranks: more than there are heads of keys and values share them, and sum the
                    gradients of their matrices in the end
    gathers_again   with sequence parallelism: as Megatron and `parallelize(..., overlap=True)`,
                    which save only this rank's tokens of each region's input and gather the others
                    once more in backward: 5/4 of the bytes of activations; `gathered_bytes` counts
                    the memory that this saves

    Raises:  ShapeError for an empty batch or sequence; CourseError for a model with experts, latent
             attention, or norms of all heads at once, which `parallelize` does not split
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4
    """
    if min(batch, seq, number_bytes) < 1:
        raise ShapeError(
            "tensor_traffic: need batch, seq and number_bytes above 0; got "
            f"{batch, seq, number_bytes}."
        )
    numbers = finished_params(spec, tp, sequence_parallel=sequence_parallel)
    finish = [_call("finish", "norms", "all_reduce", numbers * number_bytes)] * bool(numbers)
    regions = region_traffic(
        spec,
        batch,
        seq,
        number_bytes,
        sequence_parallel=sequence_parallel,
        gathers_again=gathers_again,
    )
    return regions + finish


def region_traffic(
    spec: ModelSpec,
    batch: int,
    seq: int,
    number_bytes: int = 2,
    *,
    sequence_parallel: bool = False,
    gathers_again: bool = False,
) -> list[CollectiveCall]:
    """Return the collectives of `tensor_traffic` but the last one: those of parallel regions.

    Each is as large as the residual stream, as for attention and an MLP that `parallelize` splits.
    """
    residual_bytes = batch * seq * spec.hidden * number_bytes
    enter = "all_gather" if sequence_parallel else ""
    leave = "reduce_scatter" if sequence_parallel else "all_reduce"
    adjoints = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "": "all_reduce"}
    parts = [part for n in range(spec.num_layers) for part in (f"attention {n}", f"mlp {n}")]
    boundaries = [("embedding", leave)]
    boundaries += [(part, kind) for part in parts for kind in (enter, leave)]
    boundaries += [("head", enter)]
    forward = [_call("forward", part, kind, residual_bytes) for part, kind in boundaries if kind]
    loss = [_call("forward", "loss", "all_reduce", n * _loss_bytes(batch * seq, number_bytes))
            for n in (1, 2)]  # fmt: skip
    reverse = []
    for part, kind in reversed(boundaries):
        again = gathers_again and kind == "all_gather"
        reverse += [(part, "all_gather")] * again + [(part, adjoints.get(kind, ""))]
    backward = [_call("backward", part, kind, residual_bytes) for part, kind in reverse if kind]
    return [*forward, *loss, *backward]


def overlap_saves_s(backward_weight_s: float, all_reduce_s: float) -> float:
    """Return the seconds that an all_reduce behind a weight gradient saves: the shorter of the two.

    Without overlap the two take their sum, with it the longer one. This is for the all_reduce of
    the input gradients of one region; the sums of the forward pass stay exposed.
    """
    return min(backward_weight_s, all_reduce_s)


def break_even_hidden(p: float, flop_per_s: float, bytes_per_s: float, seq: int = 0) -> float:
    """Return the hidden size below which a layer communicates longer than it computes.

    A layer with an MLP of 4 * hidden computes 72 hidden² + 12 seq hidden FLOP per token, forward
    and backward, divided by p. Its four all_reduces in bf16 send 16 hidden (p-1)/p bytes per token.
    So with a hidden size h, it computes 9/2 (h + seq/6) / (p-1) FLOP per byte sent, however many
    tokens there are, and the two times are equal where that is flop_per_s / bytes_per_s.

    seq   0: without the attention scores, which only add computation

    Source:  derived here; the FLOP are those of Narayanan et al. 2021, appendix
    """
    return 2 / 9 * (p - 1) * flop_per_s / bytes_per_s - seq / 6


def replicated_params(spec: ModelSpec) -> int:
    """Return the number of parameters that each rank holds whole.

    These are norms, learned positions, and the biases of row-parallel layers.

    Raises: CourseError as `tensor_traffic`
    """
    _check_split(spec)
    whole = sum(one.size for one in vectors(spec) if one.pieces == 1)
    biases = spec.hidden * (spec.has_bias("out") + spec.has_bias("mlp"))
    ends = norm_params(spec) + param_parts(spec)["positions"]
    return spec.num_layers * (whole + biases) + ends


def finished_params(
    spec: ModelSpec, tp: int, *, sequence_parallel: bool = False, num_layers: int | None = None
) -> int:
    """Return the numbers that `finish_gradients` sums: those of which each rank has a part.

    With sequence parallelism all replicated ones, else the norms of queries and keys; and of heads
    of keys and values that several ranks hold the whole matrices with their biases.

    num_layers   on this stage of a pipeline; None: the model has one

    Raises: CourseError as `tensor_traffic`
    """
    _check_split(spec)
    layers = spec.num_layers if num_layers is None else num_layers
    shared = 2 * spec.kv_hidden * (spec.hidden + spec.has_bias("qkv")) * (tp > spec.kv_heads)
    if sequence_parallel:
        return replicated_params(spec) + layers * shared
    return layers * (shared + 2 * spec.head_size * (spec.qk_norm == "head"))


def _check_split(spec: ModelSpec) -> None:
    """Raise CourseError for a model whose layers `parallelize` does not split."""
    others = {
        "experts": spec.experts is not None,
        "latent attention": spec.latent is not None,
        "norms of all heads at once": spec.qk_norm == "whole",
    }
    if strange := [part for part, has in others.items() if has]:
        raise CourseError(
            f"tensor_traffic: need a model of attention and MLP, which parallelize splits; "
            f"{spec.name} has {' and '.join(strange)}. Try course_lib.planner."
        )


def _loss_bytes(tokens: int, number_bytes: int) -> int:
    """Return the bytes of one number per token, in fp32 or wider."""
    return tokens * max(4, number_bytes)


def gathered_bytes(spec: ModelSpec, batch: int, seq: int, tp: int, number_bytes: int = 2) -> int:
    """Return the extra bytes a rank saves for backward because it gathers each input only once.

    This is for sequence parallelism. `memory/layer_bytes.py` counts as the paper does: a rank saves
    its own tokens of each matrix's input, and backward gathers them again, with one more all_gather
    per region. Without overlap the layers here save the gathered input instead.

    Source:  Korthikanti et al. 2022, section 4
    """
    input_bytes = batch * seq * spec.hidden * number_bytes
    return (2 * spec.num_layers + 1) * (input_bytes - input_bytes // tp)


def kept_layer_bytes(spec: ModelSpec, batch: int, seq: int, p: float, whole: float) -> float:
    """Return the bytes that a layer of a GPT keeps for backward on each of p ranks.

    With dropout, and scores that are kept: sbh (whole + (34 - whole + 5as/h) / p) at 2 bytes a
    number.

    whole   what each rank keeps undivided, in units of batch * seq * hidden: 10 with tensor
            parallelism; with sequence parallelism 4, or 0 if backward gathers inputs again

    Source:  Korthikanti et al. 2022, equations 1 to 4
    """
    split = 34 - whole + 5 * spec.num_heads * seq / spec.hidden
    return batch * seq * spec.hidden * (whole + split / p)


# --- beside real GPUs

H100_RUN = "Ultra-Scale Playbook (Tazi et al. 2025), 3B model, H100, 8 GPUs per node"


@dataclass(frozen=True, kw_only=True)
class H100Scaling:
    """Tokens/s per GPU of a 3B model on `ranks` H100: published, and by formula.

    flop_per_s         speed of a GPU's computation, fitted so that the formula is right at p = 2
    sequence_parallel  published tokens/s per GPU with sequence parallelism
    """

    ranks: list[int]
    published: list[float]
    formula: list[float]
    sequence_parallel: list[float]
    flop_per_s: float

    def kept(self, p: int, more: int) -> tuple[float, float]:
        """Return which part of its tokens/s a GPU keeps on `more` ranks: published, by formula."""
        before, after = self.ranks.index(p), self.ranks.index(more)
        published, formula = self.published, self.formula
        return published[after] / published[before], formula[after] / formula[before]


def h100_scaling(seq: int = 4096) -> H100Scaling:
    """Compute the formula beside the published runs, each with the largest batch that fits.

    A step takes compute / p and the bytes of all its collectives divided by the bandwidth that was
    measured for an all_reduce over so many nodes; nothing overlaps. The model's sizes are those of
    Llama-3B.

    Source:  Ultra-Scale Playbook, figures tp_scaling, tp_sp_scaling and pp_comm_bandwidth
    """
    tokens, batches = (_series("tp_scaling", name) for name in ("Tokens/sec/GPU", "Max Batch Size"))
    bandwidth = _series("pp_comm_bandwidth", "AllReduce GB/s (mean)")
    spec = MODELS["llama-3b"]

    def communicate_s(p: int) -> float:
        sent = sent_bytes(tensor_traffic(spec, round(batches[p]), seq), p)
        return sent / (1e9 * bandwidth[max(1, p // 8)])

    def flop(p: int) -> float:
        return train_step_flop(spec, round(batches[p]), seq) / p

    def tokens_of(p: int) -> float:
        return batches[p] * seq / p

    first = min(tokens)
    flop_per_s = flop(first) / (tokens_of(first) / tokens[first] - communicate_s(first))
    return H100Scaling(
        ranks=list(tokens),
        published=list(tokens.values()),
        formula=[tokens_of(p) / (flop(p) / flop_per_s + communicate_s(p)) for p in tokens],
        sequence_parallel=list(_series("tp_sp_scaling", "Tokens/sec/GPU").values()),
        flop_per_s=flop_per_s,
    )


def megatron_widths() -> dict[str, tuple[int, int]]:
    """Return by model (TP degree, hidden size) of four of NVIDIA's published H100 runs.

    Those of its split models whose rows ship with the course; they reach 42 to 49 % of the peak.

    Source:  NVIDIA Megatron-LM, README of July 2024: weak scaling, 4096 tokens per sequence
    """
    return {
        row["model"]: (int(row["tp"]), int(row["hidden"]))
        for row in rows("megatron_sc21")
        if row["table"] == "Megatron-Core H100 2024 weak scaling" and int(row["tp"]) > 1
    }


def _series(figure: str, name: str) -> dict[int, float]:
    """Return x and value of one series of a published figure."""
    return {
        int(row["x"]): float(row["value"])
        for row in rows("ultrascale_figures")
        if row["figure"].split()[0] == figure and row["series"] == name
    }


def _call(phase: str, part: str, kind: str, num_bytes: int) -> CollectiveCall:
    return CollectiveCall(phase=phase, part=part, kind=kind, num_bytes=num_bytes)
