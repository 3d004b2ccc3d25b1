"""Lesson 00: other right answers than the reference pass as well, and small slips are named."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, check, find_exercise
from course_lib.core.records import read_runs
from course_lib.ranks import Ranks

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/00_hello_ranks.py"


def pass_a_token(rank, world_size, say):
    token = torch.zeros(1)
    if rank > 0:
        dist.recv(token, rank - 1)
    say()
    if rank < world_size - 1:
        dist.send(token, rank + 1)


def no_last_barrier(rank, world_size, say):
    for _ in range(rank):
        dist.barrier()
    say()
    for _ in range(world_size - 1 - rank):
        dist.barrier()


def broadcast_after_each_turn(rank, world_size, say):
    for turn in range(world_size):
        if turn == rank:
            say()
        dist.broadcast(torch.zeros(1), src=turn)


def divide_first(x):
    mean = x / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def isend_and_wait(x, rank, left, right):
    received = torch.empty_like(x)
    sending = dist.isend(x, right)
    dist.recv(received, left)
    sending.wait()
    return received


def start_both(x, rank, left, right):
    received = torch.empty_like(x)
    started = [dist.irecv(received, left), dist.isend(x, right)]
    for one in started:
        one.wait()
    return received


def batch_both(x, rank, left, right):
    received = torch.empty_like(x)
    both = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, received, left)]
    for one in dist.batch_isend_irecv(both):
        one.wait()
    return received


def rank_0_sends_first(x, rank, left, right):
    received = torch.empty_like(x)
    if rank == 0:
        dist.send(x, right)
    dist.recv(received, left)
    if rank != 0:
        dist.send(x, right)
    return received


def reduce_to_rank_0(rank, loss, log):
    dist.reduce(loss, dst=0)
    if rank == 0:
        log(loss.item())


def multiply_by_a_third(x):
    mean = x.clone()
    dist.all_reduce(mean)
    return mean * (1 / dist.get_world_size())


def rank_from_a_mesh(node, local_rank, ranks_per_node):
    mesh = torch.arange((node + 1) * ranks_per_node).reshape(-1, ranks_per_node)
    return mesh[node, local_rank]


def gather_to_rank_0(rank, loss, log):
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.gather(loss, losses if rank == 0 else None, dst=0)
    if rank == 0:
        log(sum(losses))


def all_gather_and_sum(rank, loss, log):
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    dist.barrier()
    if rank == 0:
        log(sum(losses))


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("ranks-1", rank_from_a_mesh),
        ("ranks-3", multiply_by_a_third),
        ("ranks-5", gather_to_rank_0),
        ("ranks-5", all_gather_and_sum),
        ("ranks-2", pass_a_token),
        ("ranks-2", no_last_barrier),
        ("ranks-2", broadcast_after_each_turn),
        ("ranks-3", divide_first),
        ("ranks-4", isend_and_wait),
        ("ranks-4", start_both),
        ("ranks-4", rank_0_sends_first),
        ("ranks-4", batch_both),
        ("ranks-5", reduce_to_rank_0),
    ],
)
def test_another_right_answer_passes(key, answer):
    assert find_exercise(key).verdict(answer)


def test_a_number_that_is_no_whole_number_is_told():
    with pytest.raises(CheckFailed, match=r"got 0\.0\. An int is needed"):
        find_exercise("ranks-1").verdict(
            lambda node, local_rank, size: node / 1 * size + local_rank
        )


def test_a_rooted_collective_orders_only_those_it_tells():
    def reduce_after_each_turn(rank, world_size, say):
        for turn in range(world_size):
            if turn == rank:
                say()
            dist.reduce(torch.zeros(1), dst=turn)

    with pytest.raises(CheckFailed, match="speaks before it can know"):
        find_exercise("ranks-2").verdict(reduce_after_each_turn)


def test_a_forgotten_return_is_told():
    with pytest.raises(CheckFailed, match="Does your function return its result"):
        find_exercise("ranks-3").verdict(lambda x: None)


def test_the_notebooks_own_ranks_do_not_travel():
    with Ranks(1) as ranks, pytest.raises(CheckFailed, match=r"use dist\.get_world_size\(\)"):
        check("ranks-3", lambda x: x / ranks.world_size)


def test_what_a_reduction_returns_is_nothing():
    with pytest.raises(CheckFailed, match=r"got None\. all_reduce and reduce return nothing"):
        find_exercise("ranks-5").verdict(lambda rank, loss, log: log(dist.all_reduce(loss)))


def test_another_error_on_a_ring_gets_no_hint():
    def divides(x, rank, left, right):
        return x / len(())[0]

    with pytest.raises(CheckFailed, match=r"raised TypeError") as caught:
        find_exercise("ranks-4").verdict(divides)
    assert "neighbours" not in str(caught.value)


def test_one_rank_is_singular():
    def one_barrier_more_if_alone(rank, world_size, say):
        no_last_barrier(rank, world_size, say)
        for _ in range(2 // world_size):
            dist.barrier()

    with pytest.raises(CheckFailed, match="on 1 rank, a rank makes 2 calls; 1 is enough"):
        find_exercise("ranks-2").verdict(one_barrier_more_if_alone)


def test_two_calls_are_over_the_budget():
    def twice(x):
        total = x.clone()
        dist.reduce(total, dst=0)
        dist.broadcast(total, src=0)
        return total / dist.get_world_size()

    with pytest.raises(CheckFailed, match="makes 2 calls, reduce of 12 bytes and broadcast"):
        find_exercise("ranks-3").verdict(twice)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_script_speaks_in_turn_and_leaves_records(tmp_path, world_size):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(world_size)]
    command = [*torchrun, str(SCRIPT), "--record-to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *hello, total = done.stdout.splitlines()
    assert hello == [
        f"rank {rank} of {world_size}: local rank {rank} on node 0" for rank in range(world_size)
    ]
    assert total == "the sum over all ranks is " + "1" * world_size
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == list(range(world_size))
    turns = [e for record in records for e in record.events if e.kind == "compute"]
    assert all(before.end_s <= after.start_s for before, after in pairwise(turns))
    assert all(-1 < event.start_s < 60 for record in records for event in record.events)
