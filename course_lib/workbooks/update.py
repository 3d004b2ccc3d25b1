"""`course update`: fetch a newer version of the course and put it around a learner's work.

What a learner wrote is never only in memory. Each notebook with work in it is backed up, and a
journal names the backups, before git changes anything; at the end every notebook gets the work of
its backup, and the journal goes. Where an update is cut off, the journal stays, and the next
command that reads notebooks finishes from it.
"""

import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nbformat import NotebookNode

from course_lib.core import CourseError
from course_lib.core.files import not_one, read_json, whole_file
from course_lib.core.plain_text import one_line
from course_lib.workbooks.learner_work import (
    built_from,
    carry_over,
    is_own,
    is_touched,
    work_in,
)
from course_lib.workbooks.lessons import (
    Lesson,
    all_lessons,
    back_up,
    read_notebook,
    write_notebook,
)

CUT_OFF = "An update of the course was cut off; it is finished now, and no work is lost."
JOURNAL = "the journal of an update that was cut off"
NO_GC = ("-c", "maintenance.auto=false", "-c", "gc.auto=0")  # it would outlive the command


def update(folder: Path) -> list[str]:
    """Bring the course in this folder up to date; return what was done, one sentence each.

    Notebooks with work in them step aside while git works and come back whatever happens: as they
    were, or, where their lesson has changed, as the new lesson around that work, with a backup.
    Raises: CourseError, with the notebooks as they were, if git or the disk refuses.
    """
    _demand_clone(folder)
    with _alone(folder) as lock:
        told = _finish(folder, [CUT_OFF])
        try:
            told += _update(folder, lock)
        except CourseError as error:
            raise CourseError("\n".join([*told, str(error)])) from None
    return told


def _demand_clone(folder: Path) -> None:
    """Raise CourseError where the lessons are in no clone, as after `course start`."""
    above = (folder.resolve(), *folder.resolve().parents)
    in_git = any((one / ".git").exists() for one in above)
    if not in_git or not _git(folder, "ls-files", "--", "*.ipynb"):
        raise CourseError(
            f"course update: expected a clone of the course; got {one_line(str(folder))}, which "
            "git does not know. Ask for the newest wheel or zip, install it with "
            "`pip install --upgrade FILE`, and get its lessons with `course start NEW_FOLDER`. "
            "Nothing was changed."
        )


def finish_cut_off(folder: Path) -> list[str]:
    """Finish an update that was cut off, if there is one; return what was done."""
    if not _journal(folder).exists():
        return []
    with _alone(folder):
        return _finish(folder, [CUT_OFF])


def _update(folder: Path, lock: int) -> list[str]:
    touched = [lesson for lesson in all_lessons(folder) if _has_work(lesson)]
    before, told = _git(folder, "rev-parse", "HEAD"), []
    _step_aside(folder, touched)
    try:
        _clear_the_way(folder, touched, lock)
        _git(folder, "fetch")
        _count_what_is_there(folder)
        _git(folder, "merge", "--ff-only", "@{upstream}", locks=[lock])
    finally:
        told += _finish(folder)
    if _git(folder, "rev-parse", "HEAD") == before:
        return [*told, "The course is up to date."]
    return [*told, "The course is updated. Reload open notebooks; `make lab` builds what is new."]


