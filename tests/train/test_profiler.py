"""PyTorch's profiler of chosen steps: a trace of every rank, with the course's spans in it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import cloudpickle
import pytest

from course_lib.core import CourseError
from course_lib.train import __main__ as command_line
from course_lib.train.profiler import StepProfiler
from course_lib.train.trainer import train
from tests.train.training_runs import EXACT, refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def names_in(path):
    return [part["name"] for part in json.loads(path.read_text())["traceEvents"]]


@pytest.mark.parametrize(
    ("steps", "recorded"), [("1-2", (1, 2)), ("2", (2,)), ("0", (0,)), (None, ())]
)
def test_chosen_steps_are_recorded_on_every_rank(pools, tmp_path, steps, recorded):
    config = replace(EXACT, strategy="ddp", steps=4, out=str(tmp_path), profile=steps)
    pools(2).run(train, config)
    paths = sorted((tmp_path / "profile").glob("*"))
    assert [path.name for path in paths] == [
        f"rank{r}.pt.trace.json" for r in range(2 if steps else 0)
    ]
    for path in paths:
        names = names_in(path)
        marks = [name for name in names if name.startswith("ProfilerStep#")]
        assert sorted(set(marks)) == [f"ProfilerStep#{n}" for n in recorded]
        assert {"forward", "backward", "optimizer"} <= set(names)
        assert "gloo:all_reduce" in names
        assert names.count("forward") == len(recorded)


def test_the_losses_are_those_of_a_run_without(pools, tmp_path):
    config = replace(EXACT, strategy="ddp", steps=3)
    plain = pools(2).run(train, config)[0]
    told = pools(2).run(train, replace(config, out=str(tmp_path), profile="0-2"))[0]
    assert [step["loss"] for step in plain.steps] == [step["loss"] for step in told.steps]


def test_a_run_that_ends_before_its_last_chosen_step_keeps_what_it_has(pools, tmp_path):
    config = replace(EXACT, steps=4, out=str(tmp_path), profile="1-3", lr=1e300, every=1)
    with pytest.raises(Exception, match="need a loss that is a number"):
        pools(1).run(train, config)
    marks = names_in(tmp_path / "profile" / "rank0.pt.trace.json")
    assert "ProfilerStep#1" in marks


@pytest.mark.parametrize("text", ["4", "x", "2-1", "1-4", "-1", "", "1-"])
def test_steps_that_the_run_does_not_have_are_told(tmp_path, text):
    with pytest.raises(CourseError, match=r"--profile: need steps of the run, .* of 4 steps"):
        replace(EXACT, steps=4, out=str(tmp_path), profile=text)


def test_a_resumed_run_keeps_the_first_traces(pools, tmp_path):
    config = replace(EXACT, strategy="ddp", steps=2, out=str(tmp_path), save_every=2)
    pools(2).run(train, replace(config, profile="1"))
    pools(2).run(train, replace(config, steps=4, resume=True, profile="1-3"))
    for r in range(2):
        for name, steps in ((f"rank{r}", {1}), (f"rank{r}-from2", {2, 3})):
            assert (tmp_path / f"{name}.jsonl").is_file()
            names = names_in(tmp_path / "profile" / f"{name}.pt.trace.json")
            marks = {name for name in names if name.startswith("ProfilerStep#")}
            assert marks == {f"ProfilerStep#{n}" for n in steps}
    assert len(list((tmp_path / "profile").iterdir())) == 4


@pytest.mark.parametrize(("steps", "tries"), [(4, "--profile 2"), (2, "it without --profile")])
def test_steps_that_are_done_are_told_and_nothing_is_changed(pools, tmp_path, steps, tries):
    config = replace(EXACT, strategy="ddp", steps=2, out=str(tmp_path), save_every=2)
    pools(2).run(train, config)
    before = sorted(tmp_path.rglob("*"))
    again = replace(config, steps=steps, resume=True, profile="0-1")
    (told,) = pools(2).run(refused, [again])[0]
    assert told == (
        "--profile: need a step that is not done, 2 or later, as --resume continues at step 2; "
        f"got 0-1. Try {tries}."
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_started_again_goes_on_without_the_steps_that_are_done(
    pools, tmp_path, monkeypatch
):
    config = replace(EXACT, steps=2, out=str(tmp_path), save_every=2, profile="1")
    pools(1).run(train, config)
    assert pools(1).run(restarted, replace(config, steps=3, resume=True)) == [[2]]


def restarted(rank, config):
    """The steps of a run that Slurm has started again."""
    os.environ["SLURM_RESTART_COUNT"] = "1"
    try:
        return [step["step"] for step in train(rank, config).steps]
    finally:
        del os.environ["SLURM_RESTART_COUNT"]


def test_the_command_refuses_steps_that_are_done(tmp_path):
    command = [sys.executable, "-m", "course_lib.train", "--steps", "2", "--every", "0"]
    command += ["--save-every", "2", "--out", str(tmp_path)]
    options = {"capture_output": True, "text": True, "timeout": 100, "check": False}
    assert subprocess.run(command, **options).returncode == 0
    ended = subprocess.run([*command, "--resume", "--profile", "1"], **options)
    assert ended.returncode == 2
    assert ended.stderr.startswith("--profile: need a step that is not done, 2 or later, as ")
    assert len(ended.stderr.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_told_before_the_first_step(pools, tmp_path):
    (tmp_path / "profile").write_text("a file in the way")
    config = replace(EXACT, strategy="ddp", steps=2, out=str(tmp_path), profile="1")
    for (told,) in pools(2).run(refused, [config]):
        assert re.search(r"profile/rank0\.pt\.trace\.json: need a file that can be written", told)
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_trace_that_cannot_be_written_is_told_and_hides_no_other_error(tmp_path, capfd):
    profiler = StepProfiler(range(2), str(tmp_path), rank=0)
    profiler.check_path()
    (tmp_path / "profile").rmdir()
    with pytest.raises(CourseError, match=r"--profile: need to write .*rank0.*; got: .*Try an"):
        two_steps(profiler)
    with pytest.raises(ZeroDivisionError):
        two_steps(profiler, problem=ZeroDivisionError())


def two_steps(profiler, problem=None):
    with profiler:
        for n in range(2):
            with profiler.step(n):
                if problem:
                    raise problem


def test_it_needs_a_folder():
    with pytest.raises(CourseError, match=r"--profile: need a folder .*Try --out"):
        replace(EXACT, profile="1")


def test_the_command_says_nothing_of_the_profiler(tmp_path, capfd):
    out = str(tmp_path / "run")
    options = ["--steps", "3", "--every", "0", "--profile", "1", "--out", out]
    with pytest.raises(SystemExit) as ended:
        command_line.main(options)
    assert ended.value.code == 0
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "run" / "profile" / "rank0.pt.trace.json").is_file()
