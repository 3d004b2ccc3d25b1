"""The commands of `course checkpoint`: what is there, is it whole, whose is it; convert, prune."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from course_lib.core.errors import CourseError
from course_lib.core.plain_text import one_line, printable
from course_lib.core.presets import find_model
from course_lib.core.specs import ModelSpec
from course_lib.core.units import format_bytes
from course_lib.hub.config import read_config
from course_lib.jobs.commands import plain_table

if TYPE_CHECKING:  # imported where they are used: `course --help` should not wait for PyTorch
    from course_lib.checkpoint import Broken, Checkpoint
    from course_lib.checkpoint.dcp import DcpCheckpoint
    from course_lib.checkpoint.storage import Storage

    Found = Checkpoint | DcpCheckpoint | Broken

checkpoint_app = typer.Typer(
    help="List, verify, convert and remove checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
INSIDE = "checkpoints"  # the folder that a run has them in
FOLDER_NAME = re.compile(r"step-[0-9]{8,18}|[.]dcp-.*[.]tmp")  # published or not

FolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="A run's folder, its folder of checkpoints, or a URL (s3://...)."
    ),
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", help="The checkpoint's step. Default: the newest whole checkpoint."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


class Layout(StrEnum):
    """The formats that a checkpoint can be converted to."""

    full = "full"
    hf = "hf"
    dcp = "dcp"
    course = "course"


def add_checkpoint_commands(app: typer.Typer) -> None:
    """Add the group `checkpoint` to the command line."""
    app.add_typer(checkpoint_app, name="checkpoint")


@checkpoint_app.command("ls")
def list_checkpoints(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints, the newest first. The exit code is 1 if there is none.

    This command reads names, sizes and manifests; `verify` reads every byte.
    """
    rows = _rows(_storage(folder))
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        table = plain_table("checkpoint", "is", "size", "files", "ranks", "whose, or why not")
        for row in rows:
            size = format_bytes(row["bytes"]) if "bytes" in row else ""
            told = row.get("why") or _in_words(row["run"])
            style = "" if row["is"] == "published" else "red"
            counts = [str(row.get(key, "")) for key in ("files", "ranks")]
            table.add_row(row["name"], Text(row["is"], style), size, *counts, Text(one_line(told)))
        Console().print(table)
    raise typer.Exit(0 if any(row["is"] == "published" for row in rows) else 1)


@checkpoint_app.command()
def verify(
    folder: FolderArgument,
    step: Annotated[
        int | None, typer.Option("--step", help="Only the checkpoint of this step. Default: all.")
    ] = None,
) -> None:
    """Check that the checkpoints are whole. The exit code is 0 if all are, otherwise 1.

    Every byte is read and compared with the hashes in the manifest. A checkpoint in DCP's format
    has no hashes: only its metadata and the sizes of its files are read.
    """
    found = [one for one in _published(_storage(folder)) if step in (None, one.step)]
    if not found:
        raise _none(folder, "" if step is None else f" of step {step}")
    problems = [problem for one in found if (problem := _problem(one))]
    for problem in problems:
        print(printable(problem), file=sys.stderr)
    print(f"{len(found) - len(problems)} of {len(found)} checkpoints are whole.")
    raise typer.Exit(1 if problems else 0)


@checkpoint_app.command()
def show(folder: FolderArgument, step: StepOption = None, as_json: JsonOption = False) -> None:
    """Show one checkpoint: the run that saved it, its plain values, and its tensors."""
    one = _chosen(folder, step)
    tensors: dict[str, dict[str, Any]] = {
        name: {"dtype": saved.dtype, "shape": [*saved.shape], "pieces": len(saved.pieces)}
        for name, saved in sorted(one.manifest.tensors.items())
    }
    facts = _facts(one)
    if as_json:
        print(json.dumps({**facts, "values": one.values, "tensors": tensors}, indent=1))
        return
    print(f"{one_line(one.path)}: step {one.step}, saved by {facts['ranks']} ranks in ", end="")
    print(f"{facts['files']} files of {format_bytes(one.num_bytes)}")
    for title, values in (("run", one.run), ("values", one.values)):
        print(f"\n{title}: {printable(json.dumps(values, indent=1, sort_keys=True))}")
    table = plain_table("tensor", "dtype", "pieces", "shape")
    for name, row in tensors.items():
        table.add_row(
            Text(one_line(name)), row["dtype"], str(row["pieces"]), Text(f"{row['shape']}")
        )
    print()
    Console().print(table)


