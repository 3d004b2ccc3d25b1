"""Lesson 07's script measures on ranks."""

import re

from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import said_by

SCRIPT = "07_tensor_parallel"


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"--model tiny --batches 1 --seq 16 --turns 2 --record-to {tmp_path}")
    head, *rows, apart = said.splitlines()
    assert head == "a model on 2 ranks; forward and backward, fastest turn"
    found = {name.strip(): told for name, _, told in (row.partition(": ") for row in rows)}
    kinds = ("batch 1", "batch 1, sequence parallel")
    assert list(found) == [f"{kind}, {who}" for kind in kinds for who in ("ours", "PyTorch's")]
    shares = [float(re.search(r"([\d.]+) % communication", told)[1]) for told in found.values()]
    assert 0 < min(shares) <= max(shares) <= 100
    sent = [told.rpartition(", ")[2].strip() for told in found.values()]
    assert sent[0] == sent[1]  # PyTorch sends what we send
    assert 0 < float(apart.removeprefix("largest difference of their gradients: ")) < 1e-6
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"compute", "all_reduce", "all_gather", "reduce_scatter"} <= kinds
