"""Lesson 08: other right answers pass as well, and its script runs under torchrun."""

import subprocess
import sys
from collections import deque
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.records import read_runs
from course_lib.pipeline import Action

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/08_pipeline.py"


def by_turns(p, m):
    """Tuples, and a loop that asks at each turn what may come."""
    schedule = []
    for rank in range(p):
        actions, forwards, backwards = [], 0, 0
        while backwards < m:
            if forwards < m and forwards - backwards < p - rank:
                actions.append(("forward", rank, forwards))
                forwards += 1
            else:
                actions.append(("backward", rank, backwards))
                backwards += 1
        schedule.append(tuple(actions))
    return tuple(schedule)


def by_recursion(schedule, seconds, message_s):
    """From the other end: an action asks for what it needs."""
    ends = {}
    before = {
        action: earlier
        for actions in schedule
        for action, earlier in zip(actions, [None, *actions], strict=False)
    }

    def end_of(action):
        if action not in ends:
            free_s = end_of(before[action]) if before[action] else 0
            forward = action.kind == "forward"
            source = action.stage - 1 if forward else action.stage + 1
            input_s = 0
            if 0 <= source < len(schedule):
                input_s = end_of(Action(action.kind, source, action.micro_batch)) + message_s
            ends[action] = max(free_s, input_s) + seconds[action.kind]
        return ends[action]

    for action in before:
        end_of(action)
    return ends


def posted_ahead(actions, stage, micro_batches, loss_fn):
    """irecv, a queue, the loss in forward, autograd.grad in place of backward."""
    rank, p = dist.get_rank(), dist.get_world_size()
    params = [param for param in stage.parameters() if param.requires_grad]
    queue, handles = deque(), []
    for kind, _, i, _ in actions:
        if kind == "forward":
            x = micro_batches[i][0]
            if rank > 0:
                x = x.new_empty(x.shape)
                dist.irecv(x, rank - 1).wait()
                x = x.requires_grad_()
            out = stage(x)
            if rank < p - 1:
                handles.append(dist.isend(out.detach().clone(), rank + 1))
            else:
                out = loss_fn(out, micro_batches[i][1]).div(len(micro_batches))
            queue.append((x, out))
        else:
            x, out = queue.popleft()
            grad = None
            if rank < p - 1:
                grad = torch.zeros_like(out)
                dist.irecv(grad, rank + 1).wait()
            wanted = [*params, x] if rank > 0 else params
            found = torch.autograd.grad(out, wanted, grad)
            for param, one in zip(params, found, strict=False):
                param.grad = one if param.grad is None else param.grad + one
            if rank > 0:
                handles.append(dist.isend(found[-1], rank - 1))
            del out
    for handle in handles:
        handle.wait()


def by_bisection(layer_times, p):
    """The least bound under which p stages are enough, among all that a stage can take."""
    n = len(layer_times)

    def filled(bound):
        counts, load = [], 0.0
        for number, time_s in enumerate(layer_times):
            full = counts and load + time_s > bound + 1e-9
            needed = counts and n - number == p - len(counts)
            if not counts or full or needed:
                counts.append(0)
                load = 0.0
            counts[-1] += 1
            load += time_s
        return counts

    bounds = sorted({sum(layer_times[i:j]) for i in range(n) for j in range(i + 1, n + 1)})
    return next(counts for counts in map(filled, bounds) if len(counts) == p)


def by_messages(weight, ends):
    """A send and a receive on both ends."""
    if weight is None or not weight.requires_grad or dist.get_world_size(ends) == 1:
        return
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    other, theirs = last - rank, torch.empty_like(weight)
    sending = dist.isend(weight.grad.clone(), other)
    dist.recv(theirs, other)
    sending.wait()
    weight.grad = weight.grad + theirs


ANSWERS = (by_turns, by_recursion, posted_ahead, by_bisection, by_messages)


@pytest.mark.parametrize(("number", "answer"), list(enumerate(ANSWERS, start=1)))
def test_another_right_answer_passes(number, answer):
    assert find_exercise(f"pipeline-{number}").check(answer)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed):
        find_exercise(f"pipeline-{number}").check(lambda *args: None)


def test_the_script_measures_under_torchrun(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", "2", str(SCRIPT), "--model", "tiny"),
        *("--seq", "16", "--turns", "1", "--record-to", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    head, *rows, apart = done.stdout.splitlines()
    assert head == "tiny in 2 stages, a batch of 16"
    held = [line.strip().partition(": ")[0::2] for line in rows]
    held = {name: words.rpartition("at most ")[2] for name, words in held}
    assert held["gpipe, m = 8"] == "8, 8"
    assert held["1f1b, m = 8"] == "2, 1"
    theirs = [name for name in held if name.endswith(", PyTorch's")]
    ways = ("gpipe, m = 1", "gpipe, m = 2", "gpipe, m = 8", "1f1b, m = 2", "1f1b, m = 8")
    assert theirs == [f"{way}, PyTorch's" for way in ways]
    assert float(apart.removeprefix("largest difference of their gradients: ")) < 1e-6
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"forward", "backward", "send", "recv"} <= kinds


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "gpt9"), "model: need a preset"),
        (("--micro-batches", "3"), "--batch: need a multiple of"),
    ],
)
def test_the_script_refuses_in_one_sentence(options, says, tmp_path):
    command = [sys.executable, str(SCRIPT), "--record-to", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