@checkpoint_app.command()
def convert(
    folder: FolderArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file or folder to write.")],
    to: Annotated[
        Layout,
        typer.Option(
            "--to",
            help="full: one safetensors file; hf: a folder for transformers; dcp: a folder for "
            "torch.distributed.checkpoint; course: DIR is a folder of transformers, and OUT gets "
            "a checkpoint of step 0.",
        ),
    ],
    step: StepOption = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="With --to hf: a preset or a config.json. Default: the model of the run.",
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
) -> None:
    """Verify a checkpoint, and write it in another layout; or read a model of transformers.

    \b
    course checkpoint convert runs/a model.safetensors --to full
    course checkpoint convert runs/a gpt2 --to hf --step 100
    course checkpoint convert downloads/qwen3 runs/b --to course
    """
    from course_lib.hub import convert as conversions

    if to == Layout.course:
        _from_hub(Path(folder), out, {"--step": step, "--model": model})
        return
    one = _chosen(folder, step)
    _check_out(out, to, force)
    if problem := _problem(one):
        raise CourseError(problem)
    with _bytes_bar(f"{one.path} to {out}") as done:
        if to == Layout.full:
            conversions.to_full(one, out, done)
        elif to == Layout.dcp:
            conversions.to_dcp(one, out, done)
        else:
            conversions.to_hugging_face(one, out, _spec(model), done)
    print(f"{out} is written, of step {one.step}.")


