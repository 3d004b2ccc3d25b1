"""A learner's progress, from the notebooks and the last verdicts, without running anything.

The verdicts of `course check` on the lesson's own notebook are kept in `.progress.json` beside it,
each with a hash of the answer, so that an answer that was changed since is known to be unchecked.
"""

import json
import re
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from course_lib.checks.lesson_source import read_source
from course_lib.core import CourseError
from course_lib.core.files import read_json, write_whole
from course_lib.workbooks.check_notebook import GradeReport
from course_lib.workbooks.learner_work import built_from, filled_in
from course_lib.workbooks.lessons import (
    Lesson,
    back_up,
    exercise_cells,
    read_notebook,
    short_hash,
    write_notebook,
)
from course_lib.workbooks.two_notebooks import student_notebook

STATUSES = ("right", "wrong", "not done", "missing", "twice", "not judged")


def remember(report: GradeReport, lesson: Lesson) -> None:
    """Keep the verdicts on the lesson's own notebook for `progress`.

    Raises: CourseError where they cannot be kept; they count all the same.
    """
    cells = exercise_cells(read_notebook(lesson.student))
    kept = _read_kept(lesson.folder)
    for verdict in report.verdicts:
        written = [short_hash(cell.source) for cell in cells.get(verdict.key, [])]
        kept[verdict.key] = {"status": verdict.status, "written": written}
    try:
        write_whole(_kept_path(lesson.folder), json.dumps(kept, indent=1, sort_keys=True))
    except OSError as problem:
        raise CourseError(
            f"{_kept_path(lesson.folder)}: need to keep these verdicts for course progress; got: "
            f"{problem.strerror}. They count all the same. Try in a folder that you may write to."
        ) from None


def progress(lesson: Lesson) -> dict[str, str]:
    """Return the status of every exercise of a lesson, by key; see `Verdict`, and `not checked`.

    Raises: CourseError where the lesson's notebook is missing or none.
    """
    notebook = read_notebook(lesson.student)
    kept = _read_kept(lesson.folder)
    cells, filled = exercise_cells(notebook), filled_in(notebook)
    found = {}
    for key in sorted(built_from(notebook).get("stubs", {}), key=_number):
        written = [short_hash(cell.source) for cell in cells.get(key, [])]
        checked = kept.get(key, {})
        if not written:
            found[key] = "missing"
        elif key not in filled:
            found[key] = "not done"
        else:
            found[key] = checked["status"] if checked.get("written") == written else "not checked"
    return found


def stub_of(lesson: Lesson, key: str) -> NotebookNode:
    """Return the empty cell of an exercise. Raises: CourseError for an unknown exercise"""
    built = student_notebook(lesson, read_source(lesson.source))
    stubs = {key: cells[0] for key, cells in exercise_cells(built).items()}
    if key not in stubs:
        raise CourseError(
            f"{lesson.name}: need one of its exercises, {', '.join(stubs)}; got {key!r}."
        )
    return stubs[key]


def reset(lesson: Lesson, key: str) -> Path:
    """Put the stub of an exercise back into the lesson's notebook; return the backup made first.

    Raises: CourseError where the lesson has no such exercise.
    """
    notebook, stub = read_notebook(lesson.student), stub_of(lesson, key)
    copy = back_up(lesson.student)
    old = exercise_cells(notebook).get(key, [])
    place = (old or exercise_cells(notebook, "check").get(key, []))[:1]
    ids = [cell.id for cell in notebook.cells]
    notebook.cells.insert(ids.index(place[0].id) if place else len(ids), stub)
    notebook.cells = [cell for cell in notebook.cells if not any(cell is one for one in old)]
    write_notebook(notebook, lesson.student)
    return copy


def _number(key: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", key)]


def _kept_path(folder: Path) -> Path:
    return folder / ".progress.json"


def _read_kept(folder: Path) -> dict[str, Any]:
    """Return the kept verdicts; none when the file is missing or damaged: a check renews it."""
    try:
        kept = read_json(_kept_path(folder), "verdicts")
    except CourseError:
        return {}
    kept = kept if isinstance(kept, dict) else {}
    return {key: one for key, one in kept.items() if _is_kept(one)}


def _is_kept(one: Any) -> bool:
    return isinstance(one, dict) and one.get("status") in STATUSES and "written" in one
