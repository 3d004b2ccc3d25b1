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
from pathlib import Path
from typing import Any

import typer

from course_lib.core.errors import CourseError, MeshError
from course_lib.core.presets import ENCODERS, find_model
from course_lib.core.specs import ModelSpec
from course_lib.hub.config import read_config
from course_lib.mesh.mesh import Mesh, read_mesh
from course_lib.train import options as o
from course_lib.train.config import TrainConfig, was_restarted
from course_lib.train.launcher import (
    BAD_INPUT,
    CTRL_C,
    FAILED,
    LATE_S,
    PREEMPTED,
    REQUEUE,
    SAVE_S,
    STOP_S,
    BadInputError,
    run_ranks,
    work,
    world_size_from_torchrun,
)
from course_lib.train.rules import above_0, one_of
from course_lib.train.run_folder import check_files
from course_lib.train.strategies import STRATEGIES

COMMAND = "python -m course_lib.train"
SEQ = 64  # tokens in a sequence, if the model takes so many

HELP = """Train a GPT or a BERT on dp * pp * cp * tp ranks, where ep ranks of dp * cp can share the
experts of a layer; without dropout as one rank does.

\b
python -m course_lib.train --mesh dp=2,pp=2,tp=2 --strategy fsdp --micro-batch 1
python -m course_lib.train --ranks 2 --strategy fsdp --data shakespeare --model gpt2-char
python -m course_lib.train --ranks 2 --strategy ddp --out runs/ddp --save-every 100
torchrun --nproc-per-node 4 -m course_lib.train --strategy torch-ddp
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exit code 2: what was asked for cannot be trained; 1: the training failed; 130: Ctrl-C;
    75: a signal asked the run to stop, and it can go on from its checkpoint.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    app(args=arguments, obj=arguments, prog_name=COMMAND)


@app.command(help=HELP)
@o.with_settings
def train(
    context: typer.Context,
    *,
    strategy: o.StrategyOption = None,
    ranks: o.RanksOption = None,
    model: o.ModelOption = None,
    layers: o.Layers = None,
    hidden: o.Hidden = None,
    heads: o.Heads = None,
    vocab: o.Vocab = None,
    mesh: o.MeshOption = None,
    tp: o.AxisOption = None,
    pp: o.AxisOption = None,
    dry_run: o.DryRunOption = False,
    cluster: o.ClusterOption = "dgx-h100",
    **settings: Any,
) -> None:
    """Train a GPT or a BERT; `HELP` is what --help says."""
    raise typer.Exit(run(context.params, context.obj))


def run(options: dict[str, Any], arguments: Sequence[str]) -> int:
    """Train with these options of the command line; return the exit code."""
    options = dict(options)
    dry, cluster = options.pop("dry_run"), options.pop("cluster")
    try:
        config, num_ranks = configure(options, dry=dry)
        if dry:
            return _dry_run(config, num_ranks, cluster)
    except CourseError as error:
        return _refuse(str(error))
    try:
        if world_size_from_torchrun():
            return work(config)
        stop_s = SAVE_S if config.save_every else STOP_S
        if num_ranks > 1 and config.every:
            print(f"starting {num_ranks} ranks with {config.strategy} ...", flush=True)
        code = work(config) if num_ranks == 1 else run_ranks(num_ranks, config, stop_s)
        if code in PREEMPTED and config.save_every:
            code = REQUEUE
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


def _dry_run(config: TrainConfig, num_ranks: int, cluster: str) -> int:
    """Print what a step would hold and send, and how long the planner thinks it takes."""
    from course_lib.planner.dry_run import predicted_text
    from course_lib.train.dry_run import check_dry, dry_run, dry_text

    check_dry(config)
    time_of_step = predicted_text(config, num_ranks, cluster)  # an unknown cluster is told at once
    print(dry_text(dry_run(config, num_ranks)), time_of_step, sep="\n")
    return 0


def configure(options: dict[str, Any], *, dry: bool = False) -> tuple[TrainConfig, int]:
    """Return the run that the options ask for, and the number of ranks.

    dry   this machine need not be able to train it

    Raises: CourseError for what cannot be trained
    """
    started, wanted = world_size_from_torchrun(), options.pop("ranks")
    above_0("ranks", wanted)
    if started and wanted not in (None, started):
        raise CourseError(f"--ranks: need the {started} ranks that torchrun started; got {wanted}.")
    mesh, options["ep"] = _mesh(options)
    options |= {axis: mesh.size(axis) for axis in ("pp", "cp", "tp")}
    num_ranks = started or wanted or mesh.world_size
    if "dp" in mesh.sizes and num_ranks != mesh.world_size:
        sizes = {axis: mesh.size(axis) for axis in ("dp", "pp", "cp", "tp")}
        raise MeshError(
            f"--mesh: need {' * '.join(sizes)} ranks; got {' * '.join(map(str, sizes.values()))} "
            f"and {num_ranks} ranks. Try it without dp: the ranks decide."
        )
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
    usual = "ddp" if num_ranks > mesh.size("pp", "tp") else "single"
    options["strategy"] = options["strategy"] or usual
    one_of("strategy", options["strategy"], tuple(STRATEGIES))
    config = TrainConfig(**options)
    config.check_ranks(num_ranks)
    if dry:
        return config, num_ranks
    config.check_memory(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    if not started:  # the ranks of torchrun first agree on whether they were restarted
        check_files(config, was_restarted())
    return config, num_ranks


def _mesh(options: dict[str, Any]) -> tuple[Mesh, int]:
    """Return the mesh of --mesh, without dp where the number of ranks decides, and ep.

    ep is no axis of the ranks: it reuses those of dp and cp.
    """
    text, old = options.pop("mesh"), {axis: options.pop(axis) for axis in ("tp", "pp")}
    if given := {axis: size for axis, size in old.items() if size is not None}:
        together = ",".join(f"{axis}={size}" for axis, size in given.items())
        raise CourseError(
            f"--{next(iter(given))}: need all axes in one option. Try --mesh {together}."
        )
    mesh = Mesh() if text is None else read_mesh(text)
    axes = {axis: size for axis, size in mesh.sizes.items() if axis != "ep"}
    return Mesh(**axes), mesh.size("ep")


def _model(options: dict[str, Any]) -> ModelSpec:
    """Return the preset's specification, with the sizes that are given in place of its own."""
    sizes = {
        "num_layers": options.pop("layers"),
        "hidden": options.pop("hidden"),
        "num_heads": options.pop("heads"),
        "vocab": options.pop("vocab"),
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    name, folder = options["model"] or "tiny", options["init"]
    if folder:
        other = "model" if options["model"] else next(iter(given), None)
        if other:
            option = {"num_layers": "layers", "num_heads": "heads"}.get(other, other)
            raise CourseError(
                f"--init: need the sizes of the model in {folder}; got --{option}, too. Try it "
                f"without --{option}."
            )
        return read_config(Path(folder) / "config.json")
    spec = read_config(name) if name.endswith(".json") else ENCODERS.get(name) or find_model(name)
    if "hidden" in given:
        given["ffn_hidden"] = 4 * given["hidden"]
    heads, kv_heads = given.get("num_heads"), spec.num_kv_heads
    if heads and kv_heads and heads % kv_heads:
        raise CourseError(
            f"--heads: need a multiple of the {kv_heads} heads of keys and values of {spec.name}; "
            f"got {heads}. Try --heads {-(-heads // kv_heads) * kv_heads}, or another "
            "num_key_value_heads in a copy of its config.json."
        )
    return replace(spec, **given, name="own") if given else spec


def _refuse(sentence: str) -> int:
    """Print why the run cannot start: under torchrun every rank finds out, only rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        _say(sentence)
    else:
        time.sleep(LATE_S)
    return BAD_INPUT


def _say_how_to_go_on(config: TrainConfig, arguments: Sequence[str]) -> None:
    if config.checkpoints is None or not config.checkpoints.is_dir():
        return
    from course_lib.train.checkpoint import latest_of

    found = latest_of(config)
    if found is None:
        return
    again = shlex.join(argument for argument in arguments if argument != "--resume")
    _say(f"Step {found.step} is saved. To go on from there: {COMMAND} {again} --resume")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
