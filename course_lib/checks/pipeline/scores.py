"""Scores for the puzzle of 08_pipeline: a learner's steps beside known schedules and the bound."""

from collections.abc import Callable
from typing import Any

from course_lib.checks.pipeline.puzzle import Puzzle, judged
from course_lib.pipeline import schedules
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.bound import schedule_bound, score_schedule
from course_lib.pipeline.v_schedules import dual_pipe_v, zero_bubble_v

P, M, CAPS = 4, 8, (4, 7)
RATIOS = ((1, 1, 1), (2, 2, 1), (18.5, 18.1, 9.3))  # the last: measured, Qi et al. 2024, table 6
Cells = list[str]


def scores(answer: Callable[..., Any]) -> str:
    """Return a table of steps: five known schedules, the answer's with each cap, the bounds."""
    known = {
        "1F1B": schedules.one_f_one_b(P, M),
        "interleaved": schedules.interleaved(P, M, 2),
        "ZB-H1": schedules.zero_bubble_h1(P, M),
        "ZB-V": zero_bubble_v(P, M),
        "DualPipeV": dual_pipe_v(P, M),
    }
    rows = [["", "in flight", *(f"F:I:W {':'.join(map(str, ratio))}" for ratio in RATIOS)]]
    rows += [_row(name, [schedule] * len(RATIOS)) for name, schedule in known.items()]
    for cap in CAPS:
        rows.append(_yours(answer, cap))
        bounds = [schedule_bound(P, M, cap, Puzzle(P, M, ratio, cap).times) for ratio in RATIOS]
        rows.append([f"bound, cap {cap}", f"{cap}", *(f"{bound_s:.1f}" for bound_s in bounds)])
    title = f"seconds of a step, p = {P}, m = {M} (bound: of orders with one chunk per rank)"
    lines = [
        f"{name:14}{held:>9}" + "".join(f"{s:>22}" for s in steps) for name, held, *steps in rows
    ]
    return "\n".join([title, *lines])


def _row(name: str, found: list[Schedule]) -> Cells:
    """Return the cells of a row: a schedule for each ratio."""
    pairs = zip(found, RATIOS, strict=True)
    judged = [score_schedule(one, M, None, Puzzle(P, M, ratio, P).times) for one, ratio in pairs]
    held = max(count for score in judged for count in score.peak_in_flight)
    return [name, f"{held:g}", *(f"{score.step_s:.1f}" for score in judged)]


def _yours(answer: Callable[..., Any], cap: int) -> Cells:
    """Return the row of the answer: empty cells where it is not done, or breaks a rule."""
    name, found = f"yours, cap {cap}", list[Schedule]()
    try:
        for ratio in RATIOS:
            one = Puzzle(P, M, ratio, cap)
            found.append(judged(answer(P, M, one.seconds, cap), P, M, cap))
    except Exception:  # the check has told it
        return [name, *["-"] * (1 + len(RATIOS))]
    return _row(name, found)