@checkpoint_app.command()
def prune(
    folder: FolderArgument,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="Number of whole checkpoints to keep.")
    ],
    broken: Annotated[
        bool, typer.Option("--broken", help="Also remove checkpoints that are not whole.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove all but the newest whole checkpoints. Asks for confirmation.

    An unfinished checkpoint may be one that a running job is writing: without --broken it is kept.
    """
    from course_lib.checkpoint.folder import STEP, remove_files

    storage = _storage(folder)
    found, ones = _rows(storage), {one.path: one for one in _published(storage)}
    kept, gone = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in found:
        problem = "" if len(kept) >= keep else _problem(ones[row["path"]]) if "path" in row else ""
        if problem:  # a checkpoint that stays is read first: it may be the only whole one
            print(printable(problem), file=sys.stderr)
            row["is"] = "broken"
        if row["is"] != "published":
            gone += [row] if broken else []
        else:
            (kept if len(kept) < keep else gone).append(row)
    for row in gone:
        print(f"  {row['name']}, {row['is']}")
    if gone and not yes:
        typer.confirm(f"Remove these {len(gone)} of {len(found)}?", abort=True)
    for row in gone:
        if STEP.fullmatch(row["name"]):
            remove_files(storage, row["name"])
        else:
            storage.remove(f"{row['name']}/.metadata")  # first: half a checkpoint is none
            storage.remove(row["name"])
    print(f"{len(gone)} removed, {len(found) - len(gone)} left.")


def _storage(folder: str) -> "Storage":
    """Return the storage of the checkpoints in a folder, or in a run's folder."""
    from course_lib.checkpoint.storage import storage_of

    if "://" not in folder and Path(folder).is_file():
        raise CourseError(f"{folder}: need a folder with checkpoints; got a file.")
    storage = storage_of(folder)
    names = storage.list()
    if not names:
        raise CourseError(f"{folder}: need a folder with checkpoints; it is empty or not there.")
    return storage_of(f"{storage.path}/{INSIDE}") if INSIDE in names else storage


def _published(storage: "Storage") -> "list[Found]":
    """Return the published checkpoints of both formats, the newest first."""
    from course_lib.checkpoint import all_checkpoints

    found: list[Found] = [*all_checkpoints(storage.path)]
    if any(name.startswith("dcp-") for name in storage.list()):
        from course_lib.checkpoint.dcp import all_dcp  # loads much of PyTorch

        found += all_dcp(storage.path)
    return sorted(found, key=lambda one: one.step, reverse=True)


def _rows(storage: "Storage") -> list[dict[str, Any]]:
    """Return what is known of each checkpoint, published or not."""
    rows = [_facts(one) for one in _published(storage)]
    known = {row["name"] for row in rows}
    for name in storage.list():
        if FOLDER_NAME.fullmatch(name) and name not in known:
            why = "never published: a job is writing it, or was killed"
            rows.append({"name": name, "is": "unfinished", "why": why})
    return rows


def _facts(one: "Found") -> dict[str, Any]:
    """Return what is known of a published checkpoint, as plain values."""
    from course_lib.checkpoint import Broken, Checkpoint

    facts = {"name": one.path.rpartition("/")[2], "path": one.path, "step": one.step}
    if isinstance(one, Broken):
        return {**facts, "is": "broken", "why": one.why}
    facts |= {"is": "published", "bytes": one.num_bytes, "run": one.run}
    if isinstance(one, Checkpoint):
        facts |= {"files": len(one.manifest.files), "ranks": one.manifest.world_size}
    return facts


def _problem(one: "Found") -> str:
    """Return what is wrong with a checkpoint, or nothing. DCP's have no hashes to compare."""
    from course_lib.checkpoint import Broken, Checkpoint

    if isinstance(one, Checkpoint):
        try:
            with _bytes_bar(f"verify {one.path}") as done:
                one.verify(done)
        except CourseError as problem:
            return str(problem)
    return one.why if isinstance(one, Broken) else ""


def _chosen(folder: str, step: int | None) -> "Checkpoint":
    """Return the checkpoint of a step, or the newest whole one. Raises: CourseError"""
    from course_lib.checkpoint import Broken, Checkpoint, all_checkpoints

    for one in all_checkpoints(_storage(folder).path):
        if isinstance(one, Checkpoint) and step in (None, one.step):
            return one
        if isinstance(one, Broken) and step == one.step:
            raise CourseError(one.why)
    of_step = "" if step is None else f" of step {step}"
    raise _none(folder, f"{of_step} that is whole, and in the course's own format")


def _none(folder: str, which: str) -> CourseError:
    return CourseError(
        f"{folder}: need a checkpoint{which}; there is none. Try: course checkpoint ls {folder}"
    )


def _from_hub(folder: Path, out: Path, unused: Mapping[str, Any]) -> None:
    """Save a model of transformers as a checkpoint, in a folder that has none."""
    from course_lib.hub.loading import from_hugging_face

    if given := [name for name, value in unused.items() if value not in (None, "")]:
        raise CourseError(f"{given[0]}: need none with --to course; DIR has one model, of no step.")
    if out.exists():
        raise CourseError(f"{out}: need a path where nothing is; it is there. Try another OUT.")
    with _bytes_bar(f"{folder} to {out}") as done:
        from_hugging_face(folder, out, done)
    print(f"{out} is written, of step 0.")


def _check_out(out: Path, to: Layout, force: bool) -> None:
    """Check that nothing is lost: --force overwrites what an earlier conversion has written."""
    if not out.exists():
        return
    if not force:
        raise CourseError(f"{out}: need a path where nothing is; it is there. Try --force.")
    inside = {Layout.full: "", Layout.hf: "config.json", Layout.dcp: ".metadata"}[to]
    if not (out / inside).is_file():
        what = f"a folder with {inside}" if inside else "a file"
        raise CourseError(
            f"{out}: need {what} to overwrite; it is something else. Try another OUT."
        )


def _spec(model: str) -> ModelSpec | None:
    """Return the sizes of a model from a preset's name or a config.json; None: the run's."""
    if not model:
        return None
    return read_config(model) if model.endswith(".json") else find_model(model)


def _in_words(run: Mapping[str, Any]) -> str:
    """Return whose a checkpoint is, on one line: its model's sizes, then its other settings."""
    model = run.get("model")
    sizes = model if isinstance(model, Mapping) else {}
    words = [f"{key} {sizes[key]}" for key in ("num_layers", "hidden") if key in sizes]
    plain = {key: value for key, value in run.items() if isinstance(value, str | int | float)}
    return ", ".join([*words, *(f"{key} {value}" for key, value in plain.items())])


@contextmanager
def _bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal; call what it yields with (bytes done, bytes in all)."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    from course_lib.train.progress import terminal_bar

    columns = (TextColumn("{task.description}"), DownloadColumn(binary_units=True), BarColumn())
    with terminal_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(one_line(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
