"""Build the notebooks of the lessons: `python -m course_tools.authoring.build [04 ...]`.

One source gives two notebooks: the student's, without solutions and outputs, and the solved one,
executed from top to bottom, and a second time under other conditions: an output that differs then
has to be that of a cell tagged `measured`, so that `pytest --nbval notebooks/solved` passes on any
machine. Only what is stale is built again; where only prose has changed, nothing is executed, and
the outputs stay, unless you say --force. Nothing is written before it is whole, and what a
learner has written into a student notebook is carried over.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from rich.console import Console

from course_lib.checks.lesson_source import SourceCell, read_source
from course_lib.checks.right_answer import FOLDER, SETTINGS, at_work_in
from course_lib.core import CourseError
from course_lib.workbooks.learner_work import built_from, carry_over, is_own, is_touched
from course_lib.workbooks.lessons import (
    Lesson,
    all_lessons,
    back_up,
    find_folder,
    find_lesson,
    key_of,
    read_notebook,
    tags_of,
    write_notebook,
)
from course_lib.workbooks.progress_bar import cell_bar
from course_lib.workbooks.two_notebooks import (
    MEASURED,
    solved_notebook,
    student_notebook,
)
from course_tools.authoring.execute import CellStopped, execute
from course_tools.authoring.second_run import differences
from course_tools.authoring.source_rules import problems

MAX_BYTES = 500_000
CELL_TIMEOUT_S, SECOND_TIMEOUT_S = 120, 300


def read_lesson(lesson: Lesson) -> list[SourceCell]:
    """Read the cells of a lesson's source and check them.

    Raises: CourseError with one line for each thing that is wrong.
    """
    cells = read_source(lesson.source)
    found = problems(cells, lesson.word)
    if found:
        raise CourseError(
            "\n".join(f"{lesson.source.name}, line {line}: {what}." for line, what in found)
        )
    return cells


def student_is_stale(new: NotebookNode, path: Path) -> bool:
    """Return whether a student notebook has to be written again.

    A learner may change what they like; as long as nobody has worked in it, every cell counts.
    """
    try:
        old = read_notebook(path)
    except CourseError:
        return True
    return built_from(old) != built_from(new) or (not is_touched(old) and old.cells != new.cells)


def solved_is_stale(new: NotebookNode, path: Path) -> bool:
    """Return whether the solved notebook differs from its source, or has a check that never ran."""
    try:
        old = read_notebook(path)
    except CourseError:
        return True
    unchecked = any("check" in tags_of(cell) and not cell.outputs for cell in old.cells)
    same = list(map(_bare, old.cells)) == list(map(_bare, new.cells))
    return unchecked or built_from(old) != built_from(new) or not same


def outputs_kept(new: NotebookNode, path: Path) -> bool:
    """Copy the stored outputs into a solved notebook if all code is as it was; return whether.

    A check that never ran has nothing to copy.
    """
    try:
        old = [cell for cell in read_notebook(path).cells if cell.cell_type == "code"]
    except CourseError:
        return False
    code = [cell for cell in new.cells if cell.cell_type == "code"]
    if [_bare(cell) for cell in old] != [_bare(cell) for cell in code]:
        return False
    if any("check" in tags_of(cell) and not cell.outputs for cell in old):
        return False
    for before, cell in zip(old, code, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return True


def _bare(cell: NotebookNode) -> dict[str, Any]:
    return {**cell, "outputs": [], "execution_count": None}


def write_student(lesson: Lesson, new: NotebookNode) -> list[str]:
    """Write a student notebook and carry over the work in the old one; return messages about it."""
    told: list[str] = []
    if lesson.student.exists():
        try:
            old = read_notebook(lesson.student)
        except CourseError as error:
            return _write_over_broken(lesson, new, str(error))
        if is_touched(old):
            copy = back_up(lesson.student)
            new, told = carry_over(new, old)
            own = sum(map(is_own, new.cells))
            told = [f"your work is carried over; a backup is {copy}", *told]
            told += [f"{own} cells of your own kept"] if own else []
    write_notebook(new, lesson.student)
    return told


def _write_over_broken(lesson: Lesson, new: NotebookNode, why: str) -> list[str]:
    copy = back_up(lesson.student)
    write_notebook(new, lesson.student)
    return [why, f"it is kept as {copy}, and a new notebook is in its place"]


def write_solved(
    lesson: Lesson, cells: list[SourceCell], new: NotebookNode, *, twice: bool
) -> None:
    """Execute the solved notebook, a second time where that is wanted, and write it."""
    try:
        with _told_where(lesson, new), cell_bar(lesson.name) as ended:
            execute(new, CELL_TIMEOUT_S, ended)
    except CellStopped as error:
        line = cells[error.index].line
        what = str(error).rstrip(".")
        raise CourseError(
            f"{lesson.source.name}, line {line}: the cell {what}. Nothing was written."
        ) from None
    for cell in new.cells:
        if "check" in tags_of(cell) and not cell.outputs:
            raise CourseError(f"{lesson.name}: a check cell prints nothing: {key_of(cell)}")
    _demand_small(lesson, new)
    if twice:
        _demand_the_same_again(lesson, cells, new)
    write_notebook(new, lesson.solved)


def _demand_the_same_again(lesson: Lesson, cells: list[SourceCell], new: NotebookNode) -> None:
    with at_work_in(lesson.folder), cell_bar(f"{lesson.name}, second run") as ended:
        found = differences(new, SECOND_TIMEOUT_S, ended)
    if found:
        where = {at: f"{lesson.source.name}, line {cells[at].line}" for at in found}
        lines = [f"{where[at]}: in the second run the cell {what}" for at, what in found.items()]
        advice = f"Tag a cell {MEASURED} where its output depends on the machine, or show less."
        how = "Nothing was written; with --once it is, without a second run."
        raise CourseError("\n".join([*lines, f"{advice} {how}"]))


@contextmanager
def _told_where(lesson: Lesson, notebook: NotebookNode) -> Iterator[None]:
    """Tell an assignment's kernel, which runs in a temporary folder, where the assignment is."""
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    text = first.source
    if (lesson.folder / SETTINGS).is_file():
        first.source = f"import os; os.environ[{FOLDER!r}] = {str(lesson.folder)!r}\n{text}"
    try:
        yield
    finally:
        first.source = text


