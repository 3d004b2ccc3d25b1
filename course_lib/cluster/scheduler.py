"""What every scheduler does for us: take a script in, say how it goes, end it.

`Slurm` talks to a cluster; `LocalRunner` runs the same script on this machine. States have Slurm's
own names, which is what `squeue` shows.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from course_lib.cluster.job import Job
from course_lib.core.errors import CourseError

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
    """A scheduler refuses something."""


class NoAnswerError(SchedulerError):
    """A scheduler does not answer: nobody knows whether it took what it was given."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """How one job is, or one element of an array.

    exit_code  of the script, 128 + the signal where one ended it; None until it has ended by itself
    restarts   how often it was put back into the queue, by a node that failed or by preemption
    seconds    that it ran, since the last restart
    """

    element: int
    state: str
    exit_code: int | None = None
    restarts: int = 0
    seconds: float = 0.0
    reason: str = ""
    log: str = ""

    @property
    def is_final(self) -> bool:
        """Will nothing happen to it any more?"""
        return self.state in FINAL


class Scheduler(Protocol):
    """Takes jobs. Ids are the scheduler's own; `17_3` is an element of the array 17."""

    def check(self, script: Path) -> None:
        """Ask whether the script would be taken.

        Raises: SchedulerError with the reason, if not
        """

    def submit(self, script: Path, job: Job, token: str) -> str:
        """Hand a script in, to run in the current folder; return the job's id.

        `token` is no other job's: if an answer gets lost, it tells whether the job is in already.
        """

    def find(self, token: str) -> str | None:
        """The id of the job that was handed in with this token, if there is one."""

    def states(self, job_id: str) -> list[JobState]:
        """One state for each element, in their order; of a job that is forgotten, GONE."""

    def cancel(self, job_id: str) -> None:
        """End a job, or an element of it, whether it waits or runs. Ended ones stay as they are."""


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
    """The PATH on which a job finds the torchrun that belongs to this Python."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def split_id(job_id: str) -> tuple[str, int | None]:
    """`17_3` as ("17", 3), `17` as ("17", None)."""
    whole, _, element = job_id.partition("_")
    return whole, int(element) if element else None
