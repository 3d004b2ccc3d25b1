"""Exercises 6 and 7 of 08_pipeline: other right answers pass; the threshold is what ZB-H1 takes."""

import pytest

from course_lib.checks import find_exercise
from course_lib.checks.pipeline.puzzle import PUZZLES
from course_lib.checks.pipeline.scores import scores
from course_lib.pipeline import Action, schedules, simulate
from course_lib.pipeline.actions import source_of


def interleaved_step_by_step(p, m, v):
    """The micro-batch and the chunk of each step, computed from the number of the step."""
    if m % p:
        raise ValueError(m)

    def action(kind, rank, step):
        within = step % (p * v)
        chunk = within // p if kind == "forward" else v - 1 - within // p
        return Action(kind, rank, step // (p * v) * p + within % p, chunk)

    def actions(rank):
        warmup, forward, backward = (v - 1) * p + 2 * (p - 1 - rank), 0, 0
        while backward < m * v:
            if forward < m * v and forward - backward <= warmup:
                yield action("forward", rank, forward)
                forward += 1
            else:
                yield action("backward", rank, backward)
                backward += 1

    return tuple(tuple(actions(rank)) for rank in range(p))


def test_another_right_order_passes():
    assert find_exercise("pipeline-6").verdict(interleaved_step_by_step)


def test_the_library_has_the_order_of_the_exercise():
    right = find_exercise("pipeline-6").right
    for p, m, v in ((4, 8, 2), (3, 9, 3), (1, 2, 2)):
        assert right(p, m, v) == schedules.interleaved(p, m, v)


def zb_h1_by_hand(p, m, _seconds, _cap):
    """1F1B in halves; rank r defers each W by r micro-batches."""
    found = []
    for rank, actions in enumerate(schedules.one_f_one_b(p, m)):
        found.append([])
        for action in actions:
            i = action.micro_batch
            if action.kind == "forward":
                found[-1].append(action)
                continue
            found[-1].append(Action("backward_input", rank, i))
            found[-1] += [Action("backward_weight", rank, i - rank)] if i >= rank else []
        found[-1] += [Action("backward_weight", rank, i) for i in range(max(0, m - rank), m)]
    return found


def as_the_hints_say(p, m, seconds, cap):
    """Fill `ready` of the exercise's loop as its text and its two hints say, and no more."""
    kinds = list(seconds)
    schedule, ends, free_s = [[] for _ in range(p)], {}, [0.0] * p
    while len(ends) < 3 * p * m:
        ready = []
        for rank, actions in enumerate(schedule):
            done = {kind: [a.kind for a in actions].count(kind) for kind in kinds}
            f, i, w = done.values()
            can_run = {
                "forward": f < m and f - w < cap and f - i < cap - rank,
                "backward_input": i < f,
                "backward_weight": w < i,
            }
            urgency = {
                "forward": 0 if f - i < p - rank else 2,
                "backward_input": 1,
                "backward_weight": 3,
            }
            for kind in [kind for kind in kinds if can_run[kind]]:
                action = Action(kind, rank, done[kind])
                source = source_of(action, p)
                arrives_s = 0.0 if source is None else ends.get(action._replace(stage=source))
                if arrives_s is not None:
                    ready.append((max(free_s[rank], arrives_s), urgency[kind], action))
        start_s, _, action = min(ready)
        schedule[action.stage].append(action)
        ends[action] = free_s[action.stage] = start_s + seconds[action.kind]
    return schedule


@pytest.mark.parametrize("answer", [zb_h1_by_hand, as_the_hints_say])
def test_another_right_schedule_solves_the_puzzle(answer):
    assert find_exercise("pipeline-7").verdict(answer)


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
