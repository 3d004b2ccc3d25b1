"""What tests of clusters share: a program that waits to be hit, and a submission on disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.jobs.job import Job, fitted
from course_lib.jobs.profile import read_profile
from course_lib.jobs.scheduler import JobState
from course_lib.jobs.submissions import Submission

SCRIPT = """#!/bin/bash
#SBATCH --job-name=any
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --gpus-per-node=1
#SBATCH --time=0:05:00
#SBATCH --output=log.out
#SBATCH --open-mode=append
{directive}
# site

# environment

srun --kill-on-bad-exit=1 python "$@"
"""
VICTIM = """
import os, sys, time
from pathlib import Path
from course_lib.core.records import RunRecord
rank, attempt = int(os.environ["SLURM_PROCID"]), os.environ.get("SLURM_RESTART_COUNT", "0")
folder = Path(os.environ["RUN_FOLDER"]) / "records" / f"0.{attempt}"
record = RunRecord(rank=rank, world_size=int(os.environ["SLURM_NTASKS"]), run={"attempt": attempt})
def leave():
    record.write(folder / f"rank{rank}.jsonl")
if attempt == "0":
    if sys.argv[1] == "early" or rank == 0:
        leave()
    print("rank", rank, "is up", flush=True)
    time.sleep(1000)
leave()
"""


@pytest.fixture
def victim(slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, course, until) -> Callable:
    """Hand in a program that never ends by itself, but when it is started again.

    Rank 0 leaves its record at once, with "early" all do. Comes back when every rank is up.
    """
    monkeypatch.chdir(tmp_path)

    def hand_in(when: str = "late", *, nodes: int = 2, directive: str = "", time: str = "0:05:00"):
        script = tmp_path / "victim.sbatch"
        script.write_text(SCRIPT.format(directive=directive))
        Path("victim.py").write_text(VICTIM)
        options = ("--script", str(script), "--nodes", str(nodes), "--time", time)
        course("submit", "--profile", "test", *options, "victim.py", when)
        until(lambda: course("logs", "victim-1").count("is up") == nodes, "all ranks are up")

    return hand_in


@pytest.fixture
def submission(tmp_path, monkeypatch):
    """A submission, as it lies on disk, with states for its array tasks."""
    monkeypatch.chdir(tmp_path)

    def make(
        *states: str, array: str = "", restarts: int = 0, log: str = "", **words
    ) -> Submission:
        folder = tmp_path / "runs" / "cluster" / "ddp-1"
        folder.mkdir(parents=True, exist_ok=True)
        asked = Job(name="ddp", program="ddp.py", array=array, run_folder=str(folder))
        job = fitted(replace(asked, **words), read_profile("test"))
        one = Submission(
            id="ddp-1",
            folder=folder,
            job=job,
            profile="test",
            scheduler="local",
            when="2026-01-01T00:00:00+00:00",
            token="a",
            job_id="17",
            seen=tuple(
                JobState(
                    array_task=array_task, state=state, restarts=restarts, seconds=360, log=log
                )
                for array_task, state in zip(job.array_tasks, states, strict=False)
            ),
        )
        one.write()
        return one

    return make
