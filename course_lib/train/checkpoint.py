"""Save and read the checkpoint of a training run, and check that it belongs to the run.

Rank 0 writes and reads it, whole or not at all, and it holds the state of one process, so a run can
resume with other ranks and parallelism. It needs no random state: a step's random numbers are a
function of (seed, step, rank).
"""

import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.files import whole_file
from course_lib.core.records import RunRecord
from course_lib.train.progress import Progress

T = TypeVar("T")


def from_rank_0(make: Callable[[], T]) -> T:
    """Return on every rank what `make()` returns on rank 0; a CourseError is raised on all."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except CourseError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise CourseError(box[1])
    return box[0]


def save(path: Path, identity: dict[str, Any], progress: Progress, whole: dict[str, Any]) -> None:
    """Write a checkpoint; the old one stays until the new one is complete and on disk.

    whole   the state dicts of `model` and `optimizer`, not of a rank's part of them
    """
    state = {"identity": identity, "progress": asdict(progress), **whole}
    with whole_file(path, sync=True, one_writer=True) as file:
        torch.save(state, file)


def read(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file, on the CPU.

    Raises: CourseError for a file that cannot be read
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        Progress(**state["progress"])
    except (RuntimeError, OSError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as wrong:
        raise CourseError(
            f"--resume: need a checkpoint that can be read; {path} is damaged "
            f"({type(wrong).__name__}). Try to delete it and start again."
        ) from wrong
    return state


def forget_records(folder: Path, step: int) -> None:
    """Drop from a folder's run records the steps that a run beginning at `step` will repeat."""
    for path in folder.glob("rank*.jsonl"):
        record = RunRecord.read(path) if step else None
        kept = [line for line in record.steps if line["step"] < step] if record else []
        if record and kept:
            record.steps = kept
            record.write(path)
        else:
            path.unlink()


def check_identity(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that a checkpoint belongs to the wanted run.

    Raises: CourseError, with the first difference, for a checkpoint of another run
    """
    for name, value in wanted.items():
        before = saved.get(name)
        if before == value:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            name, before, value = _first_difference(before, value)
        raise CourseError(
            f"--resume: need the {name} of {path}, {before!r}; got {value!r}. "
            "Try the settings it was started with, or another --out."
        )


def _first_difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any]:
    name = next(name for name in now if before.get(name) != now[name])
    return f"model's {name}", before.get(name), now[name]
