"""Lesson 04 outside of the notebook."""

import argparse
import re

import pytest

from course_lib.core import Link, RunRecord
from course_lib.display.last_run import BUILT_IN, MESSAGE, OUR_RING, marked_times_s
from tests.cluster_exercises.scripts_on_ranks import script_of


@pytest.fixture
def script():
    return script_of("04_collectives")


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_script_measures_every_call_and_size(pools, script, world_size, capsys):
    arguments = argparse.Namespace(sizes=[1, 100], turns=1)
    for found in pools(world_size).run(script.sweep, arguments):
        assert list(found)[-len(script.CALLS) :] == list(script.CALLS)
        for by_size in found.values():
            assert list(by_size) == ([1024, 102400] if world_size == 1 else [1020, 102396])
            assert min(by_size.values()) > 0
    rows = capsys.readouterr().out
    for name in script.CALLS:
        assert len(re.findall(rf"\] *{name} +[\d.,]+ K?i?B: ", rows)) == 2


def test_what_the_script_marks_is_what_the_notebook_reads(pools, script):
    ranks = pools(3)
    ranks.run(script.sweep, argparse.Namespace(sizes=[1, 100], turns=2))
    events = [[event for event in ranks.events if event.rank == rank] for rank in range(3)]
    found = marked_times_s(
        [RunRecord(rank=r, world_size=3, events=e) for r, e in enumerate(events)]
    )
    assert found.keys() == {MESSAGE, *script.CALLS} >= {OUR_RING, BUILT_IN}
    for by_size in found.values():
        assert [(n, len(times)) for n, times in by_size.items()] == [(1020, 2), (102396, 2)]


def test_times_that_no_wire_explains_are_told(script, capsys):
    assert script.fitted({1024: 0.2, 102400: 0.1}) is None
    assert "need times that grow with the size" in capsys.readouterr().out


def test_a_row_has_the_formula_beside_the_measurement(script):
    link = Link(name="a", latency_s=0, bytes_per_s=1e9)
    told = script.line("all_reduce, our ring", 2 * 10**6, 0.004, 2, link)
    assert told.endswith("4 ms, on paper     2 ms, bus bandwidth 500 MB/s")
