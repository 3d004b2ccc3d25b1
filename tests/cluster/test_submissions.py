"""Submissions, their records and their logs, without any scheduler."""

import json
import shutil
from pathlib import Path

import pytest

from course_lib.core.errors import CourseError
from course_lib.core.records import RunRecord, read_runs
from course_lib.jobs.collect import collect
from course_lib.jobs.job import Job
from course_lib.jobs.profile import find_cluster_folder, read_profile
from course_lib.jobs.scheduler import GONE, JobState, NoAnswerError, SchedulerError
from course_lib.jobs.submissions import Submission, find_submission, read_submissions, refresh
from course_lib.jobs.submit import limits_of, submit_job
from course_lib.ranks.launch import attempt_folder

PLAIN = """#!/bin/bash
#SBATCH --nodes=1
# site

# environment

python "$@"
"""
DONE, FAILED, RUNNING = "COMPLETED", "FAILED", "RUNNING"


def leave(one: Submission, attempt: str, ranks: int = 2, world_size: int = 2) -> None:
    for rank in range(ranks):
        record = RunRecord(rank=rank, world_size=world_size, run={"attempt": attempt})
        record.write(one.folder / "records" / attempt / f"rank{rank}.jsonl")


def counted(folder: str = "runs") -> list[tuple[str, int]]:
    return [(record.run["attempt"], record.rank) for record in read_runs(folder)]


# ---- collect ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempts", "counts"),
    [
        ({"0.0": 2}, "0.0"),
        ({"0.0": 2, "0.1": 2}, "0.1"),
        ({"0.0": 2, "0.1": 1}, "0.0"),
        ({"0.0": 1, "0.1": 1}, "0.1"),
        ({"0.2": 2, "0.10": 2}, "0.10"),
    ],
)
def test_of_each_array_task_one_attempt_counts(submission, attempts, counts):
    one = submission(DONE, restarts=10)
    for attempt, ranks in attempts.items():
        leave(one, attempt, ranks)
    (found,) = collect(one)
    assert counted() == [(counts, rank) for rank in range(attempts[counts])]
    assert (found.restarts, found.folder) == (int(counts[2:]), Path("runs/ddp-1"))
    assert len(list(Path("runs").rglob("rank*.jsonl*"))) == sum(attempts.values())
    assert collect(one) == [found]
    assert len(counted()) == attempts[counts]


def test_an_attempt_after_the_first_collect_takes_the_place_of_the_one_before(submission):
    one = submission(DONE)
    leave(one, "0.0")
    collect(one)
    leave(one, "0.1")
    assert [found.restarts for found in collect(one)] == [1]
    assert counted() == [("0.1", 0), ("0.1", 1)]
    leave(one, "0.2", ranks=1)
    assert [found.restarts for found in collect(one)] == [1]
    assert counted() == [("0.1", 0), ("0.1", 1)]
    assert len(list(Path("runs").rglob("rank*.jsonl*"))) == 5


def test_what_runs_is_left_alone(submission):
    one = submission(DONE, RUNNING, array="0-1")
    leave(one, "0.0")
    leave(one, "1.0", ranks=1)
    assert [found.array_task for found in collect(one)] == [0]
    assert (one.folder / "records" / "1.0" / "rank0.jsonl").exists()
    assert counted("runs/ddp-1") == [("0.0", 0), ("0.0", 1)]


