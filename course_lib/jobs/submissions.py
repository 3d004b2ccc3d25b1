"""Submissions on disk: a folder for each, such as `runs/cluster/06_ddp-1`.

    submission.json   what was asked for, of whom, when, and how it was when last looked at
    script.sbatch     the script that was submitted
    records/0.0       run records of array task 0, attempt 0, until they are collected

The folder is there before anything is submitted, and the scheduler is told a token of it: what was
cut short in between is found again. Files are written whole or not at all.
"""

import re
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.core.files import not_one, read_json
from course_lib.core.plain_values import build
from course_lib.jobs.job import Job
from course_lib.jobs.local.job import locked, write_json
from course_lib.jobs.local.scheduler import LocalRunner
from course_lib.jobs.profile import find_cluster_folder
from course_lib.jobs.scheduler import GONE, JobState, Scheduler
from course_lib.jobs.slurm import Slurm
from course_lib.jobs.slurm_time import read_time_s

ASKED = "what `course submit` wrote"
FOLDER = Path("runs") / "cluster"
LOCAL_JOBS = "local"
ID = r"(?P<id>.+-\d+|\d+)(?:_(?P<array_task>\d+))?"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One submitted job, and where its files are.

    job     fitted: nothing is left open
    job_id  the scheduler's; None until it has taken the job
    seen    the states when somebody looked last, for schedulers forget
    """

    id: str
    folder: Path
    job: Job
    profile: str
    scheduler: str
    when: str
    token: str
    job_id: str | None = None
    seen: tuple[JobState, ...] = ()

    @property
    def file(self) -> Path:
        """The path of its description."""
        return self.folder / "submission.json"

    @property
    def is_over(self) -> bool:
        """Whether all array tasks have ended."""
        return bool(self.seen) and all(one.is_final for one in self.seen)

    @property
    def gpu_hours(self) -> float:
        """The GPU hours it used; before its end, or where unknown, the most it can use."""
        ended_s = {
            one.array_task: one.seconds for one in self.seen if one.is_final and one.state != GONE
        }
        limit_s = read_time_s(self.job.time_limit)
        seconds = sum(ended_s.get(array_task, limit_s) for array_task in self.job.array_tasks)
        return self.job.nodes * (self.job.gpus_per_node or 0) * seconds / 3600

    @property
    def jobs_left(self) -> int:
        """The jobs it may still have in the queue or running at a time."""
        ended = {one.array_task for one in self.seen if one.is_final}
        return min(len(set(self.job.array_tasks) - ended), at_once(self.job))

    def write(self) -> None:
        """Write its description into its folder."""
        words = asdict(self)
        del words["folder"]
        write_json(self.file, words)


def find_home() -> Path:
    """Return the folder of the submissions: this one, or the course's where this is in it."""
    here, course = Path.cwd(), find_cluster_folder().parent
    return course if here.is_relative_to(course) and not (here / FOLDER).is_dir() else here


@contextmanager
def at_home() -> Iterator[None]:
    """Work in the folder that has the submissions."""
    with chdir(find_home()):
        yield


def at_once(job: Job) -> int:
    """Return how many array tasks can run at a time: all, or as many as `1-8%2` allows."""
    throttle = job.array.partition("%")[2]
    return min(len(job.array_tasks), int(throttle or len(job.array_tasks)))


def read_submission(folder: Path) -> Submission:
    """Read the submission of this folder.

    Raises: CourseError where its file cannot be read
    """
    path, hint = folder / "submission.json", f"Try to delete {folder}."
    words = read_json(path, ASKED, hint=hint)
    if not isinstance(words, dict):
        raise not_one(path, ASKED, "there are no names with values", hint)
    try:
        return build(Submission, {**words, "folder": folder.resolve()}, "words")
    except CourseError as problem:
        raise not_one(path, ASKED, str(problem), hint) from problem


def read_submissions(folder: Path = FOLDER) -> list[Submission]:
    """Read all submissions, the oldest first."""
    found = [read_submission(path.parent) for path in folder.glob("*/submission.json")]
    return sorted(found, key=lambda one: (one.when, one.id))


def find_submission(text: str, folder: Path = FOLDER) -> tuple[Submission, int | None]:
    """Return submission `06_ddp-1` and no array task, or for `06_ddp-1_3` the array task 3.

    The scheduler's own id does as well.
    Raises: CourseError for an id that no submission has
    """
    found = re.fullmatch(ID, text)
    everything = read_submissions(folder)
    for one in reversed(everything):
        if found and found["id"] in (one.id, one.job_id):
            array_task = int(found["array_task"]) if found["array_task"] else None
            if array_task is None or array_task in one.job.array_tasks:
                return one, array_task
    there = ", ".join(one.id for one in everything[-5:]) or "none yet"
    raise CourseError(
        f"course: need the id of a submission; got {text!r}. There are: {there}. Try course status."
    )


def scheduler_of(name: str, folder: Path = FOLDER) -> Scheduler:
    """Return the scheduler of a profile or a submission: "slurm" or "local"."""
    return Slurm() if name == "slurm" else LocalRunner(folder / LOCAL_JOBS)


def refresh(one: Submission, folder: Path = FOLDER) -> Submission:
    """Ask the scheduler for the states of a submission, and store the answer."""
    if one.job_id is None:
        with only_me(folder):  # whoever hands it in holds this
            one = settle(read_submission(one.folder), folder)
    return settle(one, folder)


def settle(one: Submission, folder: Path = FOLDER) -> Submission:
    """Refresh a submission under a lock that the caller holds."""
    if one.is_over:
        return one
    scheduler = scheduler_of(one.scheduler, folder)
    job_id = one.job_id or scheduler.find(one.token)
    if job_id is None:
        never = JobState(array_task=0, state="CANCELLED", reason="was never handed in")
        known = replace(one, seen=tuple(replace(never, array_task=k) for k in one.job.array_tasks))
    else:
        before = {state.array_task: state for state in one.seen}
        states = (_remember(new, before.get(new.array_task)) for new in scheduler.states(job_id))
        known = replace(one, job_id=job_id, seen=tuple(states))
    if known != one:
        known.write()
    return known


def _remember(new: JobState, old: JobState | None) -> JobState:
    """Return the states, with those that were final before and are forgotten now kept; logs too."""
    if old is None or new.state != GONE:
        return new
    return old if old.is_final else replace(new, log=old.log, restarts=old.restarts)


@contextmanager
def only_me(folder: Path = FOLDER) -> Iterator[None]:
    """Hold the submission lock: two submissions at once would both find the last free place."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        yield
