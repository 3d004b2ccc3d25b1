"""A job on this machine: its folder, the lock that its process holds, and its state.

`job.json` says what to run, `elements/3.json` holds the state of array task 3. The process that
runs the job holds the lock as long as it lives: a process id alone would prove nothing.
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
from typing import TYPE_CHECKING, Any

from course_lib.core.files import read_json, whole_file
from course_lib.core.plain_values import build
from course_lib.jobs.scheduler import FINAL, JobState

if TYPE_CHECKING:  # imported where it is used: `course --help` should not wait for it
    import psutil

ROOT = Path(__file__).resolve().parents[3]
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import course_lib.jobs.local.{} as m"
START += "; m.main()"
MARK = "COURSE_LOCAL_JOB"
RUNNING = "RUNNING"
TASKS = "elements"  # the folder of the array tasks' states
NO_ARRAY_TASK = "4294967294"  # what Slurm writes for %a where there is no array
KILL_WAIT_S = 5.0
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """The description of a job that `runner.py` reads from the job's folder."""

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
    array_tasks: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> "LocalJob":
        """Read the job of this folder. Raises: CourseError where its file cannot be read"""
        path = folder / "job.json"
        return build(cls, read_json(path, "a job"), str(path))

    def log_of(self, array_task: int) -> Path:
        """Return the path of an array task's log: the directive with Slurm's % fields filled in."""
        task = str(array_task) if self.is_array else NO_ARRAY_TASK
        fields = {"%": "%", "x": self.name, "j": self.job_id, "A": self.job_id, "a": task, "N": "0"}
        first, *rest = self.log.replace("%%", "%\0").split("%")
        parts = [fields.get(part[:1], "%" + part[:1]) + part[1:] for part in rest]
        return Path(self.cwd, "".join([first, *parts]).replace("%\0", "%"))


def python_of(module: str) -> list[str]:
    """Return the command that runs a module of this package from any folder, uninstalled."""
    return [sys.executable, "-c", START.format(module), str(ROOT)]


def end_processes(mark: str) -> None:
    """End all remaining processes of an array task: first with SIGTERM, then with SIGKILL."""
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
    """Return the processes with this mark: torchrun starts its ranks in new sessions."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            if not is_dead and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def mark_of(folder: Path, array_task: int) -> str:
    """Return the value of COURSE_LOCAL_JOB in the environment of an array task's processes."""
    return str(folder / TASKS / str(array_task))


def write_json(path: Path, words: object) -> None:
    """Write JSON to a file, whole or not at all, and wait until it is on disk."""
    with whole_file(path, sync=True) as file:
        file.write(json.dumps(words, indent=1).encode())


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file, after waiting for it; yields its file descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a live process holds this lock."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def state_of(folder: Path, job: LocalJob, array_task: int, lives: bool) -> JobState:
    """Return the state of an array task; `lives` says whether the job's process is alive."""
    path, log = folder / TASKS / f"{array_task}.json", str(job.log_of(array_task))
    if path.exists():
        words = build(dict[str, Any], read_json(path, "a state"), str(path))
        state = build(JobState, {**words, "array_task": array_task, "log": log}, str(path))
        if state.state == RUNNING:
            state = replace(state, seconds=time.time() - path.stat().st_mtime)
    else:
        state = JobState(array_task=array_task, state="PENDING", log=log)
    if lives or state.state in FINAL:
        return state
    reason = "the process that ran it was ended"
    return JobState(
        array_task=array_task, state="NODE_FAIL", restarts=state.restarts, reason=reason, log=log
    )
