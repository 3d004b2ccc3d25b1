"""Exercise 5 of 03_recompute: the loss scale."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from course_lib.checks.accumulation.effects import EffectCase, Effects, as_number
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

SCALE, COUNT = "scale", "consecutive good steps"

A_PAIR = Cause("Return both, the scale first: `return scale, num_good`.")
HALVES = Cause("An overflow halves the scale.")
DOUBLES = Cause("Three consecutive good steps double it; num_good are those before this one.")
TOO_EARLY = Cause("Too early: only after 3 consecutive good steps.")
NO_LIMITS = Cause("There is no lower and no upper limit here: halve and double any scale.")
IS_FALSE = Cause("`finite` may be a tensor: isfinite().all() returns one. Use `if not finite`.")
RUN_BROKEN = Cause("An overflow ends the run of good steps: the count starts again from 0.")
BEGINS_ANEW = Cause("After the scale has doubled, the count starts again from 0.")
COUNTS = Cause("A good step adds 1 to the count.")
LOOK = Cause("Work it out by hand: what does this step do to the scale, and to the count?")


def _next(answer: Callable[..., Any], scale: float, num_good: int, finite: Any) -> dict[str, Any]:
    result = answer(scale, num_good, finite)
    if result is not None and (not isinstance(result, list | tuple) or len(result) != 2):
        raise failed(f"got {result!r}", A_PAIR)
    new_scale, count = (None, None) if result is None else result
    return {SCALE: as_number(new_scale), COUNT: as_number(count)}


def _cases() -> list[EffectCase]:
    cases: list[EffectCase] = [
        (
            f"scale {scale:g}, {num_good} good steps before, {'good' if finite else 'an overflow'}",
            partial(_next, scale=scale, num_good=num_good, finite=finite),
        )
        for scale in (8.0, 1.0, 2.0**16, 2.0**60, 2.0**-60)
        for num_good in (0, 1, 2)
        for finite in (True, False)
    ]
    return [
        *cases,
        *(
            (f"finite is {finite!r}", partial(_next, scale=8.0, num_good=2, finite=finite))
            for finite in (torch.tensor(True), torch.tensor(False))
        ),
    ]


AFTER_OVERFLOW, AFTER_GROWTH, ELSE = "scale / 2, 0", "scale * 2, 0", "return scale, num_good + 1"

NEXT_SCALE = Exercise(
    key="recompute-5",
    title="the loss scale",
    check=Effects(
        cases=_cases,
        look=LOOK,
        success="Halved after an overflow, doubled after a run of good steps.",
    ),
    wrong=(
        Edit(AFTER_OVERFLOW, "scale / 2, num_good", RUN_BROKEN),
        Edit(AFTER_OVERFLOW, "scale, 0", HALVES),
        Edit("num_good + 1 == 3", "num_good == 3", DOUBLES),
        Edit(AFTER_GROWTH, "scale * 2, num_good + 1", BEGINS_ANEW),
        Edit("== 3", "== 2", TOO_EARLY),
        Edit(AFTER_OVERFLOW, "max(scale / 2, 1.0), 0", NO_LIMITS),
        Edit(AFTER_GROWTH, "min(scale * 2, 2.0**16), 0", NO_LIMITS),
        Edit("if not finite", "if finite is False", IS_FALSE),
        Edit(ELSE, "return scale, num_good", COUNTS),
        Edit(AFTER_OVERFLOW, "scale / 2", A_PAIR),
    ),
)
