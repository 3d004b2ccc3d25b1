"""Lesson 13: published runs follow its laws, its lab holds, own results come first."""

import math
from statistics import median

import pytest

from course_lib.core import CourseError
from course_lib.jobs.lint.check import lint_job
from course_lib.scaling_study import results as own
from course_lib.scaling_study.amdahl import StrongScaling
from course_lib.scaling_study.lab import BROKEN_SCRIPT, EmulatedDevice
from course_lib.scaling_study.pictures import far_off, replicas_over_tp, strong_scaling
from course_lib.scaling_study.playbook import (
    efficiencies,
    fit,
    measured_runs,
    outliers,
    playbook_runs,
    series,
    verdicts,
    zero_ratios,
)
from course_lib.scaling_study.results import Results, sample_results


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


def test_published_runs_follow_the_law_until_its_fixed_part_grows():
    runs = series("1B")
    law = fit(runs, 1, 4)
    error = {nodes: law.step_s(nodes) / run.step_s - 1 for nodes, run in runs.items()}
    assert error[1] == pytest.approx(0, abs=1e-12) == error[4]
    assert all(abs(error[nodes]) < 0.04 for nodes in (2, 8, 16))
    assert error[32] < -0.1
    with pytest.raises(CourseError, match="need a layout of the table"):
        series("1B", tp=3)


def test_the_table_says_what_the_lesson_says_of_it():
    runs = playbook_runs()
    assert len(runs) == 1657 > 1000 < len(measured_runs())
    failed = [run for run in runs if run.failed]
    assert sum(verdicts(failed).values()) == len(failed) == 616
    worked = verdicts(run for run in runs if not run.failed)  # the model is right on nearly all
    assert worked["above 80 GiB"] < 0.01 * worked["should fit"]
    slow, of_all = outliers()
    assert 0 < len(slow) < of_all / 50
    assert median(zero_ratios("1B", 2)) > 0.97 > 0.95 > median(zero_ratios("1B", 32))
    assert efficiencies([series("8B", tp=8)[nodes] for nodes in (32, 1)])[1] == 100


def test_the_pictures_of_published_runs_state_a_finding():
    assert strong_scaling()[1].startswith("Data parallelism keeps 40 % efficiency on 32 nodes")
    assert replicas_over_tp()[1].startswith("Across nodes, TP 16 makes a replica 34 to 51 %")
    assert far_off()[1].startswith("DP x PP 4 on 8 nodes is 22 times slower per GPU than on 16")


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
