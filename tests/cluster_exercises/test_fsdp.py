"""Lesson 10: a forgotten return is told, engines stand beside ours, and its script runs."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.records import read_runs
from course_lib.fsdp import beside_frameworks as beside
from course_lib.ranks import RankError
from tests.cluster_exercises.scripts_on_ranks import said_by

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/10_fsdp.py"
WAYS = ("freed", "kept", "no prefetch", "bf16", "PyTorch, freed")


@pytest.mark.parametrize("number", range(1, 5))
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed):
        find_exercise(f"fsdp-{number}").verdict(lambda *args: None)


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


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"--model bert-tiny --seq 8 --turns 1 --record-to {tmp_path}")
    for way in WAYS:
        assert f"{way}: " in said
    *_, apart = said.splitlines()
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
