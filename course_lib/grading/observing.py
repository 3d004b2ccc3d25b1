"""The `check` of a graded notebook: it observes the answer, and judges nothing.

It writes what was seen into the folder COURSE_OUT, as plain data; course_lib.grading.judge reads it
in another process.
"""

import os
from pathlib import Path
from typing import Any

from course_lib.checks.exercise import LIMIT_S, Check, explained, find_exercise
from course_lib.checks.right_answer import assignment_here
from course_lib.grading.assignment import hidden_exercises
from course_lib.grading.inside import FOLDER
from course_lib.grading.judge import HIDDEN
from course_lib.grading.plain_data import write_data


def check(key: str, answer: Any, *, limit_s: float = LIMIT_S) -> None:
    """Observe an answer, also in the hidden cases; write down what was seen.

    A check that is a plain function judges here, and its line is written down.
    """
    exercise, here, out = find_exercise(key), assignment_here(), Path(os.environ[FOLDER])
    hidden = hidden_exercises(here.folder).get(key) if here else None
    with explained(key, answer, limit_s):
        if not isinstance(exercise.check, Check):
            write_data(exercise.verdict(answer), out / f"{key}.pt")
            return
        write_data(list(exercise.check.observe(answer)), out / f"{key}.pt")
        if hidden and isinstance(hidden.check, Check):
            write_data(list(hidden.check.observe(answer)), out / f"{HIDDEN}{key}.pt")
