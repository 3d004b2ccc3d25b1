"""Lesson 16's script times a layer of experts with balanced and with skewed routers."""

from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import said_by

SCRIPT = "16_experts"
SMALL = "--tokens 16 --hidden 8 --experts 4 --skews 0 2 --turns 1"


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"{SMALL} --record-to {tmp_path}")
    head, even, skewed = said.splitlines()
    assert head.startswith("16 tokens on each of 2 ranks; ")
    assert float(even.partition("mean ")[2].partition(":")[0]) < 1.2
    assert float(skewed.partition("mean ")[2].partition(":")[0]) > 1.3
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    assert {"compute", "all_to_all"} <= {e.kind for record in records for e in record.events}
