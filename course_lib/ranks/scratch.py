"""Folders for temporary files: each belongs to one process, and is removed once that is gone.

The owner holds a lock on a file in its folder. The lock ends with the process, however it ends, so
whoever makes the next folder can tell which folders have no owner any more, and removes those.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from course_lib.core.errors import MachineError

PREFIX = "ranks-"
LOCK_FILE = ".course-owner"


@dataclass(frozen=True)
class ScratchFolder:
    """A folder that this process owns, with the file descriptor of the lock that says so."""

    path: str
    lock: int

    def remove(self) -> None:
        """Remove the folder with all that is in it, and give the lock back."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self.lock)


def make_folder(parent: str | None = None) -> ScratchFolder:
    """Make a folder in `parent`, by default the temporary folder; remove those without an owner.

    Raises: MachineError where no folder can be made
    """
    try:
        parent = parent or tempfile.gettempdir()
        _remove_leftovers(parent)
        while True:
            path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
            lock = _lock(path, os.O_CREAT)
            if lock is not None:
                return ScratchFolder(path, lock)
    except OSError as error:
        raise no_room(parent or "the temporary folder", 0, error) from error


def no_room(folder: str, need_bytes: int, error: OSError) -> MachineError:
    """Return the error for a folder in which `need_bytes` could not be reserved."""
    need = f"{need_bytes:,} bytes" if need_bytes else "a folder that can be written to"
    got = error.strerror or str(error)
    with suppress(OSError):
        got += f" ({shutil.disk_usage(folder).free:,} bytes are free)"
    return MachineError(
        f"Ranks, {folder}: need {need} for temporary files; got: {got}. "
        "Try to set TMPDIR to a folder on a disk that has room, and start again."
    )


def _remove_leftovers(parent: str) -> None:
    for path in Path(parent).glob(f"{PREFIX}*"):
        if (path / LOCK_FILE).exists():
            lock = _lock(str(path))
            if lock is not None:
                ScratchFolder(str(path), lock).remove()


def _lock(folder: str, flags: int = 0) -> int | None:
    """Lock a folder for this process; return None where another process owns or removes it."""
    path = os.path.join(folder, LOCK_FILE)
    try:
        lock = os.open(path, os.O_RDWR | flags, 0o600)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(path):
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None
