"""From `course submit` to `course collect` on a live Slurm of two nodes, and on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.core.plain_text import STRANGE
from course_lib.core.records import read_runs
from course_lib.jobs.submissions import find_submission, read_submissions

BOTH = pytest.mark.parametrize("place", ["test", "laptop"], indirect=True)
SCRIPT = """#!/bin/bash
#SBATCH --job-name=any
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --gpus-per-node=1
#SBATCH --time=0:05:00
#SBATCH --output=log.out
#SBATCH --open-mode=append
# site

# environment

"""
RECORD = """
import os, sys
from pathlib import Path
from course_lib.core.records import RunRecord
array_task = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
folder = Path(os.environ["RUN_FOLDER"]) / "records" / f"{array_task}.{attempt}"
for rank in range(int(sys.argv[1])):
    run = {"array_task": int(array_task), "attempt": int(attempt)}
    RunRecord(rank=rank, world_size=2, run=run).write(folder / f"rank{rank}.jsonl")
"""


@pytest.fixture
def place(request, tmp_path, monkeypatch) -> str:
    """The profile to submit to; the current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    if request.param == "test":
        request.getfixturevalue("slurm")
    return request.param


@pytest.fixture
def plain(tmp_path) -> str:
    """A batch script that runs its program without torchrun."""
    path = tmp_path / "plain.sbatch"
    path.write_text(SCRIPT + 'python "$@"\n')
    return str(path)


def program(text: str) -> str:
    Path("program.py").write_text(text)
    return "program.py"


# ---- the whole way ---------------------------------------------------------------------------


@BOTH
def test_words_of_a_program_arrive_untouched(place, plain, course):
    name = './-a "program\'s"; $(touch harm) `touch harm`\n.py'
    Path(name).write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    words = ["a b", "it's", '"quoted"', "$(touch harm)", "`touch harm`", "$HOME", "*", "", "a\\b"]
    words += [
        "; touch harm",
        "--flag=x y",
        "ä",
        "-n",
        "new\nline",
        "!!",
        "# no comment",
        "--array=0-3",
    ]
    course("submit", "--script", plain, "--profile", place, name, "--", *words)
    (one,) = read_submissions()
    assert json.loads(course("logs", "-f", one.id)) == words
    assert not Path("harm").exists()


@BOTH
def test_output_that_is_no_text_can_be_read_along(place, plain, course):
    text = program(
        "import sys\n"
        "sys.stdout.buffer.write(b'one\\x00\\xff\\x1b[2J\\x1b]0;title\\x07\\r')\n"
        "sys.stdout.buffer.write(b'\\xe2\\x82\\xac two\\n')\n"
        "sys.stdout.buffer.write(bytes(range(256)))\n"
    )
    course("submit", "--script", plain, "--profile", place, text)
    said = course("logs", "-f", "program-1")
    assert said.splitlines()[:2] == [f"one{STRANGE}{STRANGE}{STRANGE}]0;title{STRANGE}", "€ two"]
    assert all(c.isprintable() or c in "\n\t" for c in said)


