"""Lesson 05: other right answers pass as well, and its script runs on ranks."""

import argparse
import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.presets import find_model
from course_lib.core.records import read_runs
from course_lib.models import GPT
from tests.cluster_exercises.scripts_on_ranks import said_by

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/05_data_parallel.py"


def broadcast_then_copy(module):
    with torch.no_grad():
        for tensor in [*module.buffers(), *module.parameters()]:
            mine = tensor.clone()
            dist.broadcast(mine, 0)
            tensor.copy_(mine)


def one_message_a_dtype(module):
    everything = [tensor.data for tensor in [*module.parameters(), *module.buffers()]]
    for dtype in (torch.int64, torch.float64):
        some = [tensor for tensor in everything if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in some])
        dist.broadcast(flat, 0)
        parts = flat.split([tensor.numel() for tensor in some])
        for tensor, part in zip(some, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def all_under_way_at_once(module):
    tensors = [*module.parameters(), *module.buffers()]
    for work in [dist.broadcast(tensor.detach(), 0, async_op=True) for tensor in tensors]:
        work.wait()


def divide_first(module):
    for param in module.parameters():
        if param.grad is not None:
            param.grad = param.grad / dist.get_world_size()
            dist.all_reduce(param.grad)


def one_bucket(module):
    trained = [param for param in module.parameters() if param.grad is not None]
    flat = torch.cat([param.grad.flatten() for param in trained])
    dist.all_reduce(flat, async_op=True).wait()
    for param, part in zip(trained, flat.split([x.numel() for x in trained]), strict=True):
        param.grad.copy_(part.view(param.shape) / dist.get_world_size())


def in_blocks(n, rank, p, epoch):
    random = torch.Generator().manual_seed(1000 + epoch)
    order = torch.randperm(n, generator=random).repeat(p)
    return order[rank * -(-n // p) : (rank + 1) * -(-n // p)]


def global_state_put_back(n, rank, p, epoch):
    with torch.random.fork_rng():
        torch.manual_seed(epoch)
        order = torch.randperm(n).tolist()
    return tuple(order[i % n] for i in range(rank, -(-n // p) * p, p))


def by_pytorch(n, rank, p, epoch):
    sampler = DistributedSampler(range(n), p, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def with_where(loss, num_items):
    total = torch.tensor([float(num_items)])
    dist.all_reduce(total)
    share = dist.get_world_size() / max(1, total.item())
    none = torch.tensor(num_items == 0)
    return torch.where(none, 0.0 * loss.nan_to_num(), loss * num_items * share)


def divides_tensors(loss, num_items):
    total = torch.tensor(num_items, dtype=torch.int32)
    dist.all_reduce(total, async_op=True).wait()
    return (
        (loss if num_items else loss.nansum()) * num_items * dist.get_world_size() / total.clamp(1)
    )


def by_looking_back(order):
    found = []
    for number, worker in enumerate(order):
        back = 0
        while back < number and order[number - 1 - back] != worker:
            back += 1
        found.append(back)
    return found


def by_using_up_a_copy(order):
    order, ages, found = [*order], {}, []
    while order:
        worker = order.pop(0)
        found.append(ages.get(worker, len(found)))
        ages = {other: age + 1 for other, age in ages.items()} | {worker: 0}
    return torch.tensor(found)


def means_in_one_message(starts, params, outer):
    flat = torch.cat([param.detach().flatten() for param in params])
    dist.all_reduce(flat)
    means = flat.split([param.numel() for param in params])
    for start, mean in zip(starts, means, strict=True):
        start.grad = start - mean.view_as(start) / dist.get_world_size()
    outer.step()
    for start, param in zip(starts, params, strict=True):
        param.data.copy_(start)


def in_flight_together(starts, params, outer):
    p, works = dist.get_world_size(), []
    for start, param in zip(starts, params, strict=True):
        start.grad = start.sub(param.detach()).div_(p)
        works.append(dist.all_reduce(start.grad, async_op=True))
    for work in works:
        work.wait()
    outer.step()
    outer.zero_grad()
    torch._foreach_copy_([param.data for param in params], starts)


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("data_parallel-1", broadcast_then_copy),
        ("data_parallel-1", one_message_a_dtype),
        ("data_parallel-1", all_under_way_at_once),
        ("data_parallel-2", divide_first),
        ("data_parallel-2", one_bucket),
        ("data_parallel-3", in_blocks),
        ("data_parallel-3", global_state_put_back),
        ("data_parallel-3", by_pytorch),
        ("data_parallel-4", with_where),
        ("data_parallel-4", divides_tensors),
        ("data_parallel-5", by_looking_back),
        ("data_parallel-5", by_using_up_a_copy),
        ("data_parallel-6", means_in_one_message),
        ("data_parallel-6", in_flight_together),
    ],
)
def test_another_right_answer_passes(key, answer):
    assert find_exercise(key).verdict(answer)


def test_a_forgotten_return_is_told():
    for key in ("data_parallel-3", "data_parallel-4", "data_parallel-5"):
        with pytest.raises(CheckFailed, match="Does your function return its result"):
            find_exercise(key).verdict(lambda *args: None)


def freezes_all(module):
    module.requires_grad_(False)
    broadcast_then_copy(module)


def test_nothing_of_the_check_itself_is_shown_as_the_learners():
    with pytest.raises(CheckFailed) as caught:
        find_exercise("data_parallel-1").verdict(freezes_all)
    assert "requires_grad has changed" in str(caught.value)
    assert "line" not in str(caught.value)


@pytest.fixture(scope="module")
def script():
    """The lesson's script as a module, which ranks get by value."""
    spec = importlib.util.spec_from_file_location("script_of_05_data_parallel", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def test_the_script_trains_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"--turns 3 --model tiny --seq 8 --record-to {tmp_path}")
    ours, theirs, apart = said.splitlines()
    assert ours.startswith("     ours on 2 ranks: ")
    assert theirs.startswith("PyTorch's on 2 ranks: ")
    assert ours.endswith("replicas are equal")
    assert theirs.endswith("replicas are equal")
    assert float(apart.removeprefix("largest difference of their parameters: ")) < 1e-6
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    tensors = len(list(GPT(find_model("tiny")).parameters()))
    for record in records:  # a message a tensor by ours, one bucket by PyTorch's, in four steps
        assert {"forward", "backward", "optimizer"} <= {event.kind for event in record.events}
        sizes = [event.num_bytes for event in record.events if event.kind == "all_reduce"]
        assert sum(size > 8 for size in sizes) == 4 * (tensors + 1)


@pytest.mark.parametrize(("every", "replicas"), [(4, "equal"), (3, "different")])
def test_local_sgd_is_that_of_pytorch(pools, script, every, replicas, capsys):
    """Four steps in all: after the last of them the means are fresh, or a step old."""
    args = {"model": "tiny", "every": every, "batch": 1, "seq": 8, "turns": 3}
    pools(2).run(script.train, argparse.Namespace(**args))
    ours, theirs, apart = capsys.readouterr().out.splitlines()
    assert ours.endswith(f"replicas are {replicas}")
    assert theirs.endswith(f"replicas are {replicas}")
    assert float(apart.partition("parameters: ")[2]) < 1e-6