def _demand_small(lesson: Lesson, notebook: NotebookNode) -> None:
    size = len(nbformat.writes(notebook))
    if size > MAX_BYTES:
        sizes = [(len(json.dumps(cell)), index) for index, cell in enumerate(notebook.cells)]
        worst, index = max(sizes)
        raise CourseError(
            f"{lesson.name}: need a solved notebook of at most {MAX_BYTES // 1000} kB; got "
            f"{size // 1000} kB, of which cell {index + 1} is {worst // 1000} kB. Show less there."
        )


def build(
    lesson: Lesson,
    console: Console,
    *,
    force: bool = False,
    check: bool = False,
    twice: bool = False,
) -> bool:
    """Bring the two notebooks of a lesson up to date; with `check` only say what is stale.

    twice   run the solved notebook a second time, and refuse an output that differs

    Returns whether anything was stale.
    """
    start_s = time.monotonic()
    cells = read_lesson(lesson)
    student, solution = student_notebook(lesson, cells), solved_notebook(lesson, cells)
    stale = {
        lesson.solved: force or solved_is_stale(solution, lesson.solved),
        lesson.student: force or student_is_stale(student, lesson.student),
    }
    if check:
        for path in (path for path, is_stale in stale.items() if is_stale):
            console.print(f"{path} is stale. Try make notebooks.", soft_wrap=True)
        return any(stale.values())
    kept = stale[lesson.solved] and not force and outputs_kept(solution, lesson.solved)
    if kept:
        write_notebook(solution, lesson.solved)
    elif stale[lesson.solved]:
        write_solved(lesson, cells, solution, twice=twice)
    told = write_student(lesson, student) if stale[lesson.student] else []
    built = "built" + f" in {time.monotonic() - start_s:.0f} s" * bool(lesson.word)
    how = built + ", all outputs kept" * kept if any(stale.values()) else "up to date"
    share = f"; {_measured(cells)}" if lesson.word else ""  # an assignment has no word
    console.print(f"{lesson.name}: {how}{share}")
    for sentence in told:
        console.print(f"    {sentence}", soft_wrap=True)
    return any(stale.values())


def _measured(cells: list[SourceCell]) -> str:
    """Return how many of a lesson's code cells are not compared, in words."""
    code = [cell for cell in cells if cell.kind == "code"]
    count = sum(MEASURED in cell.tags for cell in code)
    return f"{count} of {len(code)} code cells are measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m course_tools.authoring.build", description=__doc__
    )
    parser.add_argument("lessons", nargs="*", help="04 or 04_collectives; all when none is given")
    parser.add_argument("--force", action="store_true", help="build even what is up to date")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if any is stale")
    parser.add_argument(
        "--once", action="store_true", help="while writing: skip the run under other conditions"
    )
    given = parser.parse_args(arguments)
    folder, console, failed = find_folder(), Console(highlight=False), False
    try:
        lessons = [find_lesson(name, folder) for name in given.lessons] or all_lessons(folder)
    except CourseError as error:
        console.print(str(error), soft_wrap=True, markup=False)
        return 1
    for lesson in lessons:
        try:
            stale = build(
                lesson, console, force=given.force, check=given.check, twice=not given.once
            )
            failed |= given.check and stale
        except CourseError as error:
            console.print(str(error), soft_wrap=True, markup=False)
            failed = True
        except KeyboardInterrupt:
            console.print(f"{lesson.name}: stopped; the notebooks are as they were.")
            return 130
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
