"""Lesson 11's script times every order of the axes."""

import pytest

from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import said_by, script_of

SCRIPT = "11_mesh"
SMALL = ("--model", "tiny", "--batch", "4", "--seq", "8", "--num-micro-batches", "2")


@pytest.fixture
def script():
    return script_of(SCRIPT)


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
