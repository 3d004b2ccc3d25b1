"""A plan as the command line of a training program: course_lib.train, torchtitan or Megatron-LM.

A program that cannot train a plan says so in a sentence. course_lib.train is for learning: where it
lacks something that changes only memory or speed, it trains on the plan's mesh without it, and says
what differs. Notebook 12_planner.

Source: options of torchtitan v0.2.2, torchtitan/config/job_config.py, and of Megatron-LM
        core_v0.14.0, megatron/training/arguments.py
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.layers import layers
from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.planner.plan import Plan
from course_lib.planner.prediction import PredictedStep
from course_lib.train.config import TrainConfig
from course_lib.train.rules import ONE_BACKWARD

TORCHTITAN_FLAVORS = {"llama-8b": "8b", "llama-70b": "70b", "llama-405b": "405b"}
TORCHTITAN_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
}

MEGATRON_NORM_EPS = 1e-5  # its default
MEGATRON_SCALING = {  # of --use-rope-scaling; only the factor is an option
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class ProgramLaunch:
    """The launch of a plan by a program.

    name         of its files
    title        program and version whose options these are
    program      path of a file, or name of a module, that torchrun starts
    where        folder in which it is started
    environment  lines of shell before it
    differs      sentences: what it does otherwise than the plan
    comments     sentences about arguments that look wrong, and are not
    """

    name: str
    title: str
    program: str
    where: str
    arguments: tuple[str, ...]
    environment: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()


def course_train(step: PredictedStep) -> ProgramLaunch:
    """Return the arguments of `python -m course_lib.train`.

    Raises: CourseError for a plan that it cannot train
    """
    title = "course_lib.train"
    plan, axes = step.plan, step.plan.parallelism
    _check(title, "a model without experts", step.model.experts is None, step.model.name)
    _check(title, "bf16 or fp32", plan.precision in ("bf16", "fp32"), plan.precision)
    _check(title, "a model that is a preset", _is_preset(step), step.model.name)
    options = _train_options(step)
    config = TrainConfig(
        model=step.model,
        tp=axes.tp,
        pp=axes.pp,
        cp=axes.cp,
        sequence_parallel=axes.sequence_parallel,
        **options,
    )
    config.check_ranks(plan.world_size)
    mesh = f"pp={axes.pp},dp={axes.dp},{f'cp={axes.cp},' * (axes.cp > 1)}tp={axes.tp}"
    words = _flags({"model": step.model.name, "mesh": mesh, **options}, "-")
    return ProgramLaunch(
        name="course_train",
        title=title,
        program="course_lib.train",
        where="the course's folder",
        arguments=(*words, *["--sequence-parallel"] * axes.sequence_parallel),
        differs=tuple(_differences(plan, options)),
    )


def _train_options(step: PredictedStep) -> dict[str, Any]:
    """Return the settings of a `TrainConfig` without its mesh."""
    plan, axes = step.plan, step.plan.parallelism
    strategy = "ddp" if axes.zero_ranks > 1 else "single"
    if axes.zero and _shards(plan):
        strategy = "fsdp" if axes.zero == 3 else f"zero{axes.zero}"
    options: dict[str, Any] = {
        "strategy": strategy,
        "seq": plan.seq,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
    }
    if axes.pp > 1:
        options["schedule"] = plan.schedule
    if plan.schedule == "interleaved":
        options["model_chunks"] = plan.num_model_chunks
    if plan.precision == "bf16" and step.cluster.software.recipe.weight_bytes == 2:
        options["compute_dtype" if strategy == "fsdp" else "dtype"] = "bfloat16"
    return options


def _shards(plan: Plan) -> bool:
    """Return whether it has the plan's ZeRO stage with the plan's schedule."""
    possible = ONE_BACKWARD[:3] if plan.parallelism.zero == 2 else ONE_BACKWARD
    return plan.parallelism.zero == 1 or plan.parallelism.pp == 1 or plan.schedule in possible


def _differences(plan: Plan, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what course_lib.train does otherwise than the plan."""
    axes = plan.parallelism
    if axes.zero and not _shards(plan):
        used = options["strategy"]
        yield f"It has ZeRO stage {axes.zero} not with {plan.schedule}, so it uses {used}."
    if plan.recompute != "none":
        yield "It does not recompute: it keeps all activations."
    if "dtype" in options:
        yield "Its weights and optimizer state are in bf16, too, without fp32 masters."


