"""An exercise, the mistakes it must name, and the one call a notebook makes: `check(key, answer)`.

The key says where to look: `collectives-1` is in `course_lib.checks.collectives`, in the tuple
`EXERCISES`, and that module is imported only then. A check is a plain function of the learner's
answer: it returns one line about what is right, or raises CheckFailed with a sentence that goes
from the symptom to the misconception to what to look at.
"""

import contextlib
import difflib
import importlib
import importlib.util
import io
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from course_lib.core import CourseError


class _ShortError(CourseError):
    """An error that a notebook shows as its own text, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class CheckFailed(_ShortError, AssertionError):
    """The answer is wrong; the text names what it shows and what to look at."""


class NotDone(_ShortError):
    """The exercise still raises the NotImplementedError of its stub."""


@dataclass(frozen=True)
class Mistake:
    """A planted wrong answer, and words that the check's message must hold when it meets it."""

    name: str
    answer: Any
    says: str


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise: its check, a right answer, and wrong ones that a test sends through the check.

    `check(answer)` returns the detail of success (one line, the same on every run and machine) or
    raises CheckFailed. `title` is a few words for tables.
    """

    key: str
    title: str
    check: Callable[[Any], str]
    reference: Any
    mistakes: tuple[Mistake, ...] = ()


def check(key: str, answer: Any) -> None:
    """Check an answer; print `KEY: right. ...` or raise CheckFailed or NotDone with a short text.

    What the answer itself prints is shown only when it is wrong, so that a right one always prints
    the same single line.
    """
    exercise = find_exercise(key)
    _demand_own(key, answer)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            detail = exercise.check(answer)
    except Exception as error:
        print(printed.getvalue(), end="")
        _explain(key, error)
    print(f"{key}: right. {detail}")


def find_exercise(key: str) -> Exercise:
    """Return the exercise of a key, from its lesson's package.

    Raises: CourseError that lists the keys that come nearest.
    """
    lesson = key.rpartition("-")[0]
    exercises = exercises_of(lesson)
    for exercise in exercises:
        if exercise.key == key:
            return exercise
    known = [exercise.key for exercise in exercises]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.0)
    raise _ShortError(
        f"check: need the key of an exercise; got {key!r}. "
        + (f"Try {' or '.join(near)}." if near else f"The lesson {lesson!r} has no exercises.")
    )


def exercises_of(lesson: str) -> tuple[Exercise, ...]:
    """Return all exercises of a lesson (`collectives`), in order; none for a lesson without any."""
    name = f"course_lib.checks.{lesson}"
    if not lesson.isidentifier() or importlib.util.find_spec(name) is None:
        return ()
    return getattr(importlib.import_module(name), "EXERCISES", ())


def _demand_own(key: str, answer: Any) -> None:
    """Reject the course's own function, which a later cell may have imported over the answer."""
    module = getattr(answer, "__module__", None) or ""
    if module.split(".")[0] == "course_lib":
        raise CheckFailed(
            f"{key}: this is the course's own {getattr(answer, '__name__', answer)}, not yours. "
            "Run your exercise cell again, then this check."
        )


def _explain(key: str, error: Exception) -> NoReturn:
    """Return a short text that starts with the key for any error in a check."""
    if isinstance(error, NotDone | NotImplementedError):
        raise NotDone(not_done(key, str(error))) from None
    if isinstance(error, CheckFailed):
        raise CheckFailed(f"{key}: {error}") from None
    if "Ranks live in the notebook" in str(error):
        raise CheckFailed(
            f"{key}: `ranks` lives in the notebook; on a rank, use dist.get_world_size()."
        ) from None
    where = _own_line(error.__traceback__)
    what = f"{type(error).__name__}: {error}"
    if where:
        raise CheckFailed(f"{key}: your code raised {what}\n    {where}") from error
    raise CheckFailed(
        f"{key}: the check cannot use what your code returned ({what}). "
        "Compare its type and shape with what the exercise asks for."
    ) from error


def not_done(key: str, hint: str) -> str:
    """Return the text for an exercise that still raises its stub's NotImplementedError."""
    hint = hint.removeprefix(f"exercise {key}").removeprefix(":").strip()
    return f"{key} is not done yet" + (f": {hint}" if hint else ".")


def _own_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the learner's own code in a traceback, or an empty text."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if "ipykernel" in frame.filename or frame.filename.startswith(("<cell", "<ipython-input"))
    ]
    return f"line {frames[-1].lineno} of your cell: {frames[-1].line}" if frames else ""
