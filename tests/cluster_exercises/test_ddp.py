"""Lesson 06 outside of the notebook."""

import argparse
import sys

import cloudpickle
import pytest
import torch
from torch import nn

from tests.cluster_exercises.scripts_on_ranks import script_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def script():
    return script_of("06_ddp")


def test_the_script_measures_every_bucket_size_and_pytorchs(pools, script, capsys):
    args = {"model": "tiny", "sizes": [0.1, 0.25], "batch": 1, "seq": 8, "turns": 1}
    names = ["0.1 MiB", "0.25 MiB", "one bucket", "no overlap", "PyTorch"]
    for found in pools(2).run(script.sweep, argparse.Namespace(**args)):
        assert list(found) == names
        assert min(found.values()) > 0
    head, *rows, apart = capsys.readouterr().out.splitlines()
    assert "2 ranks, gradients of 0.5 MiB" in head
    messages = [int(row.partition(": ")[2].split()[0]) for row in rows]
    assert messages[0] > messages[1] > messages[2] == messages[4] == 1
    assert float(apart.partition("of their gradients: ")[2]) < 1e-6


def two_layers(rank, script):
    """How far apart two layers' gradients are, of inputs that differ on one rank."""
    ours, theirs = nn.Linear(1, 1), nn.Linear(1, 1)
    ours(torch.ones(1)).backward()
    theirs(torch.ones(1) * 10**rank).backward()
    return script.grads_apart(ours, theirs)


def test_gradients_that_differ_on_one_rank_are_told(pools, script):
    assert pools(2).run(two_layers, script) == [9, 9]
