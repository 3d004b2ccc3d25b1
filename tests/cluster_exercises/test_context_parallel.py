"""Lesson 15's script times every form of context-parallel attention."""

import pytest

from course_lib.context_parallel.cost import AttentionSizes
from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import said_by, script_of

SCRIPT = "15_context_parallel"
SMALL = ("--seqs", "16", "--heads", "4", "--kv-heads", "2", "--head-dim", "4", "--turns", "1")


@pytest.fixture
def script():
    return script_of(SCRIPT)


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"{' '.join(SMALL)} --record-to {tmp_path}")
    head, *forms, apart = said.splitlines()
    assert head == "16 tokens on 2 ranks, zigzag; forward and backward"
    assert {line.split(":")[0].strip() for line in forms} == {"ring", "all-gather", "Ulysses"}
    assert float(apart.rpartition(" ")[2]) < 1e-5
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"compute", "send", "all_gather", "reduce_scatter", "all_to_all"} <= kinds


def test_every_length_has_its_forms(pools, script):
    words = ["--seqs", "16", "24", "--layout", "striped", *SMALL[2:]]
    arguments = script.read_arguments(words)
    for found in pools(4).run(script.sweep, arguments):
        assert list(found) == [16, 24]
        for seconds in found.values():
            assert set(seconds) == {"ring", "all-gather", "Ulysses"}
            assert min(seconds.values()) > 0


def test_ulysses_is_left_out_where_the_ranks_do_not_divide_the_heads(script):
    sizes = AttentionSizes(seq=16, num_heads=4, kv_heads=2, head_dim=4)
    assert script.forms_for(sizes, 4) == ["ring", "all-gather", "Ulysses"]  # copies of KV heads
    assert script.forms_for(sizes, 3) == ["ring", "all-gather"]
