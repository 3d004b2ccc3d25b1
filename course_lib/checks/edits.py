"""Planted wrong answers: the right one with a few characters changed, or one written out."""

import re
from dataclasses import dataclass
from typing import Any

from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.right_answer import run_cell, solved_cell
from course_lib.core import CourseError


@dataclass(frozen=True)
class Edit:
    """The right answer with `old` replaced by `new`, which shows the misconception `cause`.

    `old` has to stand exactly once in the solution. Where it is within one line, the lines of
    `new` after the first are indented like that line. `also` holds further pairs, for mistakes
    that take two changes.

    Raises: CourseError, when it is used, where the solution has no such text, or has it twice
    """

    old: str
    new: str
    cause: Cause
    also: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """A few words for tables: `work.wait() -> pass`."""
        return " -> ".join(" ".join(text.split())[:30] for text in (self.old, self.new))

    def cell(self, exercise: Exercise) -> str:
        """Return the edited cell of the right answer."""
        text = solved_cell(exercise.key)
        for old, new in ((self.old, self.new), *self.also):
            text = edited(text, old, new)
        return text

    def answer(self, exercise: Exercise) -> Any:
        """Return the edited right answer, as a cell of a notebook would define it."""
        return run_cell(exercise.key, self.cell(exercise))


@dataclass(frozen=True)
class Own:
    """A wrong answer that is no edit of the right one, and the misconception that it shows."""

    value: Any
    cause: Cause

    @property
    def name(self) -> str:
        """A few words for tables: the name of the function, or the value."""
        name = str(getattr(self.value, "__name__", self.value))
        return re.sub(r"<function (\S+) at 0x\w+>", r"\1", name)  # the same in every process

    def answer(self, _exercise: Exercise) -> Any:
        """Return the wrong answer."""
        return self.value


def edited(text: str, old: str, new: str) -> str:
    """Return the text with `old` replaced by `new`, indented like the one line of `old`.

    Raises: CourseError where `old` does not stand in it exactly once
    """
    if (count := text.count(old)) != 1:
        raise CourseError(f"Edit: need {old!r} exactly once; it stands {count} times in\n{text}")
    if "\n" in old:
        return text.replace(old, new)
    line = text[text.rfind("\n", 0, text.index(old)) + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    return text.replace(old, new.replace("\n", f"\n{indent}"))
