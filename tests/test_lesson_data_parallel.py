"""Lesson 05: other right answers pass as well, and its script runs under torchrun."""

import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.records import read_runs

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[1] / "cluster/exercises/05_data_parallel.py"


def broadcast_then_copy(module):
    with torch.no_grad():
        for tensor in [*module.buffers(), *module.parameters()]:
            mine = tensor.clone()
            dist.broadcast(mine, 0)
            tensor.copy_(mine)


def divide_first(module):
    for param in module.parameters():
        if param.grad is not None:
            param.grad = param.grad / dist.get_world_size()
            dist.all_reduce(param.grad)


def in_blocks(n, rank, p, epoch):
    random = torch.Generator().manual_seed(1000 + epoch)
    order = torch.randperm(n, generator=random).repeat(p)
    return order[rank * -(-n // p) : (rank + 1) * -(-n // p)]


def with_where(loss, num_items):
    total = torch.tensor([float(num_items)])
    dist.all_reduce(total)
    share = dist.get_world_size() / total.item()
    return torch.where(loss.isnan(), 0.0 * loss.nan_to_num(), loss * num_items * share)


def by_looking_back(order):
    found = []
    for number, worker in enumerate(order):
        back = 0
        while back < number and order[number - 1 - back] != worker:
            back += 1
        found.append(back)
    return found


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("data_parallel-1", broadcast_then_copy),
        ("data_parallel-2", divide_first),
        ("data_parallel-3", in_blocks),
        ("data_parallel-4", with_where),
        ("data_parallel-5", by_looking_back),
    ],
)
def test_another_right_answer_passes(key, answer):
    assert find_exercise(key).check(answer)


def test_a_forgotten_return_is_told():
    for key in ("data_parallel-3", "data_parallel-4", "data_parallel-5"):
        with pytest.raises(CheckFailed):
            find_exercise(key).check(lambda *args: None)


def test_the_script_trains_under_torchrun(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", "2", str(SCRIPT), "--turns", "3"),
        *("--model", "tiny", "--seq", "8", "--record-to", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "replicas are equal" in done.stdout
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"forward", "backward", "optimizer", "all_reduce"} <= kinds
