"""The checkpoints of a training run: in its folder, and only for runs with its settings.

`course_lib.checkpoint` saves and loads them. They need no random state, no position in the data and
no state of the learning-rate schedule: batch, random numbers and learning rate of a step are
functions of (seed, step, rank).
"""

import fcntl
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from course_lib.checkpoint import (
    Broken,
    Checkpoint,
    PendingSave,
    all_checkpoints,
    load,
    save,
    save_async,
)
from course_lib.checkpoint.agree import from_first
from course_lib.checkpoint.pending import group_of_its_own
from course_lib.core.errors import CourseError
from course_lib.core.records import RunRecord
from course_lib.train.config import TrainConfig
from course_lib.train.framework_checkpoint import OwnCheckpoint, all_own, load_own, save_own
from course_lib.train.progress import Progress

if TYPE_CHECKING:  # imported where it is used: it loads much of PyTorch
    from course_lib.checkpoint.dcp import DcpCheckpoint

LOCK = ".lock"
LOCK_S = 120  # until a run that was started again gives up: its old node may still hold the lock


def latest_of(config: TrainConfig) -> "Checkpoint | DcpCheckpoint | OwnCheckpoint | None":
    """Return the latest whole checkpoint of a run, in its format, if there is one."""
    *_, all_of_them = _functions_of(config)
    found = all_of_them(str(config.checkpoints))
    return next((one for one in found if not isinstance(one, Broken)), None)


def _functions_of(config: TrainConfig) -> tuple[Callable[..., Any], ...]:
    """Return the functions that save, load and list the checkpoints of a run's format."""
    if config.uses_framework:
        return save_own, load_own, all_own
    if config.checkpoint_format == "course":
        return save, load, all_checkpoints
    from course_lib.checkpoint.dcp import all_dcp, load_dcp, save_dcp

    return save_dcp, load_dcp, all_dcp


class RunCheckpoints:
    """The checkpoints of one run; every rank saves and loads its part of them.

    identity   the settings that a resumed run must keep
    """

    def __init__(self, config: TrainConfig, identity: dict[str, Any]) -> None:
        self.config, self.identity = config, identity
        self.folder = str(config.checkpoints)
        self._save, self._load, self._all = _functions_of(config)
        if config.async_save:
            group_of_its_own(None)  # now: later, a rank may have died, and this would wait for it
        self._pending: PendingSave | None = None
        self._last: int | None = None  # step of the last one that was saved or loaded

    def save(self, state: dict[str, Any], progress: Progress) -> None:
        """Save a checkpoint of this step, unless there is one of it."""
        if progress.step == self._last:
            return
        self._last = progress.step
        state = {**state, "progress": asdict(progress)}
        options: Any = {"step": progress.step, "keep": self.config.keep, "run": self.identity}
        if self.config.async_save:
            self._pending = save_async(state, self.folder, **options)
        else:
            self._save(state, self.folder, **options)

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises: CourseError where it cannot be"""
        if self._pending:
            self._pending.wait()

    def load(self, state: dict[str, Any]) -> Progress:
        """Load the latest whole checkpoint into the state, if there is one; return its progress.

        Raises: CourseError for a checkpoint of another run
        """
        if not from_first(self._has_one, None):
            return Progress()
        loaded = self._load(state, self.folder)
        self._last = loaded.step
        return Progress(**loaded.values["progress"])

    def _has_one(self) -> bool:
        """Return whether there is a checkpoint. Raises: CourseError for one of another run"""
        found = latest_of(self.config)
        if found:
            check_identity(found.path, found.run, self.identity)
        elif broken := self._all(self.folder):
            raise CourseError(
                f"--resume: need a whole checkpoint in {self.folder}; none of {len(broken)} is. "
                "Try course checkpoint verify, or another --out."
            )
        return found is not None


def check_identity(path: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to the wanted run.

    Raises: CourseError, with the first difference, for a checkpoint of another run
    """
    if saved.keys() == {"model"}:  # course checkpoint convert --to course wrote it
        raise CourseError(
            f"--resume: need a checkpoint of a training run; {path} has weights without optimizer "
            "state. Try course_lib.checkpoint.load, which reads them into a GPT."
        )
    for name in {**wanted, **saved}:
        before, value = saved.get(name), wanted.get(name)
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


def lock_folder(folder: Path, wait_s: float = 0.0) -> BinaryIO:
    """Return an open file that keeps every other run out of a folder until it is closed.

    The system closes it when the process ends, however it ends.

    Raises: CourseError for a folder to which another run writes, for longer than wait_s
    """
    file, give_up_s = (folder / LOCK).open("wb"), time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < give_up_s:
                time.sleep(1)
                continue
            file.close()
            raise CourseError(
                f"--out: need a folder to which no other run writes; one does to {folder}. "
                "Try another --out, or wait until that run has ended."
            ) from None
        except OSError:
            pass  # a file system without locks
        return file


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
