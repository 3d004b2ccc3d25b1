"""Lesson 11: its script times every order of the axes, and refuses what does not fit."""

import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import said_by

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/11_mesh.py"
SMALL = ("--model", "tiny", "--batch", "4", "--seq", "8", "--num-micro-batches", "2")


@pytest.mark.parametrize("number", range(1, 5))
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed):
        find_exercise(f"mesh-{number}").verdict(lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def script():
    """The lesson's script as a module, which ranks get by value."""
    spec = importlib.util.spec_from_file_location("script_of_11_mesh", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"{' '.join(SMALL)} --mesh dp=1,tp=2 --turns 1 --record-to {tmp_path}")
    head, *orders, apart = said.splitlines()
    assert head.startswith("sent by rank 0 per step: pp 0 B, dp 0 B, tp ")
    assert head.endswith("2 ranks per node")
    assert [line.split(":")[0].strip() for line in orders] == ["tp"]
    assert all(line.endswith("no axis between nodes") for line in orders)
    assert float(apart.removeprefix("largest difference of their losses: ")) < 1e-5
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"compute", "all_reduce"} <= kinds


def test_every_order_takes_its_turns(pools, script):
    arguments = script.read_arguments([*SMALL, "--turns", "1", "--mesh", "dp=2,tp=2"])
    for seconds in pools(4).run(script.sweep, arguments):
        assert set(seconds) == {"dp tp", "tp dp"}
        assert min(seconds.values()) > 0


def test_the_table_names_the_axes_that_cross_nodes(script, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    steps = script.planned(script.read_arguments([*SMALL, "--mesh", "dp=2,tp=2"]))
    script.print_table({"dp tp": 1.0, "tp dp": 2.0}, steps)
    head, fast, slow = capsys.readouterr().out.splitlines()
    assert head.endswith("2 ranks per node")
    assert fast.split(": ")[0].strip() == "dp tp"
    assert fast.endswith(", dp between nodes")
    assert slow.endswith(", tp between nodes")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--mesh", "dp=2,sp=2"), "need axes out of"),
        (("--model", "gpt9"), "model: need a preset"),
        (("--mesh", "dp=3"), "need batch divisible by dp"),
        (("--mesh", "tp=3"), "need num_heads of small divisible by tp"),
        (("--turns", "0"), "--turns above 0"),
    ],
)
def test_the_script_refuses_in_one_sentence(script, options, says, capsys):
    with pytest.raises(SystemExit):
        script.read_arguments(options)
    assert says in capsys.readouterr().err.splitlines()[-1]
