"""Lesson 07: other right answers pass as well, wrong turns are told, its script runs."""

import re
import runpy
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.records import read_runs
from course_lib.tensor_parallel import copy_to_region, reduce_from_region
from tests.cluster_exercises.scripts_on_ranks import said_by

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/07_tensor_parallel.py"


def summed(x):
    parts = x.new_empty(x.shape).copy_(x)
    handle = dist.all_reduce(parts, async_op=True)
    handle.wait()
    return parts


class Both(torch.autograd.Function):
    """f and g in one: which way sums is an argument."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward = forward
        return summed(x) if forward else x

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.forward else summed(grad), None


def both_in_one(x, part):
    return Both.apply(part(Both.apply(x, False)), True)


def without_calls_on_one_rank(x, part):
    return part(x) if dist.get_world_size() == 1 else both_in_one(x, part)


class Narrowed(nn.Module):
    """Whole layers are cut with narrow and clone; f stands outside of the product."""

    def __init__(self, up, down):
        super().__init__()
        p, rank, width = dist.get_world_size(), dist.get_rank(), up.out_features
        size = width // p + (rank < width % p)
        start = rank * (width // p) + min(rank, width % p)
        self.mine = torch.arange(width)[start : start + size]  # indices are no weights
        with torch.no_grad():
            self.up_weight = nn.Parameter(up.weight.narrow(0, start, size).clone())
            self.up_bias = nn.Parameter(up.bias.narrow(0, start, size).clone())
            self.down_weight = nn.Parameter(down.weight.narrow(1, start, size).clone())
            self.down_bias = nn.Parameter(down.bias.clone())

    def forward(self, x):
        inner = F.gelu(F.linear(copy_to_region(x), self.up_weight, self.up_bias))
        out = reduce_from_region(inner @ self.down_weight.T)
        return out.add(self.down_bias)


def by_reshaping(rank, p, num_heads, num_kv_heads, head_dim):
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim)
    sizes = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return torch.cat([part.view(p, -1)[rank] for part in rows.split(sizes)])


class OwnBackward(torch.autograd.Function):
    """softmax - 1 at the target, written out; the sum and the logit in one message."""

    @staticmethod
    def forward(ctx, logits, targets, first):
        top = logits.max(-1).values
        dist.all_reduce(top, dist.ReduceOp.MAX)
        exps = (logits - top[:, None]).exp()
        at = F.one_hot(targets.clamp(min=0), 1000)[:, first : first + logits.shape[1]]
        both = torch.stack([exps.sum(-1), ((logits - top[:, None]) * at).sum(-1)])
        dist.all_reduce(both)
        counts = (targets >= 0).double()
        ctx.save_for_backward((exps / both[0][:, None] - at) * (counts / counts.sum())[:, None])
        return ((both[0].log() - both[1]) * counts).sum() / counts.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None, None


def with_own_backward(logits, targets, first):
    return OwnBackward.apply(logits, targets, first)


def in_float32_or_wider(logits, targets, first):
    """Sum this rank's log-sum-exp instead of its exponentials; leave out what has no target."""
    keep = targets != -100
    wide, targets = logits[keep].to(torch.promote_types(logits.dtype, torch.float32)), targets[keep]
    own = wide.logsumexp(-1)
    top = own.detach().clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    is_target = torch.arange(first, first + logits.shape[1]) == targets[:, None]
    logit = torch.where(is_target, wide - top[:, None], 0).sum(-1)
    both = reduce_from_region(torch.stack([(own - top).exp(), logit]))
    return (both[0].log() - both[1]).mean()


def by_halves(compute_s, batch, seq, hidden, p, link):
    shard = batch * seq * hidden * 2 / p
    return compute_s / p + 4 * 2 * sum(link.time_s(shard) for _ in range(p - 1))


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("tensor_parallel-1", both_in_one),
        ("tensor_parallel-1", without_calls_on_one_rank),
        ("tensor_parallel-2", Narrowed),
        ("tensor_parallel-3", by_reshaping),
        ("tensor_parallel-4", with_own_backward),
        ("tensor_parallel-4", in_float32_or_wider),
        ("tensor_parallel-5", by_halves),
    ],
)
def test_another_right_answer_passes(key, answer):
    assert find_exercise(key).verdict(answer)


class Nothing(nn.Module):
    def __init__(self, up, down):
        super().__init__()

    def forward(self, x):
        return x


@pytest.mark.parametrize("number", range(1, 6))
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed):
        find_exercise(f"tensor_parallel-{number}").verdict(lambda *args: None)


def test_an_empty_module_is_told():
    with pytest.raises(CheckFailed, match=r"need up_weight as an nn\.Parameter"):
        find_exercise("tensor_parallel-2").verdict(Nothing)


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"--model tiny --batches 1 --seq 16 --turns 2 --record-to {tmp_path}")
    head, *rows, apart = said.splitlines()
    assert head == "a model on 2 ranks; forward and backward, fastest turn"
    found = {name.strip(): told for name, _, told in (row.partition(": ") for row in rows)}
    kinds = ("batch 1", "batch 1, sequence parallel")
    assert list(found) == [f"{kind}, {who}" for kind in kinds for who in ("ours", "PyTorch's")]
    shares = [float(re.search(r"([\d.]+) % communication", told)[1]) for told in found.values()]
    assert 0 < min(shares) <= max(shares) <= 100
    sent = [told.rpartition(", ")[2].strip() for told in found.values()]
    assert sent[0] == sent[1]  # PyTorch sends what we send
    assert 0 < float(apart.removeprefix("largest difference of their gradients: ")) < 1e-6
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"compute", "all_reduce", "all_gather", "reduce_scatter"} <= kinds


def test_the_script_refuses_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--model", "gpt9"])
    with pytest.raises(SystemExit) as end:  # before any rank is there
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 2
    assert "model: need a preset" in capsys.readouterr().err.splitlines()[-1]
