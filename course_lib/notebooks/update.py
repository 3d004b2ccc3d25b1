"""Bring a newer version of the course under a learner's work: `git pull`, then carry over."""

import subprocess
from pathlib import Path

from course_lib.core import CourseError
from course_lib.notebooks.build import write_student
from course_lib.notebooks.learner_work import is_touched
from course_lib.notebooks.lessons import Lesson, all_lessons, read_notebook


def update(folder: Path) -> list[str]:
    """Pull the newest course; return what was done, one sentence each.

    Notebooks with work in them step aside for the pull, come back whatever happens, and then get
    the new lesson around that work, with a backup.
    Raises: CourseError, with everything as it was, if git cannot pull.
    """
    touched = [lesson for lesson in all_lessons(folder) if _has_work(lesson)]
    mine = {lesson: lesson.student.read_bytes() for lesson in touched}
    before = _git(folder, "rev-parse", "HEAD")
    try:
        for lesson in touched:
            _git(folder, "checkout", "--", str(lesson.student))
        _git(folder, "pull", "--ff-only")
        new = {lesson: read_notebook(lesson.student) for lesson in touched}
    finally:
        for lesson, text in mine.items():
            lesson.student.write_bytes(text)
    if _git(folder, "rev-parse", "HEAD") == before:
        return ["The course is up to date."]
    told = [
        f"{lesson.name}: {say}" for lesson in touched for say in write_student(lesson, new[lesson])
    ]
    return [*told, "The course is updated. Reload open notebooks; `make lab` builds what is new."]


def _has_work(lesson: Lesson) -> bool:
    return lesson.student.exists() and is_touched(read_notebook(lesson.student))


def _git(folder: Path, *command: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise CourseError("course update: need git; it is not installed.") from None
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CourseError(
            f"course update: need `git {command[0]}` to work here; it said: {why}. "
            "Your notebooks are as they were."
        ) from None
    return done.stdout.strip()
