"""Lesson 14's script measures saves on ranks."""

from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import said_by

SCRIPT = "14_checkpoint"


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(
        SCRIPT, f"--model tiny --turns 1 --folder {tmp_path}/saved --record-to {tmp_path}/r"
    )
    for way in ("save: ", "save_async: ", "PyTorch's DCP: ", "load: ", "best interval with save: "):
        assert way in said
    assert not (tmp_path / "saved").exists()
    labels = {event.label for record in read_runs(tmp_path / "r") for event in record.events}
    assert {"save", "save_async", "PyTorch's DCP"} <= labels
