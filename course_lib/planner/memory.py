"""Memory of a plan by kind on each stage, from the formulas of lessons 01, 08 and 09.

`course_lib.memory` counts what a layer saves and the bytes of parameters, gradients and optimizer
state; here are the micro-batches in flight, and the buffers. Only what a program's kernels save
(`Software.kernels`) and its gradient buckets were chosen by comparing with published runs. Layers
of several kinds count each on its stage; experts count with as many tokens as the mean, because
another rank has most of them in each layer. Notebook 12_planner.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from course_lib.core.layers import LayerKind, layer_kinds, layers
from course_lib.core.parallelism import Parallelism
from course_lib.core.recipes import FP32
from course_lib.core.specs import ModelSpec
from course_lib.cost.params import (
    kind_params,
    layer_params,
    layers_on_stage,
    params_on_rank,
    stage_kinds,
)
from course_lib.memory.formulas import model_states
from course_lib.memory.layer_bytes import Kernels, Pass, total
from course_lib.pipeline.cost import one_f_one_b_in_flight
from course_lib.planner.constants import Software
from course_lib.planner.plan import Plan

MEMORY_KINDS = ("params", "grads", "optim_state", "activations", "buffers")


class SavedBytes(NamedTuple):
    """Bytes that one micro-batch saves for backward on a rank.

    layer       of one layer of the kind, until its backward
    recomputed  more, while that backward runs
    embedding   on the first stage
    head        on the last stage, for one micro-batch at a time
    """

    layer: int
    recomputed: int
    embedding: int
    head: int


@lru_cache(maxsize=4096)
def saved_bytes(
    model: ModelSpec,
    axes: tuple[int, int, bool, int],
    micro_batch: int,
    seq: int,
    options: tuple[str, bool, int, Kernels],
    kind: LayerKind | None = None,
) -> SavedBytes:
    """Return what a micro-batch saves, by `course_lib.memory.layer_bytes`.

    axes      tp, cp, sequence_parallel, ranks that split an expert
    options   recompute, flash, bytes per number, kernels
    kind      None: of the model's last layer
    """
    tp, cp, sequence_parallel, expert_tp = axes
    recompute, flash, number_bytes, kernels = options
    one = Pass(
        spec=model,
        batch=micro_batch,
        seq=seq,
        number_bytes=number_bytes,
        flash=flash,
        kernels=kernels,
        parallelism=Parallelism(
            dp=expert_tp,
            tp=tp,
            cp=cp,
            sequence_parallel=sequence_parallel,
            expert_tp=expert_tp,
        ),
    )
    kept = total(one.kept_layer(recompute, kind))
    more = total(one.layer(kind)) - kept
    return SavedBytes(kept, more, total(one.embedding()), total(one.head()))


@lru_cache(maxsize=4096)
def stage_layers(model: ModelSpec, pp: int, balances_head: bool) -> tuple[int, ...]:
    """Return the layers of each stage: evenly divided, or with the output layer counted.

    Then a stage ends with the layer that takes it past its share of the multiplied parameters, so
    the last one may have the output layer alone.

    Source: github huggingface/nanotron@6771639 src/nanotron/models/base.py, build_model
    """
    if not balances_head or pp == 1:
        axes = Parallelism(pp=pp)
        return tuple(layers_on_stage(model, axes, stage) for stage in range(pp))
    layer, head = layer_params(model), model.padded_vocab * model.hidden
    share = (model.num_layers * layer + head) / pp
    layers, stage = [0] * pp, 0
    for number in range(1, model.num_layers + 1):
        layers[stage] += 1
        if number * layer > share * (stage + 1):
            stage += 1
    return tuple(layers)


class StageContents(NamedTuple):
    """Layers of a stage: how many, of each kind, and the parameters that a rank computes with.

    expert_params   those of num_params that are experts
    """

    num_layers: int
    kinds: tuple[tuple[LayerKind, int], ...]
    num_params: int
    expert_params: int


def stages_of(model: ModelSpec, plan: Plan, balances_head: bool) -> tuple[StageContents, ...]:
    """Return the stages of a plan."""
    axes = plan.parallelism
    sizes = axes.pp, axes.tp, axes.ep, axes.expert_tensor
    chunks = (plan.num_model_chunks, plan.schedule == "zb-v")
    return _stages_of(model, sizes, balances_head, *(chunks if model.experts else (1, False)))


@lru_cache(maxsize=16384)
def _stages_of(
    model: ModelSpec,
    sizes: tuple[int, int, int, int],
    balances_head: bool,
    chunks: int,
    turns: bool,
) -> tuple[StageContents, ...]:
    pp, tp, ep, expert_tp = sizes
    axes = Parallelism(dp=ep * expert_tp, tp=tp, pp=pp, ep=ep, expert_tp=expert_tp)
    counts = stage_layers(model, pp, balances_head)
    held = {kind: kind_params(model, kind, axes) for kind in layer_kinds(model)}
    found = []
    for stage, kinds in enumerate(_kinds_on_stages(model, counts, chunks, turns)):
        every, experts = (sum(held[kind][n] * count for kind, count in kinds) for n in (0, 1))
        ends = _end_params(model, axes, stage)
        found.append(StageContents(counts[stage], kinds, every + ends, experts))
    return tuple(found)


def _kinds_on_stages(
    model: ModelSpec, counts: tuple[int, ...], chunks: int, turns: bool
) -> list[tuple[tuple[LayerKind, int], ...]]:
    """Return the kinds of the layers on each stage, with their numbers.

    Model chunks are dealt in turn, or there and back (zb-v), where equal ones divide the layers.
    """
    pp, every = len(counts), layers(model)
    order, sizes = list(range(pp)), list(counts)
    if chunks > 1 and len(every) % (pp * chunks) == 0:
        order = [pp - 1 - n % pp if turns and n >= pp else n % pp for n in range(pp * chunks)]
        sizes = [len(every) // (pp * chunks)] * (pp * chunks)
    stages: list[list[LayerKind]] = [[] for _ in counts]
    first = 0
    for stage, number in zip(order, sizes, strict=True):
        stages[stage] += every[first : first + number]
        first += number
    return [tuple(Counter(kinds).items()) for kinds in stages]


def _end_params(model: ModelSpec, axes: Parallelism, stage: int) -> int:
    """Return the parameters of a stage besides its layers: tables, positions and last norm."""
    evenly = stage_kinds(model, axes, stage)
    inner = sum(kind_params(model, kind, axes)[0] for kind in evenly)
    return params_on_rank(model, axes, stage) - inner


def in_flight(plan: Plan, stage: int) -> float:
    """Return the micro-batches whose activations a stage holds at once.

    Source: Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, equation 7; ZB-H2, twice
    as many: Qi et al. 2024, section 2.2
    """
    pp, m, chunks = plan.parallelism.pp, plan.num_micro_batches, plan.num_model_chunks
    if plan.schedule == "gpipe":
        return m
    if plan.schedule == "interleaved":
        return min(m, pp - stage + (pp - 1) / chunks)
    if plan.schedule in ("zb-h1", "zb-v"):
        return min(m, pp)
    if plan.schedule == "zb-h2":
        return min(m, 2 * pp - 1)
    return one_f_one_b_in_flight(pp, m, stage)


def memory_on_stage(
    model: ModelSpec, plan: Plan, software: Software, stage: int = 0
) -> dict[str, int]:
    """Return the bytes by kind that a rank of a stage holds at its peak."""
    return _bill(model, plan, software, stages_of(model, plan, software.balances_head), stage)


def _bill(
    model: ModelSpec, plan: Plan, software: Software, stages: tuple[StageContents, ...], stage: int
) -> dict[str, int]:
    axes, (_, kinds, num_params, expert_params) = plan.parallelism, stages[stage]
    recipe = FP32 if plan.precision == "fp32" else software.recipe
    states = model_states(num_params, recipe, parallelism=axes, expert_params=expert_params)
    options = plan.recompute, plan.flash, recipe.activation_bytes, software.kernels
    passed = axes.tp, axes.cp, axes.sequence_parallel, axes.expert_tensor
    saved = [
        (count, saved_bytes(model, passed, plan.micro_batch, plan.seq, options, kind))
        for kind, count in kinds or ((layers(model)[-1], 0),)
    ]
    held = in_flight(plan, stage)
    activations = sum(held * count * one.layer for count, one in saved)
    activations += max(one.recomputed for _, one in saved)
    activations += held * saved[0][1].embedding if stage == 0 else 0
    activations += saved[0][1].head if stage == axes.pp - 1 else 0
    return {
        **states,
        "activations": int(activations),
        "buffers": _buffers(model, axes, num_params, software),
    }


def _buffers(model: ModelSpec, axes: Parallelism, num_params: int, software: Software) -> int:
    """Return the bytes of messages: gathered parameters, and gradients on their way.

    ZeRO-3 and FSDP: two layers are gathered in 16 bits, one in use and one ahead, and one layer's
    gradients wait in fp32; the embedding or the output layer alone may be larger. Else the buckets
    of DistributedDataParallel, as large as the gradients of backward.
    """
    if axes.zero == 3:
        table = model.padded_vocab * model.hidden // axes.tp
        return max((2 * 2 + 4) * layer_params(model, axes), (2 + 4) * table)
    buckets = bool(software.bucket_bytes) and axes.zero_ranks > 1
    return num_params * software.recipe.weight_bytes * buckets


def plan_memory(model: ModelSpec, plan: Plan, software: Software) -> dict[str, int]:
    """Return the bytes by kind on the fullest rank: of the first stage, the last, or the largest.

    Of equal stages the first holds most, and the one with the embedding no less than the next.
    """
    stages = stages_of(model, plan, software.balances_head)
    counts, last = [stage.num_layers for stage in stages], len(stages) - 1
    asked = {0, last, counts.index(max(counts))}
    if len(layer_kinds(model)) > 1:
        asked |= {stages.index(stage) for stage in set(stages)}
    bills = [_bill(model, plan, software, stages, stage) for stage in sorted(asked)]
    return max(bills, key=lambda bill: sum(bill.values()))
