"""Lesson 05's script trains on ranks."""

import argparse

import pytest

from course_lib.core.presets import find_model
from course_lib.core.records import read_runs
from course_lib.models import GPT
from tests.cluster_exercises.scripts_on_ranks import said_by, script_of

SCRIPT = "05_data_parallel"


@pytest.fixture
def script():
    return script_of(SCRIPT)


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
