"""Make the file that a student hands in, and say what is missing; nothing stops it from being made.

`hw1-ann.zip` has the notebook as it is saved, and `submission.json`.
"""

import getpass
import hashlib
import json
import re
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from course_lib.core import CourseError
from course_lib.core.files import whole_file
from course_lib.workbooks.assignment import (
    SETTINGS,
    STUDENT,
    Assignment,
    kit_version,
    read_assignment,
)
from course_lib.workbooks.learner_progress import progress
from course_lib.workbooks.lessons import Lesson, back_up

SUBMISSION = "submission.json"
LONG_AGO = 3650  # days: the time in the zip of an assignment, which nobody has saved since
SAYS = {
    "not done": "{key} is not done yet.",
    "missing": "{key}: its cell is gone.",
    "not checked": "{key} was not checked since it was changed.",
    "wrong": "{key} was wrong when it was last checked.",
    "twice": "{key}: two cells are this exercise. Delete one of them.",
    "not judged": "{key} could not be judged when it was last checked.",
}

MIDNIGHT = (1980, 1, 1, 0, 0, 0)  # the first time that a zip knows: the same zip at any time
Files = dict[str, bytes]


def pack(notebook: Path, student: str = "", now: datetime | None = None) -> tuple[Path, list[str]]:
    """Write the zip with a notebook beside it; return its path, and what the student should know.

    A damaged notebook is packed as it is. An earlier zip with another notebook is kept in .backup.

    student  whose it is; empty: the one in assignment.toml, else the user of this machine

    Raises: CourseError where the notebook cannot be read, or the zip cannot be written
    """
    now = now or datetime.now(UTC)
    folder = notebook.parent
    try:
        content, saved = notebook.read_bytes(), notebook.stat().st_mtime
    except OSError as error:
        raise CourseError(f"{notebook}: need a notebook to pack; got: {error.strerror}.") from None
    told, assignment = list[str](), None
    if (folder / SETTINGS).exists():
        try:
            assignment = read_assignment(folder)
        except CourseError as error:
            told.append(str(error))
    else:
        told.append(
            f"{notebook.stem} is no assignment, so nobody may expect this file. Hand it in if you "
            "were asked to."
        )
    name = assignment.name if assignment else notebook.stem
    student, about = _whose(student, assignment)
    path = folder / f"{name}-{student}.zip"
    about_it = {
        "assignment": name,
        "student": student,
        "kit": kit_version(),
        "notebook": f"{name}.ipynb",
        "sha256": hashlib.sha256(content).hexdigest(),
        "packed": now.isoformat(timespec="seconds"),
    }
    files = {f"{name}.ipynb": content, SUBMISSION: (json.dumps(about_it, indent=1) + "\n").encode()}
    try:
        if path.exists():
            told.append(f"{path.name} was there; it is kept as {back_up(path)}.")
        write_zip(path, files)
    except OSError as error:
        raise CourseError(
            f"{path}: need to write the zip; got: {error.strerror}. Your notebook is as it was. "
            f"Hand in {notebook.name} itself, or make room on the disk."
        ) from None
    return path, [*about, *told, *_missing(notebook), *_times(saved, assignment, now)]


def _whose(student: str, assignment: Assignment | None) -> tuple[str, list[str]]:
    """Return the student's id for the file's name, and a sentence where it is a guess."""
    named = student or (assignment.student if assignment else "")
    if STUDENT.fullmatch(named):
        return named, []
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no user has this number
        user = "student"
    plain = re.sub(r"[^\w.@+-]", "-", named or user)[:80] or "student"
    return plain, [f"It is packed for {plain}. Not you? Try --student."]


def _missing(notebook: Path) -> list[str]:
    try:
        statuses = progress(Lesson(notebook.stem, notebook.parent))
    except CourseError as error:
        return [f"It is packed as it is, but: {error}"]
    return [SAYS[status].format(key=key) for key, status in statuses.items() if status in SAYS]


def _times(saved: float, assignment: Assignment | None, now: datetime) -> list[str]:
    told = []
    if 1 <= (days := int((now.timestamp() - saved) / 86_400)) < LONG_AGO:
        told.append(f"The notebook was saved {days} day{'s' if days > 1 else ''} ago (Ctrl+S).")
    if assignment and assignment.due and now > assignment.due:
        hours = (now - assignment.due).total_seconds() / 3600
        late = f"{hours:.0f} h" if hours >= 1 else f"{hours * 60:.0f} min"
        told.append(f"The due time, {assignment.due:%d %B %Y %H:%M %Z}, was {late} ago.")
    return told


def notebook_here() -> Path:
    """Return the notebook of the assignment in the working folder.

    Raises: CourseError where there is no assignment
    """
    try:
        return Path(f"{read_assignment(Path()).name}.ipynb")
    except CourseError:
        raise CourseError(
            "course pack: need the notebook; there is no assignment in this folder. "
            "Try course pack PATH.ipynb."
        ) from None


def write_zip(path: Path, files: Files) -> None:
    """Write a zip, whole or not at all; the same files make the same bytes."""
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as made:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, MIDNIGHT)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            info.create_system = 3  # Unix, wherever it is made
            made.writestr(info, files[name])
