"""Lesson 10: other right answers pass as well, engines stand beside ours, and its script runs."""

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.records import read_runs
from course_lib.fsdp import beside_frameworks as beside
from course_lib.fsdp.cost import fsdp_moves
from course_lib.ranks import RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/10_fsdp.py"
WAYS = ("freed", "kept", "no prefetch", "bf16", "PyTorch, freed")


class Storage:
    """A row made empty, parameters that keep their views, a list for the all_gather."""

    def __init__(self, module):
        self.params = [*module.parameters()]
        numel = sum(param.numel() for param in self.params)
        self.p, rank = dist.get_world_size(), dist.get_rank()
        self.n = -(-numel // self.p)
        row = torch.zeros(self.n * self.p, dtype=self.params[0].dtype)
        begin = 0
        for param in self.params:
            view = row[begin : begin + param.numel()].view(param.shape)
            view.copy_(param.detach())
            param.data = view
            begin += param.numel()
        self.shard = torch.nn.Parameter(row[rank * self.n : (rank + 1) * self.n].clone())
        self.row, self.size = row, row.untyped_storage().nbytes()
        self.free()

    def gather(self):
        self.row.untyped_storage().resize_(self.size)
        dist.all_gather([*self.row.chunk(self.p)], self.shard.detach())

    def free(self):
        self.row.untyped_storage().resize_(0)


class Counting:
    """Counts gradients; a started message; adds in place; hooks as closures."""

    def __init__(self, module, unit):
        left = [len(unit.params)]

        def after(_module, _args, output):
            unit.free()
            if torch.is_grad_enabled():
                output.register_hook(again)

        def again(_grad):
            unit.gather()

        def arrive(_param):
            left[0] -= 1
            if left[0] == 0:
                row = torch.zeros(unit.layout.padded_numel, dtype=unit.shard.dtype)
                for view, param in zip(unit.layout.views(row), unit.params, strict=True):
                    view.copy_(param.grad)
                    param.grad = None
                row /= dist.get_world_size()
                mean = torch.zeros_like(unit.shard)
                dist.reduce_scatter_single(mean, row, async_op=True).wait()
                if unit.shard.grad is None:
                    unit.shard.grad = mean
                else:
                    unit.shard.grad += mean
                unit.free()
                left[0] = len(unit.params)

        module.register_forward_pre_hook(lambda _module, _args: unit.gather())
        module.register_forward_hook(after)
        for param in unit.params:
            param.register_post_accumulate_grad_hook(arrive)


def by_the_plan(num_units, reshard_after_forward, prefetch):
    """The library's own plan, whose unit 0 is the root: take it out, and count from 0."""
    ways = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
    kinds = ("gather", "forward", "backward", "free")
    moves = fsdp_moves(num_units + 1, **ways)
    return tuple((m.kind, m.unit - 1) for m in moves if m.unit and m.kind in kinds)


ANSWERS = (Storage, Counting, by_the_plan)


@pytest.mark.parametrize(("number", "answer"), list(enumerate(ANSWERS, start=1)))
def test_another_right_answer_passes(number, answer):
    assert find_exercise(f"fsdp-{number}").check(answer)


@pytest.mark.parametrize("number", range(1, 5))
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed):
        find_exercise(f"fsdp-{number}").check(lambda *args: None)


@pytest.mark.parametrize("task", beside.TASKS)
def test_pytorch_beside_ours_computes_the_same_and_sends_no_less(pools, task):
    ours, theirs = (
        pools(2).run(beside.run_framework, name, task, 2)[0] for name in ("ours", "PyTorch")
    )
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=1e-5)
    assert ours.sent <= 1.01 * theirs.sent, "PyTorch is told to free the root, too"
    assert theirs.sent <= 1.5 * 4 * 1.05, "1.5 times what plain data parallelism sends"
    assert ours.kept == pytest.approx(6, rel=0.05), "12 bytes a parameter, halved"


@pytest.mark.parametrize("task", beside.TASKS)
def test_two_ranks_learn_what_one_learns(pools, task):
    one, two = (pools(p).run(beside.train_alike, task, 12)[0][0] for p in (1, 2))
    assert two == pytest.approx(one, rel=1e-3)
    assert one[-1] < 0.9 * one[0]


def test_an_engine_that_nobody_knows_is_told(pools):
    with pytest.raises(RankError, match="need one of ours, PyTorch"):
        pools(1).run(partial(beside.run_framework, name="Torch"))


@pytest.fixture(scope="module")
def script():
    """The lesson's script as a module, which ranks get by value."""
    spec = importlib.util.spec_from_file_location("script_of_10_fsdp", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def test_the_script_measures_under_torchrun(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            "2",
            str(SCRIPT),
            "--model",
            "bert-tiny",
        ),
        *("--seq", "8", "--turns", "1", "--record-to", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for way in WAYS:
        assert f"{way}: " in done.stdout
    *_, apart = done.stdout.splitlines()
    told = apart.removeprefix("largest difference of their parameters, freed: ")
    assert float(told) < 1e-6  # of steps of 1e-4
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"compute", "all_gather", "reduce_scatter"} <= kinds


def test_the_script_measures_a_gpt_as_well(pools, script):
    arguments = script.read_arguments(["--model", "tiny", "--seq", "8", "--turns", "1"])
    for seconds in pools(2).run(script.sweep, arguments):
        assert tuple(seconds) == WAYS
        assert min(seconds.values()) > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--model", "gpt9"), "model: need a preset"), (("--seq", "1"), "--seq above 1")],
)
def test_the_script_refuses_in_one_sentence(script, options, says, capsys):
    with pytest.raises(SystemExit):
        script.read_arguments(options)
    assert says in capsys.readouterr().err.splitlines()[-1]
