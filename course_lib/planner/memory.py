"""Memory of a plan by kind on each stage, from the formulas of lessons 01, 08 and 09.

`course_lib.memory` counts what a layer saves and the bytes of parameters, gradients and optimizer
state; here are the micro-batches in flight, and the buffers. Only what a program's kernels save
(`Software.kernels`) and its gradient buckets were chosen by comparing with published runs. Notebook
12_planner.
"""

from functools import lru_cache
from typing import NamedTuple

from course_lib.core.parallelism import Parallelism
from course_lib.core.recipes import FP32
from course_lib.core.specs import ModelSpec
from course_lib.cost.params import layer_params, layers_on_stage, params_on_rank
from course_lib.memory.formulas import model_states
from course_lib.memory.layer_bytes import Kernels, Pass, total
from course_lib.pipeline.cost import one_f_one_b_in_flight
from course_lib.planner.constants import Software
from course_lib.planner.plan import Plan

MEMORY_KINDS = ("params", "grads", "optim_state", "activations", "buffers")


class SavedBytes(NamedTuple):
    """Bytes that one micro-batch saves for backward on a rank.

    layer       of one layer, until its backward
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
    axes: tuple[int, int, bool],
    micro_batch: int,
    seq: int,
    options: tuple[str, bool, int, Kernels],
) -> SavedBytes:
    """Return what a micro-batch saves, by `course_lib.memory.layer_bytes`.

    axes      tp, cp, sequence_parallel
    options   recompute, flash, bytes per number, kernels
    """
    tp, cp, sequence_parallel = axes
    recompute, flash, number_bytes, kernels = options
    one = Pass(
        spec=model,
        batch=micro_batch,
        seq=seq,
        number_bytes=number_bytes,
        flash=flash,
        kernels=kernels,
        parallelism=Parallelism(tp=tp, cp=cp, sequence_parallel=sequence_parallel),
    )
    kept = total(one.kept_layer(recompute))
    more = total(one.layer()) - kept
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
    layer, head = layer_params(model), model.vocab * model.hidden
    share = (model.num_layers * layer + head) / pp
    layers, stage = [0] * pp, 0
    for number in range(1, model.num_layers + 1):
        layers[stage] += 1
        if number * layer > share * (stage + 1):
            stage += 1
    return tuple(layers)


@lru_cache(maxsize=4096)
def stage_params(model: ModelSpec, tp: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the parameters that a rank of each stage computes with."""
    axes = Parallelism(tp=tp, pp=len(layers))
    one_layer = layer_params(model, axes)
    evenly = [params_on_rank(model, axes, stage) for stage in range(axes.pp)]
    return tuple(
        count + (layers[stage] - layers_on_stage(model, axes, stage)) * one_layer
        for stage, count in enumerate(evenly)
    )


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
    axes = plan.parallelism
    layers = stage_layers(model, axes.pp, software.balances_head)
    num_params = stage_params(model, axes.tp, layers)[stage]
    recipe = FP32 if plan.precision == "fp32" else software.recipe
    states = model_states(num_params, recipe, parallelism=axes)
    saved = saved_bytes(
        model,
        (axes.tp, axes.cp, axes.sequence_parallel),
        plan.micro_batch,
        plan.seq,
        (plan.recompute, plan.flash, recipe.activation_bytes, software.kernels),
    )
    held = in_flight(plan, stage)
    activations = held * layers[stage] * saved.layer + saved.recomputed
    activations += held * saved.embedding if stage == 0 else 0
    activations += saved.head if stage == axes.pp - 1 else 0
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
        table = model.vocab * model.hidden // axes.tp
        return max((2 * 2 + 4) * layer_params(model, axes), (2 + 4) * table)
    buckets = bool(software.bucket_bytes) and axes.zero_ranks > 1
    return num_params * software.recipe.weight_bytes * buckets


def plan_memory(model: ModelSpec, plan: Plan, software: Software) -> dict[str, int]:
    """Return the bytes by kind on the fullest rank: of the first stage, the last, or the largest.

    Stages between hold no more than the first one if they have no more layers.
    """
    stages = {0, plan.parallelism.pp - 1}
    layers = stage_layers(model, plan.parallelism.pp, software.balances_head)
    stages.add(layers.index(max(layers)))
    bills = [memory_on_stage(model, plan, software, stage) for stage in sorted(stages)]
    return max(bills, key=lambda bill: sum(bill.values()))
