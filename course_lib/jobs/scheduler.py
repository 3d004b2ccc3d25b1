"""The interface of a scheduler: submit a script, report its state, cancel it.

`Slurm` calls a cluster's commands; `LocalRunner` runs the same script on this machine. States have
Slurm's own names, which is what `squeue` shows.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from course_lib.core.errors import CourseError
from course_lib.jobs.job import Job

DONE = "COMPLETED"
GONE = "GONE"  # the scheduler does not remember it any more
FINAL = (
    DONE,
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    GONE,
)


class SchedulerError(CourseError):
    """The scheduler refused a request."""


class NoAnswerError(SchedulerError):
    """The scheduler did not answer: it is unknown whether it accepted the request."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job, or of one task of a job array.

    exit_code  of the script, 128 + the signal where one ended it; None until it has ended by itself
    restarts   how often it was put back into the queue, by a node that failed or by preemption
    seconds    that it ran, since the last restart
    """

    array_task: int
    state: str
    exit_code: int | None = None
    restarts: int = 0
    seconds: float = 0.0
    reason: str = ""
    log: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended for good."""
        return self.state in FINAL


class Scheduler(Protocol):
    """The interface of a scheduler; ids are its own, and `17_3` is the task 3 of the array 17."""

    def check(self, script: Path) -> None:
        """Check whether the scheduler would accept the script.

        Raises: SchedulerError with the reason, if not
        """

    def submit(self, script: Path, job: Job, token: str) -> str:
        """Submit a script to run in the current folder; return the job's id.

        `token` is no other job's: if an answer gets lost, it tells whether the job is in already.
        """

    def find(self, token: str) -> str | None:
        """Return the id of the job that was submitted with this token, if there is one."""

    def states(self, job_id: str) -> list[JobState]:
        """Return one state for each array task, in order; GONE for a job that is forgotten."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job or an array task, whether it waits or runs; ended ones stay as they are."""


def in_words(states: Sequence[JobState]) -> str:
    """`2 COMPLETED, 1 FAILED (exit code 7)`; of a single one without the number."""
    counts = Counter(_in_words(state) for state in states)
    if not counts:
        return "not known yet"
    return ", ".join(f"{n} {word}" if len(states) > 1 else word for word, n in counts.items())


def _in_words(state: JobState) -> str:
    if state.exit_code:
        return f"{state.state} (exit code {state.exit_code})"
    return f"{state.state} ({state.reason})" if state.reason else state.state


def python_first() -> str:
    """Return a PATH on which a job finds the torchrun that belongs to this Python."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def split_id(job_id: str) -> tuple[str, int | None]:
    """Split `17_3` into ("17", 3) and `17` into ("17", None)."""
    whole, _, array_task = job_id.partition("_")
    return whole, int(array_task) if array_task else None
