"""Exercises 6 and 7 of 08_pipeline: the course's order; the threshold is what ZB-H1 takes."""

import pytest

from course_lib.checks import find_exercise
from course_lib.checks.pipeline.puzzle import PUZZLES
from course_lib.checks.pipeline.scores import scores
from course_lib.pipeline import schedules, simulate


def test_the_library_has_the_order_of_the_exercise():
    right = find_exercise("pipeline-6").right
    for p, m, v in ((4, 8, 2), (3, 9, 3), (1, 2, 2)):
        assert right(p, m, v) == schedules.interleaved(p, m, v)


@pytest.mark.parametrize("puzzle", PUZZLES, ids=str)
def test_the_threshold_of_a_puzzle_is_the_step_of_zb_h1(puzzle):
    step = simulate(schedules.zero_bubble_h1(puzzle.p, puzzle.m), puzzle.times)
    assert step.step_s == puzzle.enough_s
    assert max(step.peak_in_flight()) <= puzzle.cap


def test_scores_show_the_steps_of_the_answer_and_an_empty_row_where_it_is_not_done():
    def stub(*_):
        raise NotImplementedError

    def row(answer):
        return next(line for line in scores(answer).splitlines() if line.startswith("yours, cap 4"))

    assert row(stub).split()[3:] == ["-"] * 4
    assert row(lambda p, m, *_: schedules.zero_bubble_h1(p, m)).split()[3:5] == ["4", "27.0"]
