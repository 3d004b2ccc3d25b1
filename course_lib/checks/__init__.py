"""Checks of the exercises, which name the misconception behind a wrong answer.

One module a lesson holds its exercises, each with its planted mistakes: `EXERCISES`, a tuple of
`Exercise`. A notebook calls `check("collectives-1", answer)`. The tools that the modules are
written with are in `course_lib.checks.expect`.
"""

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake, NotDone, check, find_exercise

__all__ = ["CheckFailed", "Exercise", "Mistake", "NotDone", "check", "find_exercise"]
