"""Where a run is, and the file from which it can go on: the checkpoint of `course_lib.train`.

Rank 0 writes and reads it, whole or not at all, so the ranks and parallelism may change in between.
Random numbers need no place in it: those of a step are a function of (seed, step, rank).
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.records import RunRecord

T = TypeVar("T")


@dataclass
class Progress:
    """How far a run is. The one place that counts: bar, record and checkpoint read it."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens trained on, all ranks together

    def step_done(self, num_tokens: int) -> None:
        """Count one step of that many tokens."""
        self.step += 1
        self.tokens += num_tokens


def from_rank_0(make: Callable[[], T]) -> T:
    """What `make()` gives on rank 0, on every rank; a CourseError is raised on every rank too."""
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
    """Write a checkpoint: the old one stays until the new one is whole and on disk.

    whole   the state dicts of `model` and `optimizer`, not of a rank's part of them
    """
    state = {"identity": identity, "progress": asdict(progress), **whole}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, on the CPU.

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
    """Take out of a folder's run records what a run that begins at `step` will do again."""
    for path in folder.glob("rank*.jsonl"):
        record = RunRecord.read(path) if step else None
        kept = [line for line in record.steps if line["step"] < step] if record else []
        if record and kept:
            record.steps = kept
            record.write(path)
        else:
            path.unlink()


def check_identity(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises: CourseError, with the first difference, for a checkpoint of another run."""
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
