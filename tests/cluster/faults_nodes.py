"""What happens to jobs and nodes: preemption, a node that goes, a rank that dies, the time limit.

`make test-cluster` runs these; they take minutes.
"""

import os
import re
from pathlib import Path

import pytest

from course_lib.checkpoint import latest
from course_lib.core.records import read_runs

DEAD_RANK = """
import os, signal
from course_lib.ranks import launch

def work(rank):
    print("rank", rank, "is up", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    import torch
    import torch.distributed as dist
    dist.all_reduce(torch.ones(1))

launch(work, record_to="runs/mine")
"""
namespaces = pytest.mark.skipif(os.getuid() != 0, reason="a crash of a node needs root")


def counted() -> list[tuple[str, int]]:
    return [(record.run["attempt"], record.rank) for record in read_runs("runs/victim-1")]


def test_a_preempted_training_goes_on_and_no_step_is_lost_or_counted_twice(
    slurm, tmp_path, monkeypatch, course, until
):
    monkeypatch.chdir(tmp_path)
    options = ("--nodes", "2", "--gpus", "1", "--script", "requeue", "--profile", "test")
    train = ("--strategy", "ddp", "--steps", "1000", "--save-every", "50", "--global-batch", "2")
    course("submit", *options, "-m", "course_lib.train", "--", *train)
    until(lambda: latest("runs/cluster/train-1/checkpoints") is not None, "a checkpoint")
    slurm.wait(
        slurm.submit("-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    )
    course("logs", "-f", "train-1")
    assert "COMPLETED" in course("status", "train-1")
    assert "after 1 restarts" in course("collect", "train-1")
    steps: dict[int, list[int]] = {0: [], 1: []}
    for record in read_runs("runs/train-1"):
        steps[record.rank] += [step["step"] for step in record.steps]
    assert [sorted(found) for found in steps.values()] == [list(range(1000))] * 2


def test_a_job_on_a_node_that_is_taken_down_starts_again_and_counts_once(
    slurm, victim, course, until
):
    victim("early")
    slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    until(lambda: "COMPLETED" in course("status"), "it went on")
    assert "records of 2 of 2 ranks in runs/victim-1, after 1 restarts" in course("collect")
    assert counted() == [("1", 0), ("1", 1)]


@namespaces
def test_a_job_on_a_node_that_crashes_starts_again(slurm, victim, course, until):
    victim()
    slurm.crash_node(2)
    until(lambda: "PENDING" in course("status"), "it is back in the queue")
    slurm.start_node(2)
    until(lambda: "COMPLETED" in course("status"), "it went on")
    course("collect")
    assert counted() == [("1", 0), ("1", 1)]


@namespaces
def test_a_job_that_may_not_start_again_is_told_with_the_records_there_are(
    slurm, victim, course, until
):
    victim(directive="#SBATCH --no-requeue")
    slurm.crash_node(2)
    until(lambda: "NODE_FAIL" in course("status"), "the end is told")
    slurm.start_node(2)
    assert "records of 1 of 2 ranks" in course("collect")
    assert counted() == [("0", 0)]


def test_a_job_is_ended_at_its_time_limit_and_its_record_stays(slurm, victim, course, until):
    victim("early", nodes=1, time="0:01:00")
    until(lambda: "TIMEOUT" in course("status"), "it is ended")
    assert "slurmstepd" in course("logs", "victim-1")
    assert "records of 1 of 1 ranks" in course("collect")


def test_a_rank_that_is_killed_fails_the_job(slurm, tmp_path, monkeypatch, course):
    monkeypatch.chdir(tmp_path)
    Path("dies.py").write_text(DEAD_RANK)
    course("submit", "--nodes", "2", "--gpus", "1", "--profile", "test", "dies.py")
    said = course("logs", "-f", "dies-1")
    assert "rank 1 is up" in said
    assert "SIGKILL" in said
    assert "FAILED (exit code " in course("status")
    told = course("collect")
    assert re.search(r"dies-1: FAILED \(exit code \d+\): left no records; ", told)
