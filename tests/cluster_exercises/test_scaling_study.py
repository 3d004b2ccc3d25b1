"""Lesson 13: other right answers pass as well, the explorer draws, own results come first."""

import itertools
from dataclasses import replace
from statistics import fmean

import pytest

from course_lib.checks import CheckFailed, find_exercise
from course_lib.cluster.lint.check import lint_job
from course_lib.core import CourseError
from course_lib.scaling_study import results as own
from course_lib.scaling_study.aggregate import count_tokens, rank_totals
from course_lib.scaling_study.explorer import DEVICES, LINKS, SHOWS, STRATEGIES, draw_study, rows_of
from course_lib.scaling_study.lab import BROKEN_SCRIPT, EmulatedDevice
from course_lib.scaling_study.plan import SIZES
from course_lib.scaling_study.results import Results, sample_results


def by_the_library(records, tp, pp, warmup):
    """With the study's own functions, whose warm-up is a quarter of the steps."""
    quarters = [replace(one, run={**one.run, "steps": 4 * warmup}) for one in records]
    totals = [rank_totals([record]) for record in quarters]
    return {
        "time_s": max(total.time_s for total in totals),
        "num_tokens": count_tokens(totals, tp, pp),
        "mean_bytes": fmean(total.mean_bytes for total in totals),
        "sum_bytes": sum(total.mean_bytes for total in totals),
        "peak_bytes": max(total.peak_bytes for total in totals),
    }


def around_the_loop(records, tp, pp, warmup):
    """Everything in loops of its own; the tokens step by step."""
    kept = [record.steps[warmup:] for record in records]
    copies = [kept[at : at + tp * pp] for at in range(0, len(kept), tp * pp)]
    tokens = sum(max(sum(s["num_tokens"] for s in one) for one in copy[-tp:]) for copy in copies)
    held = [fmean(step["memory_bytes"] for step in one) for one in kept]
    return {
        "time_s": max(sum(s["end_s"] - s["start_s"] for s in one) for one in kept),
        "num_tokens": tokens,
        "mean_bytes": sum(held) / len(held),
        "sum_bytes": sum(held),
        "peak_bytes": max(record.run["memory"]["peak"] for record in records),
    }


def from_step_times(experiment, alone):
    """Everything from the seconds of a step: the batch is the same."""
    by_work = {one.run.work: one.step_s for one in alone}
    factor = by_work[experiment.run.work] / experiment.step_s
    return {
        "efficiency_percent": 100 * factor / experiment.run.ranks,
        "throughput_factor": factor,
        "overhead_percent": 100 / factor - 100,
    }


def step_by_step(device, micro_batches, steps, warmup, accumulated):
    """Waits after every step, and adds up the steps that count."""
    total_s = num_tokens = 0
    for step in range(steps):
        device.synchronize()
        before_s, seen = device.now_s(), 0
        for _ in range(accumulated):
            tokens = next(micro_batches)
            device.backward(tokens)
            seen += tokens
        device.step()
        device.synchronize()
        if step >= warmup:
            total_s += device.now_s() - before_s
            num_tokens += seen
    return [total_s, num_tokens]


def one_sum(runs, allowed):
    """One running sum; counts as long as it stays below."""
    total, fit = 0.0, 0
    for number, run in enumerate(runs, start=1):
        seconds = run.start_s + run.steps * run.step_s
        total += run.nodes * run.gpus_per_node * seconds / 3600
        fit = number if total <= allowed and fit == number - 1 else fit
    return total, fit


def written_anew(script):
    """Another script for the same job."""
    return """#!/bin/bash
#SBATCH --job-name=mine
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=4
#SBATCH --time=2:00:00
#SBATCH --exclude=node7
#SBATCH --output=%x-%j.out
set -euo pipefail
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \\
  --rdzv-endpoint="$first:29500" --rdzv-id="$SLURM_JOB_ID" cluster/exercises/06_ddp.py --turns 3
"""


ANSWERS = (
    (1, by_the_library),
    (1, around_the_loop),
    (2, from_step_times),
    (3, step_by_step),
    (4, one_sum),
    (5, written_anew),
)


@pytest.mark.parametrize(
    ("number", "answer"), ANSWERS, ids=lambda one: getattr(one, "__name__", None)
)
def test_another_right_answer_passes(number, answer):
    assert find_exercise(f"scaling_study-{number}").verdict(answer)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_forgotten_return_is_told(number):
    with pytest.raises(CheckFailed):
        find_exercise(f"scaling_study-{number}").verdict(lambda *args: None)


def test_a_clock_that_starts_on_a_busy_device_is_told_that_alone():
    def waits_at_the_end_only(device, micro_batches, steps, warmup, accumulated):
        start_s = num_tokens = 0
        for step in range(steps):
            if step == warmup:
                start_s, num_tokens = device.now_s(), 0
            for _ in range(accumulated):
                tokens = next(micro_batches)
                device.backward(tokens)
                num_tokens += tokens
            device.step()
        device.synchronize()
        return device.now_s() - start_s, num_tokens

    with pytest.raises(CheckFailed, match="still works on the warm-up") as told:
        find_exercise("scaling_study-3").verdict(waits_at_the_end_only)
    assert "start the clock when" not in str(told.value)


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
