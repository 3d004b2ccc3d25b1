"""Begin an exercise: its cells, its check, its planted mistakes and its test, all to be filled in.

`course new-exercise 06 ddp-6 --name which_rank` adds the cells to the end of the lesson's source
and writes two files. Until they are filled in, the exercise's tests fail. docs/authoring.md has an
example from beginning to end.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from course_lib.checks.lesson_source import read_source
from course_lib.core import CourseError
from course_lib.core.files import write_whole
from course_lib.workbooks.lessons import Lesson
from course_tools.authoring.source_rules import problems

CELLS = '''
# %% [markdown]
# ### Exercise {number}: FILL IN a few words
#
# FILL IN what is given, what to return, and every budget that the check judges. About 5 lines.
#
# <details><summary>Hint: FILL IN the question that gets one further</summary>
# FILL IN its answer.
# </details>


# %% tags=["exercise"] exercise="{key}"
def {name}(x):
    """FILL IN what it returns."""
    ### BEGIN SOLUTION: FILL IN what the stub says
    raise NotImplementedError("exercise {key}: write its solution")
    ### END SOLUTION


# %% tags=["check"] exercise="{key}"
check("{key}", {name})
'''

PLAIN_CHECK = '''"""Exercise {number} of {lesson}: FILL IN a few words."""

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise


def _cases() -> list[Case]:
    return [("FILL IN the case in words, as a message begins", (1,))]


FIRST = Cause("FILL IN the misconception, and what to look at.")

{constant} = Exercise(
    key="{key}",
    title="FILL IN a few words",
    check=Cases(
        cases=_cases,
        look="FILL IN what to do where no known misconception fits.",
        success="FILL IN what is right.",
    ),
    wrong=(Edit("FILL IN what stands in the solution", "and what in its place", FIRST),),
)
'''

RANKS_CHECK = '''"""Exercise {number} of {lesson}: FILL IN a few words."""

from collections.abc import Callable
from typing import Any

import torch

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.watch import ALWAYS, ORDER, Watch


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    watch, x = Watch(), torch.full((3,), 10.0**rank)
    with watch.step("FILL IN what is given", x=x) as step:
        step.show(value=answer(x))
    return watch.seen


FIRST = Cause("FILL IN the misconception, and what to look at.")

{constant} = Exercise(
    key="{key}",
    title="FILL IN a few words",
    check=ByExample(
        observe_on_rank=_observe,
        facets=(*ALWAYS, ORDER, "value"),
        success="FILL IN what is right.",
    ),
    wrong=(Edit("FILL IN what stands in the solution", "and what in its place", FIRST),),
)
'''

TEST = '''"""Exercise {key}: right answers in another style pass, and the check's own rules hold."""

import pytest

from course_lib.checks import find_exercise


def another_right_answer(x):
    raise NotImplementedError("exercise {key}: write a right answer in another style")


@pytest.mark.parametrize("answer", [another_right_answer])
def test_another_right_answer_passes(answer):
    assert find_exercise("{key}").verdict(answer)
'''


@dataclass(frozen=True)
class Begun:
    """The files of an exercise that was begun, in the order in which they are filled in."""

    source: Path
    check: Path
    test: Path


def new_exercise(lesson: Lesson, key: str, name: str, on_ranks: bool) -> Begun:
    """Add an exercise's cells to a lesson's source; write its check and its test to fill in.

    Raises: CourseError for a key of another lesson, a name that is no Python name, or where there
            is such an exercise, such a check, or no package of checks
    """
    course = lesson.folder.parent
    package = course / "course_lib" / "checks" / lesson.word
    made = Begun(
        source=lesson.source,
        check=package / f"{name}.py",
        test=course / "tests" / "checks" / f"test_{lesson.word}_{name}.py",
    )
    _demand_free(lesson, key, name, made)
    values = {
        **{"key": key, "number": key.rpartition("-")[2], "lesson": lesson.name, "name": name},
        "constant": name.upper(),
    }
    files = {
        made.check: (RANKS_CHECK if on_ranks else PLAIN_CHECK).format(**values),
        made.test: TEST.format(**values),
        package / "__init__.py": _with_exercise(package / "__init__.py", lesson.word, name),
        made.source: lesson.source.read_text(encoding="utf-8") + CELLS.format(**values),
    }
    for path, text in files.items():
        write_whole(path, text)
    return made


def before_build(lesson: Lesson) -> list[str]:
    """Return what a lesson's source needs before it can be built, such as fewer cells."""
    return [what for _, what in problems(read_source(lesson.source), lesson.word)]


def _demand_free(lesson: Lesson, key: str, name: str, made: Begun) -> None:
    if not re.fullmatch(rf"{lesson.word}-[1-9]\d*", key):
        raise CourseError(f"need a key like {lesson.word}-6 for {lesson.name}; got {key!r}.")
    if not name.isidentifier() or name != name.lower():
        raise CourseError(f"need a function's name like mean_of_ranks; got {name!r}. Try --name.")
    if f'exercise="{key}"' in lesson.source.read_text(encoding="utf-8"):
        raise CourseError(f"{lesson.source} has an exercise {key} already. Try the next number.")
    if not (made.check.parent / "__init__.py").is_file():
        raise CourseError(f"{lesson.name} has no package of checks yet: begin {made.check.parent}.")
    for path in (made.check, made.test):
        if path.exists():
            raise CourseError(f"{path} is there already. Try another name: --name.")


def _with_exercise(path: Path, word: str, name: str) -> str:
    """Return a lesson's `__init__.py` with one more exercise, last in EXERCISES."""
    text, constant = path.read_text(encoding="utf-8"), name.upper()
    listed = re.search(r"^EXERCISES = \(([^)]*?),?\s*\)", text, re.MULTILINE)
    if not listed:
        raise CourseError(f"{path}: need a line EXERCISES = (FIRST, SECOND); found none.")
    before, after = text[: listed.start()].splitlines(), text[listed.end() :]
    line = f"from course_lib.checks.{word}.{name} import {constant}"
    imports = [at for at, old in enumerate(before) if old.startswith("from course_lib.checks.")]
    place = next((at for at in imports if before[at] > line), imports[-1] + 1 if imports else -1)
    before.insert(place, line)
    return "\n".join([*before, f"EXERCISES = ({listed[1].strip()}, {constant}){after}"])
