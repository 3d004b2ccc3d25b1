"""Lesson 08: its exercises have the course's own orders and times, and its script runs on ranks."""

import math

import pytest

from course_lib.checks import find_exercise
from course_lib.core.links import Link
from course_lib.core.records import read_runs
from course_lib.pipeline import (
    PipelineTimes,
    gpipe,
    naive,
    one_f_one_b,
    simulate,
)
from tests.cluster_exercises.scripts_on_ranks import said_by

SCRIPT = "08_pipeline"


def test_the_right_order_is_the_courses():
    right = find_exercise("pipeline-1").right
    sizes = [(p, m) for p in range(1, 7) for m in range(1, 10)]
    assert all(right(p, m) == one_f_one_b(p, m) for p, m in sizes)


@pytest.mark.parametrize("make", [naive, gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 2), (5, 7)])
def test_the_right_ends_are_the_simulators(make, p, m):
    times = PipelineTimes(
        forward_s=1.5,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        link=Link(latency_s=0.25, bytes_per_s=math.inf),
    )
    played, schedule = simulate(make(p, m), times), make(p, m)
    ends = find_exercise("pipeline-2").right(schedule, {"forward": 1.5, "backward": 2.0}, 0.25)
    for actions, ends_s in zip(schedule, played.ends_s, strict=True):
        assert [ends[action] for action in actions] == pytest.approx(ends_s)


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(SCRIPT, f"--model tiny --seq 16 --turns 1 --record-to {tmp_path}")
    head, *rows, apart = said.splitlines()
    assert head == "tiny in 2 stages, a batch of 16"
    held = [line.strip().partition(": ")[0::2] for line in rows]
    held = {name: words.rpartition("at most ")[2] for name, words in held}
    assert held["gpipe, m = 8"] == "8, 8"
    assert held["1f1b, m = 8"] == "2, 1"
    theirs = [name for name in held if name.endswith(", PyTorch's")]
    ways = ("gpipe, m = 1", "gpipe, m = 2", "gpipe, m = 8", "1f1b, m = 2", "1f1b, m = 8")
    assert theirs == [f"{way}, PyTorch's" for way in ways]
    assert float(apart.removeprefix("largest difference of their gradients: ")) < 1e-6
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"forward", "backward", "send", "recv"} <= kinds
