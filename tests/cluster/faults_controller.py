"""Slurm's controller is away: what is asked is asked again, and then there is one clear sentence.

`make test-cluster` runs these; Slurm's own commands wait seconds before they give up.
"""

from functools import partial
from pathlib import Path

import pytest

from course_lib.jobs.slurm import Slurm
from course_lib.jobs.submissions import read_submissions

SILENT = "need an answer of Slurm's controller; got 'Unable to contact slurm controller"


@pytest.fixture
def away(slurm, monkeypatch, until):
    """End the controller; it comes back when it was missed as often as is said."""

    def go(missed: float, pauses_s: tuple[float, ...] = (0.1,)) -> list[str]:
        said: list[str] = []

        def say(sentence: str) -> None:
            said.append(sentence)
            if len(said) == missed:
                slurm.start_controller()
                states = ("sinfo", "-h", "-N", "-o", "%t")
                until(lambda: "unk" not in slurm.run(*states).stdout, "it knows its nodes")

        impatient = partial(Slurm, pauses_s=pauses_s, say=say)
        monkeypatch.setattr("course_lib.jobs.submissions.Slurm", impatient)
        slurm.stop_controller()
        return said

    yield go
    if slurm.run("scontrol", "ping", check=False).returncode:
        slurm.start_controller()


def test_a_submit_waits_for_the_controller(slurm, tmp_path, monkeypatch, course, away):
    monkeypatch.chdir(tmp_path)
    Path("program.py").touch()
    said = away(missed=2, pauses_s=(0.1, 0.2))
    course("submit", "--profile", "test", "program.py")
    assert said == [
        f"Slurm's controller does not answer; asking again in {s} s." for s in (0.1, 0.2)
    ]
    (one,) = read_submissions()
    course("cancel", one.id)


def test_a_submit_gives_up_with_one_sentence_and_leaves_nothing(
    slurm, tmp_path, monkeypatch, course, away
):
    monkeypatch.chdir(tmp_path)
    Path("program.py").touch()
    away(missed=float("inf"))
    told = course("submit", "--profile", "test", "program.py", fails=True)
    assert f"sbatch: {SILENT} (connect failure)', 2 times." in told
    assert len(told.splitlines()) == 1
    assert read_submissions() == []
    assert [path for path in Path("runs/cluster").iterdir() if path.is_dir()] == []


def test_who_follows_waits_for_the_controller(slurm, victim, course, until, away):
    victim("early", nodes=1)
    away(missed=1)
    assert "is up" in course("logs", "victim-1")
    assert "RUNNING" in course("status")
    course("cancel", "victim-1")
    assert "CANCELLED" in course("logs", "-f", "victim-1") + course("status")
    assert "records of 1 of 1 ranks" in course("collect")


def test_who_follows_is_told_and_the_job_goes_on(slurm, victim, course, away):
    victim("early", nodes=1)
    away(missed=float("inf"))
    assert SILENT in course("logs", "-f", "victim-1", fails=True)
    told = course("status")
    assert "RUNNING" in told
    assert SILENT in told
    assert SILENT in course("cancel", "victim-1", fails=True)
    slurm.start_controller()
    assert "RUNNING" in course("status")
    course("cancel", "victim-1")
