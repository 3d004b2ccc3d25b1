"""Lesson 09: other right answers pass as well, wrong turns are told, its lab and script work."""

import runpy
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core import MODELS
from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.records import read_runs
from course_lib.core.units import GIB
from course_lib.frameworks import missing
from course_lib.memory import model_states
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.zero import FlatLayout, ZeRO1, ZeRO2, ZeRO3
from course_lib.zero import beside_frameworks as beside
from course_lib.zero.explorer import draw_stages, stages_alt
from course_lib.zero.lab import (
    H100_NUM_PARAMS,
    H100_PEAK_GIB,
    owned_after_backward,
    owned_over_time,
)
from course_lib.zero.pictures import flat_param_shards, saved_by_stage_1, stage_1_on_gpus
from tests.cluster_exercises.scripts_on_ranks import said_by

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/09_zero.py"


def by_owner_of_each(sizes, p, rank):
    """Numbers one by one, and the runs they make."""
    places = [(index, place) for index, size in enumerate(sizes) for place in range(size)]
    n = -(-len(places) // p)
    pieces = []
    for index, place in places[rank * n : rank * n + n]:
        if pieces and pieces[-1][0] == index:
            pieces[-1][2] = place + 1
        else:
            pieces.append([index, place, place + 1])
    return pieces


class InPlace:
    """Parameters are views of one row from the start; the shard is a tensor of its own."""

    def __init__(self, module, make_optimizer):
        self.params = [param for param in module.parameters() if param.requires_grad]
        numel = sum(param.numel() for param in self.params)
        p, self.n = dist.get_world_size(), -(-numel // dist.get_world_size())
        self.row = torch.zeros(self.n * p, dtype=self.params[0].dtype)
        begin = 0
        for param in self.params:
            view = self.row[begin : begin + param.numel()].view_as(param)
            view.copy_(param.data)
            param.data = view
            begin += param.numel()
        low = dist.get_rank() * self.n
        self.mine = slice(low, low + self.n)
        self.shard = nn.Parameter(self.row[self.mine].clone())
        self.optimizer = make_optimizer([self.shard])

    def step(self):
        flat = torch.zeros_like(self.row)
        flat[: sum(param.numel() for param in self.params)] = torch.cat(
            [param.grad.flatten() for param in self.params]
        )
        self.shard.grad = flat[self.mine].clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard.detach())
        self.row.copy_(torch.cat(shards))


class Counted:
    """Counts what is missing in each bucket; starts the message, then waits; adds in place."""

    def __init__(self, buckets):
        self.shards, self.missing = [None] * len(buckets), [len(bucket) for bucket in buckets]
        for n, bucket in enumerate(buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.hook_of(n, bucket))

    def hook_of(self, n, bucket):
        def hook(_param):
            self.missing[n] -= 1
            if self.missing[n]:
                return
            p = dist.get_world_size()
            parts = [param.grad.flatten() for param in bucket]
            row = torch.cat([*parts, parts[0].new_zeros(-sum(map(len, parts)) % p)]) / p
            new = row.new_zeros(len(row) // p)
            work = dist.reduce_scatter_tensor(new, row, async_op=True)
            work.wait()
            if self.shards[n] is None:
                self.shards[n] = new
            else:
                self.shards[n] += new
            for param in bucket:
                param.grad = None
            self.missing[n] = len(bucket)

        return hook


class ByAutograd(torch.autograd.Function):
    """Backward sends the shard's gradient first, and leaves that of x to autograd."""

    @staticmethod
    def forward(ctx, x, shard, layout):
        ctx.x, ctx.shard, ctx.layout = x, shard, layout
        weight, bias = gathered(shard, layout)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx, grad):
        row = ctx.layout.flatten([torch.einsum("to,ti->oi", grad, ctx.x), grad.sum(dim=0)])
        shards = [*row.chunk(ctx.layout.group_size)]
        mine = torch.empty_like(shards[0])
        dist.reduce_scatter(mine, [shard.contiguous() for shard in shards])
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = nn.functional.linear(x, *gathered(ctx.shard, ctx.layout))
        (x_grad,) = torch.autograd.grad(out, x, grad)
        return x_grad, mine.div_(ctx.layout.group_size), None


def gathered(shard, layout):
    shards = [torch.empty_like(shard) for _ in range(layout.group_size)]
    dist.all_gather(shards, shard.detach())
    return [view.detach().clone() for view in layout.views(torch.cat(shards))]


def by_vector_norm(grads, max_norm):
    flat = [torch.zeros(1, dtype=torch.double), *(grad.double().reshape(-1) for grad in grads)]
    own = torch.linalg.vector_norm(torch.cat(flat))
    square = own.square()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if norm > max_norm:
        for grad in grads:
            grad *= max_norm / norm
    return norm


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("zero-1", by_owner_of_each),
        ("zero-2", InPlace),
        ("zero-3", Counted),
        ("zero-4", ByAutograd.apply),
        ("zero-5", by_vector_norm),
    ],
)
def test_another_right_answer_passes(key, answer):
    assert find_exercise(key).verdict(answer)


