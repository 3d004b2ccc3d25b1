"""Lesson 10: engines stand beside ours, and its script runs."""

from functools import partial

import pytest
import torch

from course_lib.core.records import read_runs
from course_lib.fsdp import beside_frameworks as beside
from course_lib.ranks import RankError
from tests.cluster_exercises.scripts_on_ranks import said_by, script_of

SCRIPT = "10_fsdp"
WAYS = ("freed", "kept", "no prefetch", "bf16", "PyTorch, freed")


@pytest.fixture
def script():
    return script_of(SCRIPT)


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
