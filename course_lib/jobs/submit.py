"""Turn a job into a submission: make its folder, render, check, and submit it.

Everything that could be said against it is said before: by the rules of `course lint-job`, by the
scheduler, and by the profile's limits.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.jobs.job import Job, fitted
from course_lib.jobs.lint.check import LintFinding, lint_job
from course_lib.jobs.profile import Profile
from course_lib.jobs.render import render
from course_lib.jobs.scheduler import NoAnswerError, SchedulerError
from course_lib.jobs.submissions import (
    FOLDER,
    Submission,
    at_once,
    only_me,
    read_submissions,
    scheduler_of,
    settle,
)

SCRIPT = "script.sbatch"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A job with its script and the objections to it, before it is submitted.

    limits    how much of the profile's limits is taken, and what this job adds
    problems  sentences: the findings of `course lint-job`, the limits, and the scheduler's word
    """

    submission: Submission
    script: Path
    limits: str
    problems: tuple[str, ...]


def submit_job(
    job: Job, profile: Profile, folder: Path = FOLDER, *, say: Callable[[str], object] | None = None
) -> Submission:
    """Check a job and submit it; its run folder becomes the submission's own.

    `say` is told before how much of the limits is taken.
    Raises: CourseError with everything that speaks against it; then nothing is left behind
    """
    with drafted(job, profile, folder) as draft:
        if draft.problems:
            raise CourseError("\n".join([f"{job.name} is not handed in:", *draft.problems]))
        if say:
            say(draft.limits)
        asked = draft.submission
        asked.write()
        try:
            scheduler = scheduler_of(profile.scheduler, folder)
            job_id = scheduler.submit(draft.script, asked.job, asked.token)
        except NoAnswerError:
            raise  # it may be in: `settle` finds out
        except CourseError:
            asked.file.unlink()
            raise
        taken = replace(asked, job_id=job_id)
        taken.write()
        with suppress(SchedulerError):  # it is in; how it is can be asked later
            taken = settle(taken, folder)
        return taken


@contextmanager
def drafted(job: Job, profile: Profile, folder: Path = FOLDER) -> Iterator[Draft]:
    """Yield a job with its folder, script and checks; the folder is removed unless it is submitted.

    Raises: CourseError for a job that the profile does not have, and a folder that cannot be made
    """
    job = fitted(job, profile)
    with only_me(folder):
        own = _new_folder(job.name, folder)
        try:
            yield _draft(replace(job, run_folder=str(own)), profile, folder)
        except OSError as problem:
            raise CourseError(
                f"course submit: need to write in {own}; got {problem.strerror}. Make room and try "
                "again; if the job is in all the same, course status shows it."
            ) from problem
        finally:
            if not (own / "submission.json").exists():
                shutil.rmtree(own)


def _new_folder(name: str, folder: Path) -> Path:
    paths = (folder.resolve() / f"{name}-{number}" for number in count(1))
    path = next(path for path in paths if not path.exists())
    path.mkdir()
    return path


def _draft(job: Job, profile: Profile, folder: Path) -> Draft:
    own = Path(job.run_folder)
    script, text = own / SCRIPT, render(job, profile)
    script.write_text(text, encoding="utf-8")
    before = [one for one in read_submissions(folder) if one.profile == profile.name]
    told, refused = limits_of([settle(one, folder) for one in before], job, profile)
    try:
        scheduler_of(profile.scheduler, folder).check(script)
    except NoAnswerError:
        raise
    except SchedulerError as problem:
        refused.append(str(problem))
    return Draft(
        submission=Submission(
            id=own.name,
            folder=own,
            job=job,
            profile=profile.name,
            scheduler=profile.scheduler,
            when=datetime.now(UTC).isoformat(timespec="microseconds"),
            token=f"{own.name}:{uuid.uuid4().hex}",
        ),
        script=script,
        limits=told,
        problems=(*(in_words(one) for one in lint_job(text, Path.cwd(), profile)), *refused),
    )


def limits_of(before: Sequence[Submission], job: Job, profile: Profile) -> tuple[str, list[str]]:
    """Return the use of the profile's limits, in words, and the limits this job would break."""
    limits, refused = profile.limits, []
    jobs, hours = sum(one.jobs_left for one in before), sum(one.gpu_hours for one in before)
    told = (
        f"profile {profile.name}: {jobs} of {limits.max_jobs} jobs and {hours:.1f} of "
        f"{limits.gpu_hours:.1f} GPU hours are taken; this adds {at_once(job)} and at most "
        f"{job.gpu_hours:.1f}."
    )
    if jobs + at_once(job) > limits.max_jobs:
        refused.append(
            f"profile {profile.name}: need at most {limits.max_jobs} jobs at a time; got {jobs} "
            f"and {at_once(job)} more. Try again when some have ended, or course cancel ID; of an "
            "array, --array 0-7%2 runs two at a time."
        )
    if hours + job.gpu_hours > limits.gpu_hours:
        refused.append(
            f"profile {profile.name}: need at most {limits.gpu_hours:.1f} GPU hours; got "
            f"{hours:.1f} used or asked for and {job.gpu_hours:.1f} more. Try a shorter --time or "
            "fewer GPUs, or ask who runs the course for more."
        )
    return told, refused


def in_words(finding: LintFinding) -> str:
    """Return a finding as one line."""
    return f"line {finding.line}: {finding.what}: {finding.why}. {finding.fix}"
