"""Lesson 08: other right answers pass as well, and its script runs on ranks."""

import math
import runpy
import sys
from collections import deque
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.links import Link
from course_lib.core.records import read_runs
from course_lib.pipeline import (
    Action,
    PipelineTimes,
    gpipe,
    naive,
    one_f_one_b,
    simulate,
)
from tests.cluster_exercises.scripts_on_ranks import said_by

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/08_pipeline.py"


def by_turns(p, m):
    """Tuples of actions, and a loop that asks at each turn what may come."""
    schedule = []
    for rank in range(p):
        actions, forwards, backwards = [], 0, 0
        while backwards < m:
            if forwards < m and forwards - backwards < p - rank:
                actions.append(Action("forward", rank, forwards))
                forwards += 1
            else:
                actions.append(Action("backward", rank, backwards))
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
    """Receives posted one message ahead, the loss in forward, autograd.grad, x not named again."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), len(micro_batches)
    params = [param for param in stage.parameters() if param.requires_grad]
    like = {i: x for i, (x, _) in enumerate(micro_batches)}
    coming = {"forward": deque(), "backward": deque()}
    orders = {kind: iter([i for k, _, i, _ in actions if k == kind]) for kind in coming}
    sources = {"forward": rank - 1, "backward": rank + 1}
    in_flight, back = {}, None

    def post(kind):
        i = next(orders[kind], None)
        if i is not None and 0 <= sources[kind] < p:
            buffer = like[i].new_empty(like[i].shape, dtype=params[0].dtype)
            coming[kind].append((buffer, dist.irecv(buffer, sources[kind])))

    def arrived(kind):
        post(kind)
        buffer, handle = coming[kind].popleft()
        handle.wait()
        return buffer

    post("forward")
    post("backward")
    for kind, _, i, _ in actions:
        if kind == "forward":
            x, handle = like[i], None
            if rank > 0:
                x = arrived(kind).requires_grad_()
            out = stage(x)
            if rank < p - 1:
                handle = dist.isend(out.detach().clone(), rank + 1)
            else:
                out = loss_fn(out, micro_batches[i][1]).div(m)
            in_flight[i] = x, out, handle
        else:
            grad = arrived(kind) if rank < p - 1 else None
            x, out, handle = in_flight.pop(i)
            if handle:
                handle.wait()
            wanted = [*params, x] if rank > 0 else params
            found = torch.autograd.grad(out, wanted, grad)
            for param, one in zip(params, found, strict=False):
                param.grad = one if param.grad is None else param.grad + one
            if rank > 0:
                if back:
                    back.wait()
                back = dist.isend(found[-1], rank - 1)
    if back:
        back.wait()


class _Runner:
    """The engine as a class, with what it keeps in dictionaries."""

    def __init__(self, stage, micro_batches, loss_fn):
        self.stage, self.micro_batches, self.loss_fn = stage, micro_batches, loss_fn
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.inputs, self.outputs, self.ahead, self.back = {}, {}, [], []

    def receive(self, shape, source):
        """A tensor of the dtype of the stage, from a neighbor."""
        dtype = next(self.stage.parameters()).dtype
        made = torch.zeros(shape, dtype=dtype)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, made, source)])[0].wait()
        return made

    def forward(self, i):
        """The next micro-batch goes in."""
        x, _ = self.micro_batches[i]
        if self.rank:
            x = self.receive(x.shape, self.rank - 1).requires_grad_()
        self.inputs[i] = x
        self.outputs[i] = self.stage(x)
        if self.rank < self.last:
            self.ahead.append(dist.isend(self.outputs[i].detach(), self.rank + 1))

    def backward(self, i):
        """A micro-batch comes out."""
        grad = torch.tensor(1 / len(self.micro_batches), dtype=self.outputs[i].dtype)
        if self.rank < self.last:
            grad = self.receive(self.outputs[i].shape, self.rank + 1)
            self.ahead.pop(0).wait()
        else:
            self.outputs[i] = self.loss_fn(self.outputs[i], self.micro_batches[i][1])
        torch.autograd.backward([self.outputs.pop(i)], [grad])
        x = self.inputs.pop(i)
        if self.rank:
            while self.back:
                self.back.pop().wait()
            self.back.append(dist.isend(x.grad.contiguous(), self.rank - 1))


def by_a_class(actions, stage, micro_batches, loss_fn):
    """Methods named like the kinds of actions."""
    runner = _Runner(stage, micro_batches, loss_fn)
    for action in actions:
        getattr(runner, action.kind)(action.micro_batch)
    for work in runner.ahead + runner.back:
        work.wait()


def in_parts(weight, ends):
    """Gather both halves, and add them up in place."""
    if getattr(weight, "grad", None) is not None:
        halves = [torch.empty_like(weight.grad) for _ in range(dist.get_world_size(ends))]
        dist.all_gather(halves, weight.grad, group=ends)
        torch.add(torch.zeros_like(weight.grad), sum(halves), out=weight.grad)


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
    members = dist.get_process_group_ranks(ends)
    other = members[dist.get_rank() == members[0]]
    theirs = torch.empty_like(weight)
    sending = dist.isend(weight.grad.clone(), other)
    dist.recv(theirs, other)
    sending.wait()
    weight.grad = weight.grad + theirs


ANSWERS = (
    (1, by_turns),
    (2, by_recursion),
    (3, posted_ahead),
    (3, by_a_class),
    (4, by_bisection),
    (5, by_messages),
    (5, in_parts),
)


@pytest.mark.parametrize(("number", "answer"), ANSWERS)
def test_another_right_answer_passes(number, answer):
    assert find_exercise(f"pipeline-{number}").verdict(answer)


def test_the_right_order_is_the_courses():
    right = find_exercise("pipeline-1").right
    sizes = [(p, m) for p in range(1, 7) for m in range(1, 10)]
    assert all(right(p, m) == one_f_one_b(p, m) for p, m in sizes)


@pytest.mark.parametrize("make", [naive, gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 2), (5, 7)])
def test_the_right_ends_are_the_simulators(make, p, m):
    times = PipelineTimes(
        forward_s=1.5,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        link=Link(latency_s=0.25, bytes_per_s=math.inf),
    )
    played, schedule = simulate(make(p, m), times), make(p, m)
    ends = find_exercise("pipeline-2").right(schedule, {"forward": 1.5, "backward": 2.0}, 0.25)
    for actions, ends_s in zip(schedule, played.ends_s, strict=True):
        assert [ends[action] for action in actions] == pytest.approx(ends_s)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed):
        find_exercise(f"pipeline-{number}").verdict(lambda *args: None)


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"--model tiny --seq 16 --turns 1 --record-to {tmp_path}")
    head, *rows, apart = said.splitlines()
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
def test_the_script_refuses_in_one_sentence(options, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as end:  # before any rank is there
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