def torchtitan(step: PredictedStep) -> ProgramLaunch:
    """Return the options of torchtitan v0.2.2.

    Raises: CourseError for a plan that it cannot train
    """
    title = "torchtitan v0.2.2"
    plan, axes = step.plan, step.plan.parallelism
    flavor = _is_preset(step) and TORCHTITAN_FLAVORS.get(step.model.name)
    schedules = ", ".join(TORCHTITAN_SCHEDULES)
    works = axes.zero >= 2 or (axes.zero == 0 and axes.dp in (1, axes.world_size))
    need = "ZeRO stage 2 or 3, or stage 0 with dp=1 or no axis but dp"
    _check(title, f"one of {', '.join(TORCHTITAN_FLAVORS)}", flavor, step.model.name)
    _check(title, f"one of {schedules}", plan.schedule in TORCHTITAN_SCHEDULES, plan.schedule)
    _check(title, "bf16 or fp32", plan.precision in ("bf16", "fp32"), plan.precision)
    _check(title, "tp with sequence parallelism", axes.tp == 1 or axes.sequence_parallel, "none")
    _check(title, need, works, f"stage {axes.zero} and dp={axes.dp}")
    config_file = f"torchtitan/models/llama3/train_configs/llama3_{flavor}.toml"
    stages = _torchtitan_stages(title, step) if axes.pp > 1 else {}
    return ProgramLaunch(
        name="torchtitan",
        title=title,
        program="torchtitan.train",
        where="torchtitan's folder",
        arguments=_flags({"job.config_file": config_file, **_torchtitan_options(plan), **stages}),
    )


def _torchtitan_options(plan: Plan) -> dict[str, object]:
    axes = plan.parallelism
    share = plan.micro_batch * plan.num_micro_batches
    return {
        "training.seq_len": plan.seq,
        "training.local_batch_size": share if axes.pp > 1 else plan.micro_batch,
        "training.global_batch_size": plan.global_batch,
        "training.mixed_precision_param": "bfloat16" if plan.precision == "bf16" else "float32",
        "parallelism.data_parallel_replicate_degree": 1 if axes.zero else axes.dp,
        "parallelism.data_parallel_shard_degree": axes.dp if axes.zero else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if axes.zero == 3 else "never",
        "parallelism.tensor_parallel_degree": axes.tp,
        "parallelism.context_parallel_degree": axes.cp,
        "parallelism.pipeline_parallel_degree": axes.pp,
        "activation_checkpoint.mode": plan.recompute,
        "activation_checkpoint.selective_ac_option": "op",
    }


def _torchtitan_stages(title: str, step: PredictedStep) -> dict[str, object]:
    return {
        "parallelism.pipeline_parallel_schedule": TORCHTITAN_SCHEDULES[step.plan.schedule],
        "parallelism.pipeline_parallel_microbatch_size": step.plan.micro_batch,
        "parallelism.pipeline_parallel_layers_per_stage": _layers_per_chunk(title, step),
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    }


