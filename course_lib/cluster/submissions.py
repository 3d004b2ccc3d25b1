"""What was handed in: a folder for each submission, such as `runs/cluster/06_ddp-1`.

    submission.json   what was asked for, of whom, when, and how it was when last looked at
    script.sbatch     what was handed in
    records/0.0       run records of element 0, attempt 0, until they are collected

The folder is there before anything is handed in, and the scheduler is told a token of it: what was
cut short in between is found again. Files are written whole or not at all.
"""

import json
import re
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from course_lib.cluster.job import Job
from course_lib.cluster.local.job import locked, write_json
from course_lib.cluster.local.scheduler import LocalRunner
from course_lib.cluster.profile import find_cluster_folder
from course_lib.cluster.scheduler import GONE, JobState, Scheduler
from course_lib.cluster.slurm import Slurm
from course_lib.cluster.slurm_time import read_time_s
from course_lib.core.errors import CourseError

FOLDER = Path("runs") / "cluster"
LOCAL_JOBS = "local"
ID = r"(?P<id>.+-\d+|\d+)(?:_(?P<element>\d+))?"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job that was handed in, and where its things lie.

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
        """Where it is written."""
        return self.folder / "submission.json"

    @property
    def is_over(self) -> bool:
        """Have all elements ended?"""
        return bool(self.seen) and all(one.is_final for one in self.seen)

    @property
    def gpu_hours(self) -> float:
        """What it has used; where it has not ended or nobody knows, what it can use at most."""
        ended_s = {
            one.element: one.seconds for one in self.seen if one.is_final and one.state != GONE
        }
        limit_s = read_time_s(self.job.time_limit)
        seconds = sum(ended_s.get(element, limit_s) for element in self.job.elements)
        return self.job.nodes * (self.job.gpus_per_node or 0) * seconds / 3600

    @property
    def jobs_left(self) -> int:
        """How many jobs it may still have in the queue or running at a time."""
        ended = {one.element for one in self.seen if one.is_final}
        return min(len(set(self.job.elements) - ended), at_once(self.job))

    def write(self) -> None:
        """Write it into its folder."""
        words = asdict(self)
        del words["folder"]
        write_json(self.file, words)


def find_home() -> Path:
    """The folder that has the submissions: this one, or the course's where this one lies in it."""
    here, course = Path.cwd(), find_cluster_folder().parent
    return course if here.is_relative_to(course) and not (here / FOLDER).is_dir() else here


@contextmanager
def at_home() -> Iterator[None]:
    """Work in the folder that has the submissions."""
    with chdir(find_home()):
        yield


def at_once(job: Job) -> int:
    """How many elements can run at a time: all, or those that `1-8%2` allows."""
    throttle = job.array.partition("%")[2]
    return min(len(job.elements), int(throttle or len(job.elements)))


def read_submission(folder: Path) -> Submission:
    """The submission of this folder.

    Raises: CourseError where its file cannot be read
    """
    path = folder / "submission.json"
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        asked = words.pop("job")
        job = Job(**{**asked, "arguments": tuple(asked["arguments"])})
        seen = tuple(JobState(**one) for one in words.pop("seen"))
        return Submission(**words, folder=folder.resolve(), job=job, seen=seen)
    except (OSError, ValueError, KeyError, TypeError, CourseError) as problem:
        raise CourseError(
            f"{path}: need what `course submit` wrote; got {problem}. Try to delete {folder}."
        ) from problem


def read_submissions(folder: Path = FOLDER) -> list[Submission]:
    """All submissions, the first one first."""
    found = [read_submission(path.parent) for path in folder.glob("*/submission.json")]
    return sorted(found, key=lambda one: (one.when, one.id))


def find_submission(text: str, folder: Path = FOLDER) -> tuple[Submission, int | None]:
    """The submission `06_ddp-1` and no element, or of `06_ddp-1_3` the element 3.

    The scheduler's own id does as well.
    Raises: CourseError for an id that no submission has
    """
    found = re.fullmatch(ID, text)
    everything = read_submissions(folder)
    for one in reversed(everything):
        if found and found["id"] in (one.id, one.job_id):
            element = int(found["element"]) if found["element"] else None
            if element is None or element in one.job.elements:
                return one, element
    there = ", ".join(one.id for one in everything[-5:]) or "none yet"
    raise CourseError(
        f"course: need the id of a submission; got {text!r}. There are: {there}. Try course status."
    )


def scheduler_of(name: str, folder: Path = FOLDER) -> Scheduler:
    """The scheduler of a profile or a submission: "slurm" or "local"."""
    return Slurm() if name == "slurm" else LocalRunner(folder / LOCAL_JOBS)


def refresh(one: Submission, folder: Path = FOLDER) -> Submission:
    """Ask the scheduler how it is, and remember the answer."""
    if one.job_id is None:
        with only_me(folder):  # whoever hands it in holds this
            one = settle(read_submission(one.folder), folder)
    return settle(one, folder)


def settle(one: Submission, folder: Path = FOLDER) -> Submission:
    """`refresh` for who is the only one already."""
    if one.is_over:
        return one
    scheduler = scheduler_of(one.scheduler, folder)
    job_id = one.job_id or scheduler.find(one.token)
    if job_id is None:
        never = JobState(element=0, state="CANCELLED", reason="was never handed in")
        known = replace(one, seen=tuple(replace(never, element=k) for k in one.job.elements))
    else:
        before = {state.element: state for state in one.seen}
        states = (_remember(new, before.get(new.element)) for new in scheduler.states(job_id))
        known = replace(one, job_id=job_id, seen=tuple(states))
    if known != one:
        known.write()
    return known


def _remember(new: JobState, old: JobState | None) -> JobState:
    """What was final and is forgotten now stays what it was; a log keeps its place."""
    if old is None or new.state != GONE:
        return new
    return old if old.is_final else replace(new, log=old.log, restarts=old.restarts)


@contextmanager
def only_me(folder: Path = FOLDER) -> Iterator[None]:
    """Hand in alone: two at once would both find the last free place."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        yield