def _has_work(lesson: Lesson) -> bool:
    return lesson.student.exists() and is_touched(read_notebook(lesson.student))


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Keep a second update out; yield the lock.

    It goes when this process has ended, however it ends, and so has a git that was given the lock.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CourseError(
            "course update: an update of this course is running. Try again when it has ended."
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield handle
    finally:
        os.close(handle)


def _journal(folder: Path) -> Path:
    return folder / ".backup" / "update.json"


def _step_aside(folder: Path, touched: Sequence[Lesson]) -> None:
    """Back up every touched notebook, then write the journal that names the backups.

    Raises: CourseError, with nothing touched, if they cannot be written.
    """
    backups: dict[str, Path] = {}
    try:
        for lesson in touched:
            backups[lesson.name] = back_up(lesson.student)
        if backups:
            names = {lesson: backup.name for lesson, backup in backups.items()}
            with whole_file(_journal(folder), sync=True, one_writer=True) as file:
                file.write(json.dumps({"backups": names}, indent=1).encode())
    except OSError as error:
        for backup in backups.values():
            backup.unlink(missing_ok=True)
        raise CourseError(
            f"course update: need to back up your notebooks in {_journal(folder).parent}; "
            f"got: {error.strerror}. Nothing was changed. Try again when there is room on the disk."
        ) from None


def _finish(folder: Path, first: Sequence[str] = ()) -> list[str]:
    """Give each notebook the work of its backup and remove the journal, if there is one."""
    journal = _journal(folder)
    if not journal.exists():
        return []
    names = _read_journal(journal)
    backups = {Lesson(name, folder): journal.parent / names[name] for name in names}
    told = [*first]
    for lesson, backup in backups.items():
        try:
            told += _give_back(lesson, backup)
        except OSError as error:
            raise CourseError(
                f"course update: need to write {lesson.student}; got: {error.strerror}. Your work "
                f"is safe in {backup}. Try `course update` again: it puts it back."
            ) from None
    journal.unlink()
    for lesson, backup in backups.items():
        are_there = backup.is_file() and lesson.student.is_file()
        if are_there and backup.read_bytes() == lesson.student.read_bytes():
            backup.unlink()  # nothing came of it
    return told


def _read_journal(journal: Path) -> dict[str, str]:
    """Return the name of the backup of each lesson. Raises: CourseError for a spoilt journal"""
    hint = f"Your work is safe beside it. Put it back by hand, then delete {journal.name}."
    found = read_json(journal, JOURNAL, hint=hint)
    names = found.get("backups") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(map(_is_name, (*names, *names.values()))):
        raise not_one(journal, JOURNAL, "there are no names of backups in it", hint)
    return names


def _is_name(name: object) -> bool:
    """Return whether it names a file in a folder, and nothing outside of it."""
    return isinstance(name, str) and name.isprintable() and Path(name).name == name


def _give_back(lesson: Lesson, backup: Path) -> list[str]:
    """Put the work of a backup into a notebook, unless it is there; return what to tell."""
    if not backup.exists():
        return [f"{lesson.name}: its backup {backup} is gone, so the notebook stays as it is"]
    try:
        mine = read_notebook(backup)
    except CourseError as problem:
        return [f"{lesson.name}: the notebook stays as it is, and so does its backup. {problem}"]
    try:
        now = read_notebook(lesson.student)
    except CourseError:  # the lesson has left the course, or git was stopped while it wrote
        now = None
    if now is None or (not is_touched(now) and built_from(now) == built_from(mine)):
        with whole_file(lesson.student, sync=True, one_writer=True) as file:
            file.write(backup.read_bytes())
        return []
    if not is_touched(now) or _is_as_in_git(lesson):
        return _carry_over(lesson, now, mine, backup)
    if work_in(mine) <= work_in(now):
        return []
    return [
        f"{lesson.name}: you have worked in it since, so it stays as it is; "
        f"what you had written before is in {backup}"
    ]


def _carry_over(lesson: Lesson, new: NotebookNode, mine: NotebookNode, backup: Path) -> list[str]:
    notebook, told = carry_over(new, mine)
    write_notebook(notebook, lesson.student)
    own = sum(map(is_own, notebook.cells))
    told = [f"your work is carried over; a backup is {backup}", *told]
    told += [f"{own} cells of your own kept"] if own else []
    return [f"{lesson.name}: {sentence}" for sentence in told]


def _clear_the_way(folder: Path, touched: Sequence[Lesson], lock: int) -> None:
    """Set notebooks to what git knows, so that it may change them; they are backed up."""
    if not touched:
        return
    known = set(_git(folder, "ls-tree", "--name-only", "HEAD", "./").splitlines())
    in_git = [lesson.student.name for lesson in touched if lesson.student.name in known]
    if in_git:
        _git(folder, "checkout", "HEAD", "--", *in_git, locks=[lock])


def _is_as_in_git(lesson: Lesson) -> bool:
    return not _git(lesson.folder, "diff", "--name-only", "HEAD", "--", lesson.student.name)


def _count_what_is_there(folder: Path) -> None:
    """Tell git of files that already are as in the newest version: a merge was cut off.

    Git would take them for changes of the learner's and refuse to merge over them.
    """
    changed = ["diff", "--name-only", "-z", "--no-renames", "--diff-filter=d"]
    coming = set(_git(folder, *changed, "HEAD", "@{upstream}").split("\0")) - {""}
    if not coming:
        return
    root = Path(_git(folder, "rev-parse", "--show-toplevel"))
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": f"{scratch}/index"}
        _git(root, "read-tree", "@{upstream}", more=index)
        other = set(_git(root, "diff", "--name-only", "-z", more=index).split("\0"))
    there = sorted(coming - other)
    if there:
        _git(root, "update-index", "--add", "-z", "--stdin", given="\0".join(there))


def _git(
    folder: Path,
    *command: str,
    given: str = "",
    more: Mapping[str, str] | None = None,
    locks: Sequence[int] = (),
) -> str:
    """Run a git command with text `given` and `more` variables; return what it printed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *NO_GC, *command],
            capture_output=True,
            text=True,
            check=True,
            input=given,
            env={**os.environ, **(more or {})},
            pass_fds=locks,
        )
    except FileNotFoundError:
        raise CourseError("course update: need git; it is not installed.") from None
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split()).rstrip(".")
        why = f"it said: {said}" if said else f"it ended with exit code {error.returncode}"
        raise CourseError(
            f"course update: need `git {command[0]}` to work here; {why}. "
            "Your notebooks are as they were."
        ) from None
    return done.stdout.strip()
