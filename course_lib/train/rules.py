"""Rules for the options of a run; each broken one is reported in a sentence.

`dp = ranks / (tp * pp * cp)` is the number of copies of the model, each trained by the others.
`config` is a TrainConfig, which applies these rules when it is created.
"""

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.core.built import check_built
from course_lib.core.errors import CourseError, MeshError, ShapeError
from course_lib.core.layers import layers

COMPUTE_DTYPES = ("bfloat16",)
OVER_EXPERTS = ("single", "naive-dp", "ddp", "fsdp", "zero")  # how their names begin
WHOLE = ("single", "naive-dp", "ddp", "torch-ddp")  # strategies that copy the model
ONE_BACKWARD = ("naive", "gpipe", "1f1b", "interleaved")  # schedules that do not split it


def one_of(name: str, word: str, words: Sequence[str]) -> None:
    """Check that the word is one of the words. Raises: CourseError"""
    if word not in words:
        near = difflib.get_close_matches(word.lower(), words, n=1)
        hint = f" Try {near[0]}." if near else ""
        option = name.replace("_", "-")
        raise CourseError(f"--{option}: need one of {', '.join(words)}; got {word!r}.{hint}")


def among(words: Sequence[str]) -> Callable[[str, str | None], None]:
    """Return the check of a setting that is one of the words, or None."""
    return lambda name, word: None if word is None else one_of(name, word, words)


def above_0(name: str, number: float | None) -> None:
    """Check that the number is above 0; None passes. Raises: CourseError"""
    if number is not None and not number > 0:
        raise CourseError(f"--{name.replace('_', '-')}: need more than 0; got {number}.")


def not_below_0(name: str, number: float) -> None:
    """Check that the number is 0 or more. Raises: CourseError"""
    if not number >= 0:
        raise CourseError(f"--{name.replace('_', '-')}: need 0 or more; got {number}.")


def check_rules(config: Any) -> None:
    """Check what the settings need of each other. Raises: CourseError, MeshError or ShapeError"""
    if config.seed >= 2**63:
        raise CourseError(f"--seed: need a number below 2**63; got {config.seed}.")
    if config.dropout >= 1:
        raise CourseError(f"--dropout: need a probability below 1; got {config.dropout}.")
    if config.seq > config.model.max_seq:
        raise ShapeError(
            f"--seq: need at most the {config.model.max_seq} tokens of model {config.model.name}; "
            f"got {config.seq}. Try --seq {config.model.max_seq}."
        )
    if config.out is None and (config.save_every or config.resume):
        raise CourseError("--save-every, --resume: need a folder. Try --out runs/NAME.")
    check_built(config.model, "--model")
    _check_tensors(config)
    _check_stages(config)
    _check_context(config)
    _check_experts(config)
    _check_strategy(config)
    profiled_steps(config)


def profiled_steps(config: Any) -> range:
    """Return the steps that `--profile` names, counted from 0: "3", or "3-5" with both ends.

    Raises: CourseError for another text, for steps beyond the run's, and without a folder
    """
    if config.profile is None:
        return range(0)
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", config.profile)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
    num_steps = sys.maxsize if config.epochs else config.steps  # the data set's size sets it
    if not first <= last < num_steps:
        raise CourseError(
            f"--profile: need steps of the run, counted from 0, such as 3 or 3-5; got "
            f"{config.profile!r} of {config.steps} steps. Try --profile {min(2, num_steps - 1)}."
        )
    if config.out is None:
        raise CourseError("--profile: need a folder for the traces. Try --out runs/NAME.")
    return range(first, last + 1)


def check_profiled_steps(config: Any, first: int) -> None:
    """Check that a run which resumes at step `first` does one of the steps that `--profile` names.

    Raises: CourseError where all of them are done
    """
    steps = profiled_steps(config)
    if not steps or steps[-1] >= first:
        return
    later = f"--profile {first}" if first < config.steps else "it without --profile"
    raise CourseError(
        f"--profile: need a step that is not done, {first} or later, as --resume continues at step "
        f"{first}; got {config.profile}. Try {later}."
    )


def _check_tensors(config: Any) -> None:
    model, tp = config.model, config.tp
    possible = {
        "num_heads of model {} divisible by tp": lambda n: model.num_heads % n == 0,
        "kv_heads of model {} as a multiple or a divisor of tp": lambda n: (
            model.kv_heads % n == 0 or n % model.kv_heads == 0
        ),
    }
    for need, fits in possible.items():
        if not fits(tp):
            heads = model.num_heads if need.startswith("num") else model.kv_heads
            most = max(n for n in range(1, tp) if all(one(n) for one in possible.values()))
            raise MeshError(
                f"--mesh: need {need.format(model.name)}, as a head stays whole; got {heads} and "
                f"{tp}. Try tp={most}."
            )
    if not config.sequence_parallel:
        return
    if tp == 1:
        raise MeshError("--sequence-parallel: need tp of 2 or more; got 1. Try --mesh tp=2.")
    if config.seq % (split := tp * config.cp):
        raise ShapeError(
            f"--sequence-parallel: need --seq divisible by tp * cp; got {config.seq} and {split}. "
            f"Try --seq {max(config.seq - config.seq % split, split)}."
        )


