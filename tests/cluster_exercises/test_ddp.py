"""Lesson 06 outside of the notebook."""

import argparse
import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from course_lib.checks import find_exercise

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/06_ddp.py"

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def script():
    """The lesson's script as a module, which ranks get by value."""
    spec = importlib.util.spec_from_file_location("script_of_06_ddp", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


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


def by_using_up_the_lists(forward_s, backward_s, all_reduce_s):
    waiting, clock_s, wire_s = all_reduce_s.copy(), forward_s, 0.0
    while backward_s:
        clock_s += backward_s.pop(0)
        wire_s = max(clock_s, wire_s) + waiting.pop(0)
    return wire_s


def test_lists_are_lists():
    """What the exercise calls lists can be copied and used up, and the check goes on."""
    assert find_exercise("ddp-3").verdict(by_using_up_the_lists)