def megatron_lm(step: PredictedStep) -> ProgramLaunch:
    """Return the options of Megatron-LM core_v0.14.0, with mock data.

    Raises: CourseError for a plan that it cannot train
    """
    title = "Megatron-LM core_v0.14.0"
    plan, axes = step.plan, step.plan.parallelism
    _check(title, "1f1b or interleaved", plan.schedule in ("1f1b", "interleaved"), plan.schedule)
    _check(title, "ZeRO stage 0 or 1", axes.zero <= 1, f"stage {axes.zero}")
    _check_megatron_model(title, step.model)
    options: dict[str, object] = {
        "tensor-model-parallel-size": axes.tp,
        "pipeline-model-parallel-size": axes.pp,
        "context-parallel-size": axes.cp,
        "sequence-parallel": axes.sequence_parallel,
        "use-distributed-optimizer": axes.zero == 1,
        "overlap-grad-reduce": step.cluster.software.overlaps,
        "micro-batch-size": plan.micro_batch,
        "global-batch-size": plan.global_batch,
        "bf16": plan.precision in ("bf16", "fp8"),
        "fp16": plan.precision == "fp16",
        "attention-backend": "flash" if plan.flash else "unfused",
        **_megatron_model(step),
        **_megatron_experts(step),
        **_megatron_extras(plan, _layers_per_chunk(title, step)),
        **{"mock-data": True, "tokenizer-type": "NullTokenizer", "train-iters": 100, "lr": 1e-4},
    }
    return ProgramLaunch(
        name="megatron_lm",
        title=title,
        program="pretrain_gpt.py",
        where="Megatron-LM's folder",
        arguments=_flags(options),
        environment=("export CUDA_DEVICE_MAX_CONNECTIONS=1",),  # it insists, with tp or cp
        comments=(
            f"--vocab-size {step.model.vocab - 1}: the null tokenizer adds one token, the end of "
            f"a document, which makes the {step.model.vocab:,} of the model.",
        ),
    )


def _megatron_extras(plan: Plan, num_layers: int) -> dict[str, object]:
    """Return the options for model chunks of that many layers, recomputation and fp8, if any."""
    options: dict[str, object] = {}
    if plan.num_model_chunks > 1:
        options["num-layers-per-virtual-pipeline-stage"] = num_layers
    if plan.precision == "fp8":
        options["fp8-format"] = "hybrid"
    if plan.recompute != "none":
        options["recompute-granularity"] = plan.recompute
    if plan.recompute == "full":
        options |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    return options


def _megatron_model(step: PredictedStep) -> Mapping[str, object]:
    """Return the options for the sizes of the model; the null tokenizer adds one token."""
    model, seq = step.model, step.plan.seq
    is_grouped = model.kv_heads < model.num_heads
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn_hidden,
        "num-attention-heads": model.num_heads,
        "group-query-attention": is_grouped,
        **({"num-query-groups": model.kv_heads} if is_grouped else {}),
        "seq-length": seq,
        "max-position-embeddings": max(seq, model.max_seq),
        "position-embedding-type": "rope" if model.positions == "rope" else "learned_absolute",
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "swiglu": model.gated,
        "disable-bias-linear": not model.has_bias("out"),
        "untie-embeddings-and-output-weights": not model.tied,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "vocab-size": model.vocab - 1,
    }


def _check_megatron_model(title: str, model: ModelSpec) -> None:
    """Raise CourseError for a model with a part that these options do not describe."""
    experts, places = model.experts, [model.has_bias(part) for part in ("out", "mlp")]
    parts = {
        "a window": model.window is not None,
        "capped scores or logits": bool(model.attention_softcap or model.logit_softcap),
        "sinks": model.sinks,
        "attention beside the MLP": model.parallel,
        f"{model.norms_per_layer} norms a layer": model.norms_per_layer != 2,
        "norms of all queries at once": model.qk_norm == "whole",
        "layers without positions": model.positions == "none" or bool(model.nope_layers),
        f"the activation {model.activation}": model.activation != "default",
        "biases in one part only": places[0] != places[1],
        "biases of experts or their router": bool(
            experts and (experts.bias or experts.router_bias)
        ),
        "gated shared experts": bool(experts and experts.shared_gate),
        "a scaled rope that is not Llama 3's": bool(model.rope.scaling)
        and _llama3_factor(model) is None,
        **dict.fromkeys(model.extras, True),
    }
    strange = [part for part, has in parts.items() if has]
    _check(title, "a model that its options describe", not strange, ", ".join(strange))