@pytest.mark.parametrize("number", [1, 4, 5])
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed, match="Does your function return its result"):
        find_exercise(f"zero-{number}").verdict(lambda *args: None)


def test_ownership_over_time_ends_where_the_formula_is(pools):
    def owned(rank):
        found = []
        for stage in (ZeRO1, ZeRO2, ZeRO3):
            layers = [nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12)) for _ in range(3)]
            module = nn.Sequential(*layers)
            engine = stage(module, torch.optim.AdamW, lr=1e-3, bucket_bytes=1300)
            with owned_over_time(engine) as ledger:
                after = owned_after_backward(engine, partial(module_sum, engine))
            found.append((after, ledger))
        return found

    def module_sum(engine):
        return engine(torch.ones(2, 12)).sum()

    for by_stage in pools(2).run(owned):
        for zero, (after, ledger) in enumerate(by_stage, start=1):
            assert after == model_states(3 * 612, "fp32", parallelism=Parallelism(dp=2, zero=zero))
            last = {kind: ledger.bytes_by_kind[kind][-1] for kind in after}
            assert last == after
        most = [max(ledger.bytes_by_kind["params"]) for _, ledger in by_stage]
        assert most[0] == most[1] == 3 * 612 * 4
        assert most[2] == 3 * 612 * 4 / 2 + 312 * 4, "the shards, and one module's parameters"
        grads = [max(ledger.bytes_by_kind["grads"]) for _, ledger in by_stage]
        assert grads[0] > grads[1]


@pytest.mark.skipif(bool(missing("deepspeed")), reason="DeepSpeed is not installed")
def test_ours_and_deepspeed_keep_what_the_formula_says(pools):
    spec = replace(MODELS["tiny"], vocab=320)
    num = sum(param.numel() for param in GPT(spec).parameters())
    batch = next_tokens(token_batch(0, batch=4, seq=8, vocab=256))
    for zero, is_ours in product((1, 2, 3), (True, False)):
        _, _, kib = pools(2).run(beside.run_stage, spec, batch, zero, is_ours)[0]
        paper = sum(beside.kept_bytes(zero, num, 2, is_ours).values()) / 2**10
        assert kib == pytest.approx(paper, rel=0.01), (zero, is_ours)


def test_stage_1_saves_on_gpus_what_the_formula_says():
    for p, measured in H100_PEAK_GIB[1].items():
        left = H100_PEAK_GIB[0][p] - saved_by_stage_1(H100_NUM_PARAMS, p) / GIB
        assert measured == pytest.approx(left, rel=0.1)
    states = [
        sum(model_states(1000, "bf16", parallelism=Parallelism(dp=8, zero=zero)).values())
        for zero in (0, 1)
    ]
    assert saved_by_stage_1(1000, 8) == states[0] - states[1]
    assert stage_1_on_gpus()[1].startswith(
        "Stage 1 on 8 H100 saves 12.5 GiB of 36.7; formula: 13.1"
    )


def test_a_flat_row_needs_its_names():
    layout = FlatLayout(((2, 2), (3,)), 2)
    title = flat_param_shards(layout, ("a", "b"), "7 numbers").texts[0].get_text()
    assert title == "7 numbers"
    with pytest.raises(CourseError, match="need a name for each of 2 tensors"):
        flat_param_shards(layout, ("a",), "7 numbers")


@pytest.mark.parametrize(
    ("recipe", "p", "says"),
    [
        ("bf16", 1, "on 1 rank fit into an H100 at no stage"),
        ("bf16", 2, "on 2 ranks fit into an H100 with stage 1"),
        ("fp32", 2, "on 2 ranks fit into an H100 with stage 2"),
    ],
)
def test_the_explorer_names_the_lowest_stage_that_fits(recipe, p, says):
    assert says in stages_alt("llama-8b", recipe, p)
    assert draw_stages("llama-8b", recipe, p, "NVLink", 4)


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(
        SCRIPT, f"--model tiny --micro-batches 2 --seq 8 --turns 1 --record-to {tmp_path}"
    )
    head, *rows = said.splitlines()
    assert head == "tiny on 2 ranks, fp32, AdamW; fastest of its turns"
    told = dict(row.strip().split(": ", 1) for row in rows)
    for zero, who in product((1, 2, 3), ("ours", "PyTorch's")):
        words = told[f"stage {zero}, 2 micro-batches, {who}"]
        assert 0 < float(words.partition(" % communicating")[0].split()[-1]) <= 100
    assert float(told["largest difference of their parameters"]) < 1e-6  # of steps of 1e-4
    assert ("not installed" in told.get("DeepSpeed's", "")) == bool(missing("deepspeed"))
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"compute", "all_gather", "reduce_scatter"} <= kinds


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--model", "gpt9"), "model: need a preset"), (("--turns", "0"), "--turns above 0")],
)
def test_the_script_refuses_in_one_sentence(options, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as end:  # before any rank is there
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
