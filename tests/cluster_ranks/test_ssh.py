"""The same job on ranks of two hosts: results, output, events, and every report."""

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from course_lib.core.errors import CourseError, MachineError
from course_lib.ranks import RankError, Ranks


def sum_of_powers(rank):
    tensor = torch.tensor([10.0**rank])
    dist.all_reduce(tensor)
    return tensor.item()


def fails(ranks, fn):
    with pytest.raises(RankError) as caught:
        ranks.run(fn)
    assert ranks.run(sum_of_powers) == [1111.0] * 4
    return caught.value


def only_rank_0(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def other_shapes_on_each_node(rank):
    dist.all_reduce(torch.ones(1 + rank // 2))


def dies(rank):
    if rank == 3:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def raises(rank):
    if rank == 2:
        raise ValueError("forgot")


def test_a_job_is_one_world_of_both_hosts(two_hosts, capsys):
    def job(rank):
        print("here is", rank)
        return sum_of_powers(rank), int(os.environ["LOCAL_RANK"])

    assert two_hosts.run(job) == [(1111.0, local) for local in (0, 1, 0, 1)]
    assert capsys.readouterr().out == "".join(f"[{r}] here is {r}\n" for r in range(4))
    reduced = [event for event in two_hosts.events if event.kind == "all_reduce"]
    assert sorted(event.rank for event in reduced) == [0, 1, 2, 3]
    assert max(e.start_s for e in reduced) < min(e.end_s for e in reduced)  # on one clock
    assert two_hosts.output(3) == "here is 3\n"


def test_cells_keep_their_names(two_hosts, capsys):
    two_hosts.cell("x = rank + 1", "<one>")
    two_hosts.push(y=torch.tensor(10))
    two_hosts.cell("int(x * y)", "<two>")
    assert capsys.readouterr().out == "[0] 10\n[1] 20\n[2] 30\n[3] 40\n"


def test_a_large_result_comes_whole(two_hosts):
    found = two_hosts.run(lambda rank: torch.full((1_500_000,), float(rank)))
    assert [(t.numel(), t[0].item(), t[-1].item()) for t in found] == [
        (1_500_000, r, r) for r in (0.0, 1.0, 2.0, 3.0)
    ]


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (only_rank_0, "hang", "rank 0 waits in all_reduce for ranks 1, 2, 3"),
        (other_shapes_on_each_node, "mismatch", "ranks 2, 3 call all_reduce(sum) float32 [2]"),
        (dies, "died", "rank 3 died: its process ended with exit code 3"),
        (raises, "raised", "rank 2 raised ValueError: forgot"),
    ],
)
def test_a_failure_is_reported_as_on_one_machine(two_hosts, fn, kind, words):
    problem = fails(two_hosts, fn)
    assert problem.kind == kind
    assert words in str(problem)


def test_calls_that_differ_and_return_all_the_same_are_no_result(two_hosts):
    """A sum and a maximum of as many numbers: gloo returns, and the numbers are wrong."""

    def job(rank):
        op = dist.ReduceOp.SUM if rank < 2 else dist.ReduceOp.MAX
        dist.all_reduce(torch.ones(1), op=op)

    assert fails(two_hosts, job).kind == "mismatch"


def test_stop_ends_the_job_and_not_the_ranks(two_hosts):
    timer = signal.setitimer(signal.ITIMER_REAL, 1.0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        assert fails(two_hosts, lambda rank: time.sleep(1000)).kind == "stopped"
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def test_nothing_is_left_when_the_kernel_is_killed(two_hosts, kernel, shim, servers, until):
    before = servers()
    made = 'cluster="ssh", hosts=["localhost", "localhost"]'
    env = os.environ | {"COURSE_SSH": shim, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with subprocess.Popen(kernel(made), env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert len(servers() - before) == 6  # two servers, four ranks
        process.kill()
    until(lambda: not servers() - before, "all have ended", within_s=10)


def test_a_host_that_is_lost_is_told_and_asked_for_again(two_hosts):
    def job(rank):
        if rank == 2:
            os.kill(os.getppid(), signal.SIGKILL)  # its server
        time.sleep(1000)

    problem = fails(two_hosts, job)
    assert problem.kind == "died"
    assert "its node" in str(problem)
    assert "are given back" in str(problem)


def test_no_token_is_in_a_command_line(two_hosts, servers):
    for pid in servers():
        for file in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{file}", "rb") as found:
                assert b"token" not in found.read()


def test_close_leaves_nothing(two_hosts, servers, until):
    two_hosts.close()
    until(lambda: not servers(), "all have ended", within_s=10)


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        ({"cluster": "ssh"}, CourseError, "need names of hosts"),
        ({"cluster": "pbs"}, CourseError, 'need cluster="slurm" or cluster="ssh"'),
        ({"nodes": 2}, CourseError, "need cluster="),
        ({"cluster": "ssh", "hosts": ["localhost"]}, MachineError, "nobody is here"),
    ],
)
def test_what_cannot_be_is_one_sentence(wanted, error, words, monkeypatch):
    monkeypatch.setenv("COURSE_SSH", "sh -c 'echo nobody is here >&2; exit 255'")
    with pytest.raises(error, match=words):
        Ranks(4, **wanted)


def test_another_version_is_told_before_anything_runs(shim, monkeypatch):
    monkeypatch.setenv("COURSE_SSH", shim)
    monkeypatch.setattr(
        "course_lib.cluster_ranks.facts._version", lambda package: f"{package}-other"
    )
    with pytest.raises(MachineError, match=r"need torch torch-other.*as in this notebook; got"):
        Ranks(2, cluster="ssh", hosts=["localhost"])
