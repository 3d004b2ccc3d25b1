"""Ranks on a live Slurm of two nodes: cells, and what is left after every fault: nothing."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.ranks import RankError, Ranks

SLURM = {"cluster": "slurm", "nodes": 2, "profile": "test"}
ROOT = Path(__file__).resolve().parents[2]


def sum_of_powers(rank):
    tensor = torch.tensor([10.0**rank])
    dist.all_reduce(tensor)
    return tensor.item(), os.environ["SLURM_PROCID"]


@pytest.fixture
def here(slurm, tmp_path, monkeypatch):
    """A folder of submissions of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COURSE_TEST_MARK", str(os.getpid()))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return slurm


def queue(box):
    return box.run("squeue", "-h", "-o", "%i").stdout.split()


def is_over(box, servers):
    return not queue(box) and not servers()


def test_an_allocation_is_used_and_given_back(here, capsys, servers, until, tmp_path):
    with Ranks(4, minutes=5, **SLURM) as ranks:
        assert "2 nodes (" in capsys.readouterr().out
        assert ranks.run(sum_of_powers) == [(1111.0, node) for node in "0011"]
        ranks.cell("print(rank)", "<one>")
        assert capsys.readouterr().out == "[0] 0\n[1] 1\n[2] 2\n[3] 3\n"
        assert list((tmp_path / "runs" / "cluster" / "doors").iterdir()) == []
        shown = here.run("scontrol", "show", "job", *queue(here)).stdout
        assert "token" not in shown
        here.run("scancel", *queue(here))
        with pytest.raises(RankError, match="is CANCELLED") as caught:
            ranks.run(lambda rank: time.sleep(100))
        assert "are given back" in str(caught.value)
        until(lambda: is_over(here, servers), "nothing is left", within_s=10)
        assert ranks.run(sum_of_powers)[0] == (1111.0, "0")  # another allocation
    until(lambda: is_over(here, servers), "nothing is left", within_s=10)


def test_nothing_is_left_when_the_kernel_is_killed(here, kernel, servers, until):
    made = ", ".join(f"{name}={value!r}" for name, value in SLURM.items())
    with subprocess.Popen(kernel(made), stdout=subprocess.PIPE, text=True) as process:
        assert "Slurm job" in process.stdout.readline()
        assert process.stdout.readline() == "ready\n"
        assert len(queue(here)) == 1
        assert len(servers()) >= 6
        process.kill()
    until(lambda: is_over(here, servers), "nothing is left", within_s=10)


def test_a_crashed_node_is_told(here, servers, until):
    if not here.namespaces:
        pytest.skip("needs namespaces, to crash one node and not the other")
    with Ranks(4, **SLURM) as ranks:
        ranks.run(sum_of_powers)
        start_s = time.monotonic()

        def job(rank):
            time.sleep(1 if rank == 0 else 100)
            return rank

        threading.Timer(1.0, here.crash_node, [2]).start()
        with pytest.raises(RankError, match=r"node node[12] is gone"):
            ranks.run(job)
        assert time.monotonic() - start_s < 30
    here.start_node(2)
    until(lambda: not servers(), "nothing is left", within_s=10)
    here.cancel_all()


def test_a_full_queue_is_waited_for_and_left(here, until, servers):
    here.submit("--nodes=2", "--exclusive", "--time=5", "--wrap=sleep 100")
    first = queue(here)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 4.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            Ranks(4, **SLURM)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    until(lambda: queue(here) == first, "the request is gone", within_s=10)
    assert not servers()


def test_two_learners_at_once(here):
    one = {**SLURM, "nodes": 1}
    with Ranks(2, **one) as mine, Ranks(2, **one) as theirs:
        assert [found for found, _ in mine.run(sum_of_powers)] == [11.0, 11.0]
        assert [found for found, _ in theirs.run(sum_of_powers)] == [11.0, 11.0]
        assert len(queue(here)) == 2


def test_what_slurm_does_not_have_is_said_with_what_is_free(here, profile):
    large = profile(max_nodes=5)
    with pytest.raises(CourseError, match="Free now: 2 of 2 nodes"):
        Ranks(10, cluster="slurm", nodes=5, profile=large)
    assert queue(here) == []


def test_idle_nodes_are_given_back(here, servers, until, monkeypatch):
    with Ranks(2, cluster="slurm", nodes=1, profile="test") as ranks:
        ranks.run(sum_of_powers)
        ranks._place.nodes.idle_minutes = 0.5 / 60
        until(lambda: is_over(here, servers), "nothing is left", within_s=15)
        ranks._place.nodes.idle_minutes = 10.0
        assert ranks.run(lambda rank: rank) == [0, 1]  # asks again


def test_the_time_limit_is_warned_of_and_told(here, capsys):
    with Ranks(2, cluster="slurm", nodes=1, minutes=1, profile="test") as ranks:
        capsys.readouterr()
        with pytest.raises(RankError, match="is TIMEOUT"):
            ranks.run(lambda rank: time.sleep(1000))
        assert "ends in less than 1 min" in capsys.readouterr().out
