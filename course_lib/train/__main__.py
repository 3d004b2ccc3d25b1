"""Train a GPT or a BERT: `python -m course_lib.train --help`, also under torchrun.

This file holds the command line only; `trainer.py` has the training loop.
"""

import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import typer

from course_lib.core.errors import CourseError
from course_lib.core.presets import ENCODERS, find_model
from course_lib.core.specs import ModelSpec, read_config
from course_lib.train import options as o
from course_lib.train.config import TrainConfig, one_of, positive
from course_lib.train.launcher import (
    BAD_INPUT,
    CTRL_C,
    FAILED,
    LATE_S,
    BadInputError,
    run_ranks,
    work,
    world_size_from_torchrun,
)
from course_lib.train.strategies import STRATEGIES

COMMAND = "python -m course_lib.train"
SEQ = 64  # tokens in a sequence, if the model takes so many

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exit code 2: what was asked for cannot be trained; 1: the training failed; 130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    app(args=arguments, obj=arguments, prog_name=COMMAND)


@app.command()
def train(
    context: typer.Context,
    strategy: o.StrategyOption = None,
    ranks: o.RanksOption = None,
    model: o.ModelOption = "tiny",
    layers: o.Layers = None,
    hidden: o.Hidden = None,
    heads: o.Heads = None,
    vocab: o.Vocab = None,
    data: o.Data = "synthetic",
    steps: o.StepsOption = None,
    epochs: o.Epochs = None,
    global_batch: o.GlobalBatch = 16,
    micro_batch: o.MicroBatch = None,
    tp: o.Tp = 1,
    sequence_parallel: o.SequenceParallel = False,
    pp: o.Pp = 1,
    schedule: o.ScheduleOption = None,
    model_chunks: o.ModelChunks = None,
    seq: o.Seq = None,
    optimizer: o.Optimizer = "adamw",
    lr: o.Lr = None,
    warmup: o.Warmup = 0,
    momentum: o.Momentum = None,
    clip_norm: o.ClipNorm = None,
    dropout: o.DropoutOption = 0.0,
    dtype: o.Dtype = "float32",
    compute_dtype: o.ComputeDtype = None,
    reshard: o.Reshard = True,
    seed: o.Seed = 0,
    bucket_mib: o.BucketMib = 25.0,
    every: o.Every = 10,
    out: o.OutOption = None,
    save_every: o.SaveEvery = 0,
    resume: o.Resume = False,
) -> None:
    """Train a GPT or a BERT, on one rank or on many, ranks = dp * pp * tp: the losses are the same.

    \b
    python -m course_lib.train
    python -m course_lib.train --ranks 2 --strategy ddp --out runs/ddp
    python -m course_lib.train --ranks 4 --tp 2 --sequence-parallel
    python -m course_lib.train --ranks 4 --pp 2 --schedule zb-h1 --micro-batch 1
    python -m course_lib.train --ranks 2 --strategy fsdp --data shakespeare --model gpt2-char
    python -m course_lib.train --ranks 2 --strategy zero3 --data dialogues --model bert-tiny
    python -m course_lib.train --ranks 2 --steps 5000 --out runs/long --save-every 100
    python -m course_lib.train --ranks 2 --steps 5000 --out runs/long --save-every 100 --resume
    torchrun --nproc-per-node 4 -m course_lib.train --strategy torch-ddp
    """
    raise typer.Exit(run(context.params, context.obj))


def run(options: dict[str, Any], arguments: Sequence[str]) -> int:
    """Train with these options of the command line; return the exit code."""
    try:
        config, num_ranks = configure(dict(options))
    except CourseError as error:
        return _refuse(str(error))
    try:
        if num_ranks == 1 or world_size_from_torchrun():
            work(config)
            return 0
        code = run_ranks(num_ranks, arguments)
    except KeyboardInterrupt:
        code = CTRL_C
        _say("Stopped.")
    except BadInputError as error:
        return _refuse(str(error))
    except CourseError as error:
        code = FAILED
        _say(str(error))
    except Exception:
        code = FAILED
        traceback.print_exc()
    if code not in (0, BAD_INPUT):
        _say_how_to_go_on(config, arguments)
    return code


def configure(options: dict[str, Any]) -> tuple[TrainConfig, int]:
    """Return the run that the options ask for, and the number of ranks.

    Raises: CourseError for what cannot be trained
    """
    started, wanted = world_size_from_torchrun(), options.pop("ranks")
    positive("ranks", wanted)
    if started and wanted not in (None, started):
        raise CourseError(f"--ranks: need the {started} ranks that torchrun started; got {wanted}.")
    one_copy = options["tp"] * options["pp"]
    num_ranks = started or wanted or max(one_copy, 1)
    if options["vocab"] and options["data"] != "synthetic":
        raise CourseError(
            f"--vocab: need synthetic data, a text has its own characters; got --data "
            f"{options['data']}. Try it without --vocab."
        )
    if options["steps"] and options["epochs"]:
        raise CourseError(
            f"--epochs: need it without --steps; got {options['epochs']} and {options['steps']}."
        )
    options["steps"] = 100 if options["steps"] is None else options["steps"]
    options["masked"] = options["model"] in ENCODERS
    options["model"] = _model(options)
    if options["seq"] is None:
        options["seq"] = min(SEQ, options["model"].max_seq)
    options["strategy"] = options["strategy"] or ("ddp" if num_ranks > one_copy else "single")
    options["out"] = str(options["out"]) if options["out"] else None
    one_of("strategy", options["strategy"], tuple(STRATEGIES))
    config = TrainConfig(**options)
    config.check_ranks(num_ranks)
    config.check_memory(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    if os.environ.get("RANK", "0") == "0":
        config.check_files()  # other ranks may be on a machine that does not have them
    return config, num_ranks


def _model(options: dict[str, Any]) -> ModelSpec:
    """Return the preset's specification, with the sizes that are given in place of its own."""
    sizes = {
        "num_layers": options.pop("layers"),
        "hidden": options.pop("hidden"),
        "num_heads": options.pop("heads"),
        "vocab": options.pop("vocab"),
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    name = options["model"]
    spec = read_config(name) if name.endswith(".json") else ENCODERS.get(name) or find_model(name)
    if "hidden" in given:
        given["ffn_hidden"] = 4 * given["hidden"]
    return replace(spec, **given, name="own") if given else spec


def _refuse(sentence: str) -> int:
    """Print why the run cannot start: under torchrun every rank finds out, only rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        _say(sentence)
    else:
        time.sleep(LATE_S)
    return BAD_INPUT


def _say_how_to_go_on(config: TrainConfig, arguments: Sequence[str]) -> None:
    path = config.checkpoint
    if path is None or not path.is_file():
        return
    from course_lib.train.checkpoint import read

    step = read(path)["progress"]["step"]
    again = shlex.join(argument for argument in arguments if argument != "--resume")
    _say(f"Step {step} is saved. To go on from there: {COMMAND} {again} --resume")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