def _check_stages(config: Any) -> None:
    pp, chunks, layers = config.pp, config.num_model_chunks, config.model.num_layers
    if config.schedule and pp == 1:
        raise MeshError(
            f"--schedule {config.schedule}: need two or more pipeline stages; got pp=1. "
            "Try --mesh pp=2."
        )
    if (config.model_chunks or 1) > 1 and config.schedule != "interleaved":
        raise MeshError(
            f"--model-chunks: need --schedule interleaved; got {config.model_chunks} chunks and "
            f"{config.schedule or 'no stages'}. Try --mesh pp=2 --schedule interleaved."
        )
    if config.recompute and config.schedule not in (None, *ONE_BACKWARD):
        raise CourseError(
            f"--recompute: need --schedule {' or '.join(ONE_BACKWARD)}, as a backward in two parts "
            f"would compute everything twice; got {config.schedule}. Try --schedule 1f1b."
        )
    if pp * chunks > layers:
        raise MeshError(
            f"--mesh, --model-chunks: need pp * model chunks of at most the {layers} layers of "
            f"model {config.model.name}; got {pp} * {chunks}. Try --layers {pp * chunks}."
        )


def _check_context(config: Any) -> None:
    """Check that the ranks of cp can share sequences and, of Ulysses, heads."""
    model, cp, tp = config.model, config.cp, config.tp
    if cp == 1:
        return
    if config.masked or config.uses_framework:
        name = f"--model {model.name}" if config.masked else f"--strategy {config.strategy}"
        attempt = "--model tiny" if config.masked else "--strategy fsdp"
        raise MeshError(
            f"{name}: need cp=1, as it attends to the tokens of its own rank only; got cp={cp}. "
            f"Try {attempt}."
        )
    if config.seq < cp:
        raise ShapeError(
            f"--mesh: need a token of every sequence for each rank of cp; got --seq {config.seq} "
            f"and cp={cp}. Try --seq {cp}."
        )
    heads, kv_heads = model.num_heads // tp, max(model.kv_heads // tp, 1)
    if config.cp_form == "ulysses" and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        raise MeshError(
            f"--cp-form ulysses: need the heads of a rank divisible by cp, and those of keys and "
            f"values by cp or cp by them; got {heads}, {kv_heads} and cp={cp}. Try --cp-form ring."
        )
    windows = [layer.window for layer in layers(model) if layer.window]
    if windows and config.seq > min(windows):
        raise MeshError(
            f"--model {model.name}: need --seq of at most its window of {min(windows)} tokens with "
            f"cp; got {config.seq}. Try --seq {min(windows)}, or cp=1."
        )


def _check_experts(config: Any) -> None:
    """Check what experts cannot be together with."""
    model, name, ep = config.model, config.strategy, config.ep
    needs = {
        "--mesh: need ep=1 for a dense model": ep > 1 and model.experts is None,
        "--aux-weight, --bias-step: need 0 for a dense model": (
            (config.aux_weight or config.bias_step) and model.experts is None
        ),
    }
    if model.experts is not None:
        needs |= {
            f"--mesh: need the {model.experts.count} experts divisible by ep": (
                model.experts.count % ep
            ),
            f"--strategy {name}: need ep=1, as it knows no experts that fewer ranks hold": (
                ep > 1 and not name.startswith(OVER_EXPERTS)
            ),
            "--strategy megatron: need a dense model": name == "megatron",
            "--optimizer muon: need ep=1": config.optimizer == "muon" and ep > 1,
            "--bias-step: need a router of sigmoids": (
                config.bias_step and model.experts.router != "sigmoid"
            ),
        }
    for need, is_broken in needs.items():
        if is_broken:
            raise CourseError(
                f"{need}; got model {model.name} and ep={ep}. Try --model moe-tiny --strategy ddp."
            )


def _check_strategy(config: Any) -> None:
    name = config.strategy
    if name == "torch-ddp" and config.pp > 1:
        raise MeshError(
            "--strategy torch-ddp: need pp=1, as it sends gradients with the first backward "
            f"after its own forward; got pp={config.pp}. Try --strategy ddp."
        )
    whole_layers = config.uses_framework and name != "megatron"
    if (whole_layers or name == "torch-fsdp") and config.tp * config.pp > 1:
        raise MeshError(
            f"--strategy {name}: need tp=1 and pp=1, as it shards whole layers; got "
            f"{config.tp} and {config.pp}. Try --strategy fsdp."
        )
    if config.pp > 1:
        _check_sharded_stages(config)
    if not config.reshard and name not in ("fsdp", "torch-fsdp"):
        raise CourseError(_need("--no-reshard", "fsdp or torch-fsdp", name))
    if config.compute_dtype and name != "fsdp":
        raise CourseError(_need("--compute-dtype", "fsdp", name))
    _check_optimizer(config)
    if config.async_save and config.checkpoint_format != "course":
        raise CourseError(
            f"--async-save: need --checkpoint-format course; got {config.checkpoint_format}. "
            "Try it without --async-save."
        )
    if config.uses_framework:
        _check_framework(config)
    if config.eval_only and not (config.init or config.resume):
        raise CourseError(
            "--eval-only: need a trained model; got neither --init nor --resume. Try --init FOLDER."
        )
    if config.stop_at_loss and not config.eval_every:
        raise CourseError(
            f"--stop-at-loss: need validation losses; got {config.stop_at_loss} without them. "
            "Try --eval-every 50."
        )
    _check_data(config)


