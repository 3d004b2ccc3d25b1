"""Points of an exercise's parts: which parts its check tells apart, and what an answer reaches."""

import math
from collections.abc import Collection
from dataclasses import replace

from course_lib.checks.exercise import Exercise, find_exercise
from course_lib.core import CourseError
from course_lib.workbooks.assignment import Assignment, number
from course_lib.workbooks.check_notebook import Verdict

HIDDEN_PART = "hidden"  # right, in the cases that the notebook does not show, too


def part_names(exercise: Exercise, hidden: Collection[str]) -> list[str]:
    """Return the parts that an exercise's check tells apart; none where it tells none."""
    shares = getattr(exercise.check, "shares", None)
    if shares is None:
        return []
    right = exercise.right_values()
    return [*shares(right, right), *[HIDDEN_PART] * (exercise.key in hidden)]


def demand_parts(assignment: Assignment, hidden: Collection[str]) -> None:
    """Check that the parts with points are those that the checks tell apart.

    Raises: CourseError that names them
    """
    for key, given in assignment.parts.items():
        names = part_names(find_exercise(key), hidden)
        if {*names} != {*given}:
            need = f"all parts of {key}, which are {', '.join(names) or 'none: its check has none'}"
            got = ", ".join(given)
            raise CourseError(
                f"{assignment.name}: need points for {need}; got {got}. A part may have 0 points."
            )


def with_points(verdict: Verdict, assignment: Assignment) -> Verdict:
    """Return a verdict whose parts are points in place of shares, with a note that tells them."""
    given = assignment.parts.get(verdict.key)
    if not given or verdict.status != "wrong":
        return replace(verdict, parts={})
    reached = {name: round(most * verdict.parts.get(name, 0), 2) for name, most in given.items()}
    words = [f"{name} {number(reached[name])} of {number(most)}" for name, most in given.items()]
    told = f"{number(math.fsum(reached.values()))} points by parts: {', '.join(words)}."
    return replace(verdict, parts=reached, note=" ".join(filter(None, [told, verdict.note])))