def test_a_collect_that_is_cut_short_is_put_right(submission, monkeypatch):
    one = submission(DONE)
    leave(one, "0.0")
    leave(one, "0.1")
    true_rename, left = Path.rename, 2

    def breaks(path, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return true_rename(path, target)

    with monkeypatch.context() as cut_short:
        cut_short.setattr(Path, "rename", breaks)
        with pytest.raises(KeyboardInterrupt):
            collect(one)
    collect(one)
    assert counted() == [("0.1", 0), ("0.1", 1)]


def test_where_nothing_came_home_it_says_why(submission, course, monkeypatch):
    submission(DONE, FAILED, array="0-1")
    assert course("collect").splitlines() == [
        "ddp-1: COMPLETED: left no records. Its program needs launch(..., record_to=...).",
        "ddp-1: FAILED: left no records; course logs ddp-1 may say why.",
    ]
    submission(RUNNING)
    monkeypatch.setattr(
        "course_lib.jobs.submissions.scheduler_of", lambda *_: Deaf(CourseError(), "17")
    )
    told = "ddp-1: RUNNING: no records yet. Collect again when it has ended.\n"
    assert course("collect") == told


def test_records_that_a_program_leaves_in_the_run_folder_come_along(submission):
    one = submission(DONE, restarts=1)
    for name, attempt in (("rank0", "first"), ("rank0-from5", "second")):
        RunRecord(rank=0, world_size=1, run={"attempt": attempt}).write(
            one.folder / f"{name}.jsonl"
        )
    (found,) = collect(one)
    assert (found.is_whole, counted("runs/ddp-1")) == (True, [("second", 0), ("first", 0)])


def test_each_attempt_of_each_array_task_has_a_folder(monkeypatch):
    for name in ("RUN_FOLDER", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert attempt_folder("runs/mine") == Path("runs/mine")
    monkeypatch.setenv("RUN_FOLDER", "/runs/cluster/ddp-1")
    assert attempt_folder("runs/mine") == Path("/runs/cluster/ddp-1/records/0.0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert attempt_folder("runs/mine") == Path("/runs/cluster/ddp-1/records/3.2")


# ---- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "jobs", "hours"),
    [
        ((), 2, 4.0),  # 2 GPUs, 4 array tasks of half an hour, two at a time
        ((RUNNING,) * 4, 2, 4.0),
        ((DONE, FAILED, DONE, RUNNING), 1, 3 * 0.2 + 1.0),  # 6 minutes with 2 GPUs each
        ((DONE, FAILED, DONE, DONE), 0, 4 * 0.2),
        ((GONE, DONE, DONE, DONE), 0, 1.0 + 3 * 0.2),
    ],
)
def test_limits_count_what_waits_runs_and_is_done(submission, states, jobs, hours):
    one = submission(*states, array="0-3%2")
    assert (one.jobs_left, one.gpu_hours) == (jobs, pytest.approx(hours))
    told, refused = limits_of([one], one.job, read_profile("test"))
    assert told.startswith(
        f"profile test: {jobs} of 16 jobs and {hours:.1f} of 64.0 GPU hours are taken"
    )
    assert refused == []


# ---- handing in ------------------------------------------------------------------------------


class Deaf:
    """A scheduler that takes a job, and whose answer gets lost, or that refuses it."""

    def __init__(self, answer: Exception, found: str | None) -> None:
        self.answer, self.found = answer, found

    def check(self, script: Path) -> None: ...

    def submit(self, script: Path, job: Job, token: str) -> str:
        raise self.answer

    def find(self, token: str) -> str | None:
        return self.found

    def states(self, job_id: str) -> list[JobState]:
        return [JobState(array_task=0, state=RUNNING)]


@pytest.fixture
def deaf(tmp_path, monkeypatch):
    """Hand a job in to a deaf scheduler; returns the error."""
    monkeypatch.chdir(tmp_path)

    def do(answer: Exception, found: str | None = None) -> str:
        for module in ("submit", "submissions"):
            monkeypatch.setattr(
                f"course_lib.jobs.{module}.scheduler_of", lambda *_: Deaf(answer, found)
            )
        job = Job(name="ddp", program="ddp.py", run_folder="runs")
        with pytest.raises(CourseError) as error:
            submit_job(job, read_profile("laptop"))
        return str(error.value)

    return do


@pytest.mark.parametrize(("found", "state"), [("17", RUNNING), (None, "CANCELLED")])
def test_a_job_whose_answer_got_lost_is_looked_for(deaf, found, state):
    assert deaf(NoAnswerError("no answer"), found) == "no answer"
    (one,) = read_submissions()
    assert one.job_id is None
    now = refresh(one)
    assert (now.job_id, [each.state for each in now.seen]) == (found, [state])
    assert read_submissions() == [now]


def test_a_refused_job_is_not_there(deaf):
    assert deaf(SchedulerError("too many")) == "too many"
    assert read_submissions() == []


def test_a_full_disk_is_told_and_a_job_that_is_in_is_not_lost(deaf):
    told = deaf(OSError(28, "No space left on device"), found="17")
    assert "got No space left on device. Make room" in told
    (one,) = read_submissions()
    assert refresh(one).job_id == "17"


def test_a_file_that_nobody_wrote_is_told(submission):
    one = submission(DONE)
    assert read_submissions() == [one]
    one.file.write_text(json.dumps({"id": "ddp-1"}))
    with pytest.raises(CourseError, match="need what `course submit` wrote"):
        read_submissions()


def test_a_spoilt_mark_of_an_attempt_is_told(submission):
    one = submission(DONE)
    leave(one, "0.0")
    collect(one)
    (mark,) = Path("runs").rglob("attempt")
    for spoilt in ("", "x", "../..", "0.9999999999"):
        mark.write_text(spoilt)
        with pytest.raises(CourseError, match="attempt: need the number of an array task"):
            collect(one)


def test_ids_are_those_of_the_course_or_of_the_scheduler(submission):
    one = submission(DONE, DONE, array="3-4")
    for text, array_task in (("ddp-1", None), ("17", None), ("ddp-1_4", 4), ("17_3", 3)):
        assert find_submission(text) == (one, array_task)
    for text in ("ddp-2", "ddp", "1", "ddp-1_5", "ddp-1_x", ""):
        with pytest.raises(CourseError, match=r"There are: ddp-1\."):
            find_submission(text)


def test_in_a_folder_of_the_course_submissions_are_the_courses(tmp_path, monkeypatch, course):
    notebooks, elsewhere = tmp_path / "course" / "notebooks", tmp_path / "elsewhere"
    for folder in (tmp_path / "course" / "cluster", notebooks, elsewhere):
        folder.mkdir(parents=True)
    shutil.copytree(find_cluster_folder(), tmp_path / "course" / "cluster", dirs_exist_ok=True)
    monkeypatch.chdir(notebooks)
    Path("said.py").write_text("from pathlib import Path\nprint(Path('data').read_text())\n")
    Path("data").write_text("beside the notebooks\n")
    Path("plain.sbatch").write_text(PLAIN)
    ask = ("submit", "--script", "plain.sbatch", "--profile", "laptop", "said.py")
    assert f"from {tmp_path / 'course'}. Try" in course("status")
    assert "said-1 is handed in on this machine, as job " in course(*ask)
    assert course("logs", "-f", "said-1") == "beside the notebooks\n\n"
    assert (tmp_path / "course/runs/cluster/said-1/submission.json").exists()
    assert (Path.cwd(), list(notebooks.glob("runs"))) == (notebooks, [])
    for folder, there in ((tmp_path / "course", True), (notebooks, True), (elsewhere, False)):
        monkeypatch.chdir(folder)
        assert ("said-1" in course("status")) == there
