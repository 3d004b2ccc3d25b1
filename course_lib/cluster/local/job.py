"""A job of this machine: the folder it lies in, the lock its process holds, what is left of it.

`job.json` says what to run, `elements/3.json` how the element 3 is. The process that works the job
off holds the lock as long as it lives, so nobody has to believe a process id.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.cluster.scheduler import FINAL, JobState

if TYPE_CHECKING:  # imported where it is used: `course --help` should not wait for it
    import psutil

ROOT = Path(__file__).resolve().parents[3]
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import course_lib.cluster.local.{} as m"
START += "; m.main()"
MARK = "COURSE_LOCAL_JOB"
RUNNING = "RUNNING"
NO_ELEMENT = "4294967294"  # what Slurm writes for %a where there is no array
KILL_WAIT_S = 5.0
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What `runner.py` has to know, as it lies in the job's folder."""

    job_id: str
    name: str
    token: str
    cwd: str
    log: str
    append: bool
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    time_limit_s: float
    is_array: bool
    elements: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> "LocalJob":
        """The job of this folder."""
        words = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        return cls(**{**words, "elements": tuple(words["elements"])})

    def log_of(self, element: int) -> Path:
        """Where an element's output goes: the directive with Slurm's % fields filled in."""
        task = str(element) if self.is_array else NO_ELEMENT
        fields = {"%": "%", "x": self.name, "j": self.job_id, "A": self.job_id, "a": task, "N": "0"}
        first, *rest = self.log.replace("%%", "%\0").split("%")
        parts = [fields.get(part[:1], "%" + part[:1]) + part[1:] for part in rest]
        return Path(self.cwd, "".join([first, *parts]).replace("%\0", "%"))


def python_of(module: str) -> list[str]:
    """The command that runs a module of this room, from any folder, with nothing installed."""
    return [sys.executable, "-c", START.format(module), str(ROOT)]


def end_processes(mark: str) -> None:
    """End what still runs of an element, wherever it went: first politely, then not."""
    import psutil

    give_up = time.monotonic() + KILL_WAIT_S
    for process in _marked(mark):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    while left := _marked(mark):
        if time.monotonic() > give_up:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(POLL_S)


def _marked(mark: str) -> "list[psutil.Process]":
    """torchrun starts its ranks in sessions of their own: only the environment tells whose."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            if not is_dead and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def mark_of(folder: Path, element: int) -> str:
    """What the environment of an element's processes holds as COURSE_LOCAL_JOB."""
    return str(folder / "elements" / str(element))


def write_json(path: Path, words: object) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            json.dump(words, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file, waiting for it; gives its file descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Does a process that lives hold this lock?"""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def state_of(folder: Path, job: LocalJob, element: int, lives: bool) -> JobState:
    """How an element is, where the process that works the job off lives or not."""
    path, log = folder / "elements" / f"{element}.json", str(job.log_of(element))
    if path.exists():
        state = JobState(**json.loads(path.read_text(encoding="utf-8")), element=element, log=log)
        if state.state == RUNNING:
            state = replace(state, seconds=time.time() - path.stat().st_mtime)
    else:
        state = JobState(element=element, state="PENDING", log=log)
    if lives or state.state in FINAL:
        return state
    reason = "the process that ran it was ended"
    return JobState(
        element=element, state="NODE_FAIL", restarts=state.restarts, reason=reason, log=log
    )