def _megatron_experts(step: PredictedStep) -> Mapping[str, object]:
    """Return the options for what a GPT or Llama of the usual kind has not: heads, MLA, experts."""
    model, axes = step.model, step.plan.parallelism
    latent, experts, rope = model.latent, model.experts, model.rope
    options: dict[str, object] = {
        "add-qkv-bias": model.has_bias("qkv") and not model.has_bias("out"),
        "qk-layernorm": model.qk_norm == "head" or latent is not None,  # of its vectors
    }
    if model.positions == "rope" and rope.theta != 10000.0:
        options["rotary-base"] = int(rope.theta)
    if model.positions == "rope" and rope.share != 1.0:
        options["rotary-percent"] = rope.share
    if factor := _llama3_factor(model):
        options |= {"use-rope-scaling": True, "rope-scaling-factor": factor}
    if model.norm_eps != MEGATRON_NORM_EPS:
        options["norm-epsilon"] = model.norm_eps
    if model.head_dim is not None:
        options["kv-channels"] = model.head_dim
    if latent is not None:
        options |= {"multi-latent-attention": True, "rope-type": "rope"}  # its default is YaRN
        options |= {"q-lora-rank": latent.q_rank} if latent.q_rank else {}
        options |= {"kv-lora-rank": latent.kv_rank, "qk-head-dim": latent.nope_dim}
        options |= {"qk-pos-emb-head-dim": latent.rope_dim, "v-head-dim": latent.value_dim}
    if experts is None:
        return options
    sends_once = step.cluster.software.sends_once
    routed = [int(kind.routed) for kind in layers(model)]
    options |= {
        "num-experts": experts.count,
        "moe-router-topk": experts.active,
        "moe-ffn-hidden-size": experts.ffn_hidden,
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": 1e-2,
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "flex" if sends_once else "alltoall",
        "moe-enable-deepep": sends_once,
        "expert-model-parallel-size": axes.ep,
        "expert-tensor-parallel-size": axes.expert_tensor,
    }
    if not all(routed):
        options["moe-layer-freq"] = str(routed).replace(" ", "")
    if experts.shared_hidden:
        options["moe-shared-expert-intermediate-size"] = experts.shared_hidden
    if experts.capacity is not None:
        options["moe-expert-capacity-factor"] = experts.capacity
        options["moe-pad-expert-input-to-capacity"] = True
    return options


def _llama3_factor(model: ModelSpec) -> float | None:
    """Return the factor of Llama 3's scaled rope; None for another rule, or other numbers."""
    scaling = dict(model.rope.scaling)
    factor = scaling.pop("factor", None)
    fits = scaling == MEGATRON_SCALING and model.positions == "rope" and model.latent is None
    return float(factor) if fits and isinstance(factor, int | float) else None


def _layers_per_chunk(title: str, step: PredictedStep) -> int:
    """Return the layers of a stage, or of a model chunk. Raises: CourseError if they are unequal"""
    each, rest = divmod(
        step.model.num_layers, step.plan.parallelism.pp * step.plan.num_model_chunks
    )
    got = f"{step.model.num_layers} layers and {step.plan}"
    _check(title, "stages of equally many layers", rest == 0, got)
    return each


def _is_preset(step: PredictedStep) -> bool:
    return MODELS.get(step.model.name) == step.model


def _check(title: str, need: str, holds: object, got: str) -> None:
    if not holds:
        raise CourseError(f"{title}: need {need}; got {got}.")


def _flags(options: Mapping[str, object], joint: str = "_") -> tuple[str, ...]:
    """Return options as words: `--name value`, `--name` for True, nothing for False."""
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            words.append(f"--{name.replace('_', joint)}")
            words += [] if value is True else [str(value)]
    return tuple(words)


PROGRAMS: Mapping[str, Callable[[PredictedStep], ProgramLaunch]] = {
    "course_train": course_train,
    "torchtitan": torchtitan,
    "megatron_lm": megatron_lm,
}