def test_ctrl_c_ends_the_reading_and_not_the_job(tmp_path, monkeypatch, plain, course):
    def typed(_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    text = program("import time\ntime.sleep(1000)\n")
    course("submit", "--script", plain, "--profile", "laptop", text)
    with monkeypatch.context() as while_reading:
        while_reading.setattr("course_lib.jobs.logs.time.sleep", typed)
        told = course("logs", "-f", "program-1", fails=True)
    assert told.endswith("\nprogram-1 goes on; course cancel program-1 would end it.\n")
    assert "is cancelled" in course("cancel", "program-1")
    course("logs", "-f", "program-1")
    assert "CANCELLED" in course("status")


@BOTH
def test_every_array_task_is_collected_once(place, plain, course, until):
    text = program(RECORD + "sys.exit(array_task == '2')\n")
    course("submit", "--script", plain, "--profile", place, "--array", "1-3%2", text, "2")
    until(lambda: "RUNNING" not in (now := course("status")) and "PENDING" not in now, "it ended")
    assert "2 COMPLETED, 1 FAILED (exit code 1)" in course("status")
    array_tasks = [line.split()[0] for line in course("status", "program-1").splitlines()[1:]]
    assert array_tasks == ["program-1_1", "program-1_2", "program-1_3"]
    told = course("collect", "program-1")
    assert [line.partition(" in ")[0] for line in told.splitlines()] == [
        "program-1: records of 2 of 2 ranks"
    ] * 3
    found = {(record.run["array_task"], record.rank) for record in read_runs("runs")}
    assert len(read_runs("runs")) == 6
    assert found == {(array_task, rank) for array_task in (1, 2, 3) for rank in (0, 1)}
    assert course("collect") == told
    assert len(read_runs("runs")) == 6


@BOTH
def test_a_requeued_job_is_counted_once_and_the_whole_attempt_wins(place, plain, course):
    again = (
        "import subprocess, time\n"
        "print('attempt', attempt, flush=True)\n"
        "if attempt == '0':\n"
        "    subprocess.run(['scontrol', 'requeue', os.environ['SLURM_JOB_ID']])\n"
        "    time.sleep(1000)\n"
        "time.sleep(0.1)\n"
    )
    text = program(RECORD + again)
    course("submit", "--script", plain, "--profile", place, text, "2")
    said = course("logs", "-f", "program-1").splitlines()
    assert [line for line in said if "attempt" in line] == ["attempt 0", "attempt 1"]
    (state,) = find_submission("program-1")[0].seen
    assert (state.state, state.exit_code, state.restarts) == ("COMPLETED", 0, 1)
    assert "records of 2 of 2 ranks in runs/program-1, after 1 restart" in course("collect")
    assert [record.run["attempt"] for record in read_runs("runs")] == [1, 1]
    aside = sorted(path.name for path in Path("runs").rglob("*.superseded"))
    assert aside == ["rank0.jsonl.superseded", "rank1.jsonl.superseded"]


# ---- what does not get in --------------------------------------------------------------------


def test_a_refused_job_leaves_nothing_behind(slurm, tmp_path, monkeypatch, plain, course, profile):
    monkeypatch.chdir(tmp_path)
    nowhere = profile(partition="nowhere")
    told = course("submit", "--script", plain, "--profile", nowhere, program(""), fails=True)
    assert "Slurm does not take it: " in told
    assert "partition" in told
    assert read_submissions() == []
    assert [path for path in Path("runs/cluster").iterdir() if path.is_dir()] == []


@BOTH
def test_limits_are_told_before_and_count_what_waits_and_runs(place, plain, course, profile):
    two = profile(place, max_jobs=2)
    text = program("import time\ntime.sleep(1000)\n")
    ask = ("submit", "--script", plain, "--profile", two, text)
    course(*ask)
    assert "1 of 2 jobs and " in course(*ask, "--dry-run")
    assert len(read_submissions()) == 1
    course(*ask)
    for more in ((), ("--dry-run",)):
        told = course(*ask, *more, fails=True)
        assert "need at most 2 jobs at a time; got 2 and 1 more" in told
    course("cancel", "program-1")
    course("logs", "-f", "program-1")
    course(*ask)
    assert [one.id for one in read_submissions()] == ["program-1", "program-2", "program-3"]
    for name in ("program-2", "program-3"):
        course("cancel", name)
        course("logs", "-f", name)
    assert {state.state for one in read_submissions() for state in one.seen} == {"CANCELLED"}


def test_gpu_hours_are_told_before(slurm, tmp_path, monkeypatch, plain, course, profile):
    monkeypatch.chdir(tmp_path)
    one_hour = profile(gpu_hours=1.0)
    text = program("import time\ntime.sleep(1000)\n")
    ask = ("submit", "--script", plain, "--profile", one_hour, "--gpus", "2", text)
    told = course(*ask, "--time", "0:40:00", fails=True)
    assert "need at most 1.0 GPU hours; got 0.0 used or asked for and 1.3 more" in told
    course(*ask, "--time", "0:20:00")
    assert "0.7 of 1.0 GPU hours" in course(*ask, "--time", "0:20:00", "--dry-run", fails=True)
    course("cancel", "program-1")
    course("logs", "-f", "program-1")
    assert "0.0 of 1.0 GPU hours" in course(*ask, "--time", "0:20:00", "--dry-run")


@BOTH
def test_of_two_submits_at_once_only_one_gets_the_last_place(place, plain, course, profile):
    one_job = profile(place, max_jobs=1)
    text = program("import time\ntime.sleep(1000)\n")
    command = [sys.executable, "-m", "course_lib.cli", "submit", "--script", plain]
    both = [
        subprocess.Popen([*command, "--profile", one_job, text], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    assert sum("need at most 1 jobs at a time" in text for text in told) == 1
    (one,) = read_submissions()
    course("cancel", one.id)
    course("logs", "-f", one.id)


# ---- one array task, and ids ---------------------------------------------------------------------


def test_one_array_task_is_cancelled_by_its_id(slurm, tmp_path, monkeypatch, plain, course, until):
    monkeypatch.chdir(tmp_path)
    text = program(
        "import os, time\n"
        "while not os.path.exists('go'):\n    time.sleep(0.1)\nprint('went', flush=True)\n"
    )
    course("submit", "--script", plain, "--profile", "test", "--array", "0-1", text)
    until(lambda: "2 RUNNING" in course("status"), "both run")
    course("cancel", "program-1_1")
    Path("go").touch()
    assert course("logs", "-f", "program-1_0") == "went\n"
    until(lambda: "1 COMPLETED, 1 CANCELLED" in course("status"), "both ended")
    one, array_task = find_submission("program-1_0")
    by_job, same = find_submission(f"{one.job_id}_0")
    assert (by_job.id, array_task, same) == ("program-1", 0, 0)


def test_an_unknown_id_is_told_with_those_there_are(tmp_path, monkeypatch, course):
    monkeypatch.chdir(tmp_path)
    for command in ("logs", "cancel", "collect", "status"):
        assert "got 'ddp-7'. There are: none yet" in course(command, "ddp-7", fails=True)
