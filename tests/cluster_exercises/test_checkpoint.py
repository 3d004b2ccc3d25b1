"""Lesson 14's script measures saves on ranks, and a forgotten return is told."""

import importlib.util
from pathlib import Path

import pytest

from course_lib.checks import CheckFailed, find_exercise
from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import said_by

SCRIPT = Path(__file__).parents[2] / "cluster/exercises/14_checkpoint.py"


class Returns:
    """Nothing, whatever is called."""

    def save(self, *given):
        """Return nothing."""

    load = __init__ = lambda self, *given: None


@pytest.mark.parametrize("number", range(1, 5))
def test_a_forgotten_return_is_told(number):
    answer = Returns if number == 3 else lambda *args: None
    with pytest.raises(CheckFailed):
        find_exercise(f"checkpoint-{number}").verdict(answer)


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(
        SCRIPT, f"--model tiny --turns 1 --folder {tmp_path}/saved --record-to {tmp_path}/r"
    )
    for way in ("save: ", "save_async: ", "PyTorch's DCP: ", "load: ", "best interval with save: "):
        assert way in said
    assert not (tmp_path / "saved").exists()
    labels = {event.label for record in read_runs(tmp_path / "r") for event in record.events}
    assert {"save", "save_async", "PyTorch's DCP"} <= labels


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "gpt9"), "model: need a preset"),
        (("--mtbf-hours", "0"), "--mtbf-hours above 0"),
    ],
)
def test_the_script_refuses_in_one_sentence(options, says, capsys):
    spec = importlib.util.spec_from_file_location("script_of_14_checkpoint", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit):
        script.read_arguments(options)
    assert says in capsys.readouterr().err.splitlines()[-1]