def _check_optimizer(config: Any) -> None:
    name = config.strategy
    if config.optimizer == "muon" and (name not in WHOLE or config.tp > 1):
        got = f"tp={config.tp}" if config.tp > 1 else f"--strategy {name}"
        raise CourseError(
            "--optimizer muon: need ranks that hold whole matrices, as a step is a product of them "
            f"with themselves; got {got}. Try --strategy ddp, with dp and pp."
        )
    if config.momentum and (config.optimizer == "adamw" or config.momentum >= 1):
        raise CourseError(
            f"--momentum: need --optimizer sgd or muon, and a number below 1; got "
            f"{config.optimizer} and {config.momentum}. Try --optimizer sgd --momentum 0.9."
        )


def _check_sharded_stages(config: Any) -> None:
    """Check that what shards in backward can do so in the order of a pipeline's schedule."""
    name, schedule = config.strategy, config.schedule
    if name.startswith("zero3"):
        raise MeshError(
            f"--strategy {name}: need pp=1, as it gathers for one forward and its backward, and a "
            f"pipeline has several micro-batches in between; got pp={config.pp}. Try --strategy "
            "fsdp."
        )
    one_by_one = {"zero2": ONE_BACKWARD[:3], "fsdp": ONE_BACKWARD}
    possible = one_by_one.get(name.removesuffix("-offload"))
    if possible and schedule not in possible:
        why = "all gradients of a rank" if name != "fsdp" else "a block's gradients"
        raise MeshError(
            f"--strategy {name}: need --schedule {' or '.join(possible)}, in which one backward "
            f"computes {why}; got {schedule}. Try --schedule 1f1b, or --strategy zero1."
        )


def _check_framework(config: Any) -> None:
    name = config.strategy
    if "deepspeed" in name and config.dtype != "float32":
        raise CourseError(
            f"--dtype: need float32 with {name}, as it reduces gradients in float32; "
            f"got {config.dtype}."
        )
    given = {
        "--async-save": config.async_save,
        "--checkpoint-format": config.checkpoint_format != "course",
        "--record-values": config.record_values,
    }
    if name == "megatron":
        given |= {"--clip-norm": config.clip_norm, "--eval-every": config.eval_every}
        given["--eval-only"] = config.eval_only
    if option := next((option for option, value in given.items() if value), ""):
        raise CourseError(
            f"{option}: need a strategy of the course or of PyTorch; got {name}. "
            "Try --strategy fsdp."
        )
    if name == "megatron":
        _check_megatron(config)
    if name == "accelerate-deepspeed" and config.micro_batch:
        raise CourseError(
            "--micro-batch: need a strategy whose step is separate from backward; got "
            "accelerate-deepspeed. Try --strategy deepspeed-3."
        )


def _check_megatron(config: Any) -> None:
    wanted = {
        "--dtype": (config.dtype, ("float32", "float64")),
        "--dropout": (config.dropout, (0,)),
        "--schedule": (config.schedule, (None, "1f1b", "interleaved")),
        "--recompute": (config.recompute, (None,)),
    }
    for option, (given, possible) in wanted.items():
        if given not in possible:
            raise CourseError(
                f"{option}: need {' or '.join(map(str, filter(None, possible))) or 'none'} with "
                f"megatron; got {given}. Try it without {option}."
            )
    if config.masked:
        raise CourseError(
            f"--model {config.model.name}: need a GPT with megatron; got a BERT. Try --model tiny."
        )


def _check_data(config: Any) -> None:
    if config.masked and config.tp * config.pp > 1:
        raise MeshError(
            f"--model {config.model.name}: need tp=1 and pp=1 for a BERT; got {config.tp} and "
            f"{config.pp}. Try --strategy fsdp."
        )
    if config.data == "dialogues" and not config.masked:
        raise CourseError(
            "--data dialogues: need a BERT, which predicts masked tokens; got the GPT "
            f"{config.model.name}. Try --model bert-tiny."
        )
    if config.epochs and config.data == "synthetic":
        raise CourseError(
            "--epochs: need a data set of finite size; got synthetic data. Try --data shakespeare."
        )


def _need(option: str, names: str, name: str) -> str:
    return f"{option}: need --strategy {names}; got {name}. Try it without {option}."
