"""Lesson 13: its formulas and its lab hold, the explorer draws, own results come first."""

import itertools
import math
from pathlib import Path

import pytest

from course_lib.checks import find_exercise
from course_lib.core import CourseError
from course_lib.cost.flops import train_step_flop
from course_lib.cost.params import count_params
from course_lib.jobs.lint.check import lint_job
from course_lib.jobs.lint.script import Script
from course_lib.jobs.slurm_time import read_time_s
from course_lib.scaling_study import results as own
from course_lib.scaling_study.amdahl import StrongScaling
from course_lib.scaling_study.explorer import DEVICES, LINKS, SHOWS, STRATEGIES, draw_study, rows_of
from course_lib.scaling_study.lab import (
    BROKEN_SCRIPT,
    H100_BATCH,
    H100_TOKENS_PER_S,
    EmulatedDevice,
)
from course_lib.scaling_study.pictures import published_scaling
from course_lib.scaling_study.plan import SIZES, find_study
from course_lib.scaling_study.prediction import six_nd_share
from course_lib.scaling_study.results import Results, sample_results


def test_the_exercise_reads_a_script_as_the_library_does():
    exercise = find_exercise("scaling_study-5")
    for name, (script,) in exercise.check.cases():
        read, (nodes, gpus, seconds) = Script(script, Path()), exercise.right(script)
        said = {one.option: one.value for one in read.directives}
        assert read_time_s(said.get("time", "0")) == seconds, name
        assert (int(said.get("nodes", 1)), int(said.get("gpus-per-node", 0))) == (nodes, gpus), name


def test_two_runs_split_a_step_and_predict_the_next():
    split = StrongScaling.of(2.0, 2, 1.25)
    assert (split.fixed_s, split.shared_s) == (0.5, 1.5)
    assert split.step_s(2) == 1.25
    assert split.efficiency_percent(2) == 80
    assert [split.most_ranks(percent) for percent in (100, 80, 79.9, 50)] == [1, 2, 2, 5]
    for ranks in range(1, 40):
        least = split.efficiency_percent(ranks) - 1e-9
        assert split.most_ranks(least) == ranks
    assert StrongScaling.of(2.0, 2, 1.0).most_ranks(99) == math.inf
    with pytest.raises(CourseError, match="2 ranks or more"):
        StrongScaling.of(2.0, 1, 1.0)


def test_published_runs_follow_the_split_until_the_bottleneck_changes():
    step_s = {gpus: H100_BATCH / gpus / rate for gpus, rate in H100_TOKENS_PER_S.items()}
    split = StrongScaling.of(step_s[16], 2, step_s[32])
    assert step_s[64] == pytest.approx(split.step_s(4), rel=0.02)
    assert step_s[128] > 1.05 * split.step_s(8)
    assert step_s[256] > 1.15 * split.step_s(16)
    assert published_scaling()[1].startswith(
        "Throughput against a fit to 16 and 32 GPUs: -6 % on 128, -19 % on 256"
    )


def test_six_n_d_leaves_out_the_scores():
    runs = {run.spec: run for run in find_study("cluster").runs}.values()
    for run in runs:
        spec, tokens = run.spec, run.global_batch * run.seq
        scores = 12 * spec.num_layers * spec.hidden * run.seq * tokens
        counted = train_step_flop(spec, run.global_batch, run.seq)
        products = (counted - scores) / 6 / tokens
        assert products == pytest.approx(count_params(spec), rel=0.07)
        assert six_nd_share(run) == pytest.approx(6 * count_params(spec) * tokens / counted)


def test_the_broken_script_has_six_mistakes_of_six_kinds():
    found = lint_job(BROKEN_SCRIPT)
    assert len({finding.rule for finding in found}) == len(found) == 6


def test_the_device_works_on_when_its_orders_are_given():
    device = EmulatedDevice(backward_s=2.0, step_s=1.0)
    for _ in range(3):
        device.backward(num_tokens=8)
    device.step()
    assert device.orders == ["backward"] * 3 + ["step"]
    assert device.now_s() < 0.01
    device.synchronize()
    assert device.now_s() == pytest.approx(7.0, abs=0.01)
    with pytest.raises(CourseError, match="need tokens; got 0"):
        device.backward(0)


@pytest.mark.parametrize("show", SHOWS)
def test_the_explorer_draws_every_end_of_its_sliders(show):
    models = list(SIZES)
    for model, gpus, link, device in itertools.product(
        (models[0], models[-1]), (2, 4), LINKS, DEVICES[:1]
    ):
        assert draw_study(model, gpus, link, device, show).axes


def test_a_slower_link_never_helps_on_paper():
    fast, slow = (rows_of("study-300m", 4, link, "a100-80") for link in ("NVLink", "Ethernet"))
    assert list(fast) == list(STRATEGIES)
    for name in STRATEGIES:
        assert slow[name][1] < fast[name][1] <= 100


def test_own_results_come_before_the_sample(tmp_path, monkeypatch):
    sample = sample_results()
    assert own.own_or_sample(tmp_path)[0] == sample

    def reads(folder):
        if folder != tmp_path / "runs" / "study-laptop":
            raise CourseError("nothing there")
        return Results(experiments=sample.experiments[:1])

    monkeypatch.setattr(own, "read_results", reads)
    found, whose = own.own_or_sample(tmp_path / "notebooks")
    assert len(found.experiments) == 1
    assert "your own: 1 runs in" in whose
