"""The task of a submission, an assignment or a whole lesson, and the files that grading it runs."""

import ast
import copy
import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.checks.exercise import exercises_of, find_exercise
from course_lib.checks.lesson_source import SourceCell, solved, stub
from course_lib.checks.right_answer import at_work_in, code_cells, names_used, needed_of
from course_lib.core import CourseError
from course_lib.workbooks.assignment import (
    STUDENT,
    Assignment,
    hidden_exercises,
    read_assignment,
    write_assignment,
)
from course_lib.workbooks.learner_work import built_from
from course_lib.workbooks.lessons import Lesson, exercise_cells, key_of, short_hash
from course_tools.grading.bare_course import COURSE, PACKAGES, library_text
from course_tools.grading.part_points import demand_parts

GIVEN = "given"
OBSERVING = "from course_tools.grading.observing import check\n"
WAITING = "from course_tools.grading.observing import wait_for_ranks\nwait_for_ranks()"
DEFINED = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.MULTILINE)
FOUND = "Its cell had lost its mark, and was found by what it defines."


@dataclass(frozen=True, kw_only=True)
class GradingTask:
    """An assignment or a lesson, read once for a whole class.

    cells     of the source, with the exercises' cells
    checks    the text of each check cell, by key, in the order of the notebook
    stubs     what each exercise hands out, by key
    hidden    the keys that have hidden cases
    on_ranks  the keys whose checks start ranks
    """

    lesson: Lesson
    assignment: Assignment
    cells: tuple[SourceCell, ...]
    checks: Mapping[str, str]
    stubs: Mapping[str, str]
    hidden: frozenset[str]
    on_ranks: frozenset[str]

    @property
    def is_lesson(self) -> bool:
        """Whether it is a lesson as it is."""
        return self.lesson.name != self.assignment.name

    @property
    def name(self) -> str:
        """The name that its notebooks carry."""
        return self.lesson.name

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.assignment.title or self.name

    @property
    def points(self) -> Mapping[str, float]:
        """The points of each exercise, by key."""
        return self.assignment.points

    @property
    def digest(self) -> str:
        """A hash of all that decides about a grade, but for the submission."""
        parts = [repr(self.cells), repr(self.assignment)]
        sources = [path for one in PACKAGES for path in sorted((COURSE / one).rglob("*.py"))]
        if not self.is_lesson:
            sources += sorted(self.lesson.folder.glob("checks/*.py"))
            sources += filter(Path.is_file, [self.lesson.folder / "hidden.py"])
        parts += [path.read_text(encoding="utf-8") for path in sources]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def library(self, keys: Iterable[str]) -> list[str]:
        """Return what the library has of these exercises: it may not answer them."""
        with at_work_in(self.lesson.folder):
            return [place for key in keys for place in find_exercise(key).library]

    def library_code(self) -> dict[str, str]:
        """Return the text of what the library has of each exercise."""
        places = {key: self.library([key]) for key in self.checks}
        return {key: "\n\n".join(map(library_text, own)) for key, own in places.items() if own}

    def solutions(self) -> dict[str, str]:
        """Return the right answer of each exercise, as its cell."""
        own = {cell.exercise: solved(cell) for cell in self.cells if cell.is_exercise}
        return {key: own[key] for key in self.checks}

    def merged(self, written: Mapping[str, str]) -> NotebookNode:
        """Return the notebook that is run for these exercises: what is given, answers, checks.

        Of the lesson's own cells it has only what the answers use. Where a check needs ranks, they
        are ready before the first answer, whose time they would take.
        """
        texts = [*written.values(), *(self.checks[key] for key in written)]
        given = [cell for cell in self.cells if cell.kind == "code" and not cell.exercise]
        needed = needed_of(given, set().union(*map(_names, texts)))
        lines = [ast.unparse(statement) for _, statement in needed]
        waits = [] if self.on_ranks.isdisjoint(written) else [WAITING]
        cells = [_cell(GIVEN, "\n".join(lines + waits))]
        for key, text in written.items():
            cells += [_cell(f"exercise-{key}", text)]
            cells += [_cell(f"check-{key}", OBSERVING + self.checks[key])]
        return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})

    @contextmanager
    def folder_of(self, student: str) -> Iterator[Path]:
        """Make the assignment's folder as it is for a student, with all that judges."""
        with tempfile.TemporaryDirectory(prefix="grading-") as name:
            folder = Path(name)
            if not self.is_lesson:
                is_id = bool(STUDENT.fullmatch(student))
                whose = student if is_id else short_hash(student)
                write_assignment(self.assignment.for_student(whose), folder)
                for part in ("source", "checks", "hidden.py"):
                    if (self.lesson.folder / part).exists():
                        (folder / part).symlink_to(self.lesson.folder / part)
            yield folder

    def is_own(self, notebook: NotebookNode) -> bool:
        """Whether a notebook says that it is one of this task; or, without a name, has its cells.

        Another editor may have deleted what the notebook says of itself.
        """
        name = built_from(notebook).get("lesson")
        marked, _ = self.with_marks(notebook)
        return name == self.name or (not name and exercise_cells(marked).keys() >= {*self.checks})

    def with_marks(self, notebook: NotebookNode) -> tuple[NotebookNode, dict[str, str]]:
        """Return a notebook in which lost marks are back, and by key a note on each exercise."""
        return _with_marks(notebook, {key: self.stubs[key] for key in self.checks}, self.checks)

    def demand_own(self, notebook: NotebookNode, path: Path) -> None:
        """Check that a notebook is one of this task. Raises: CourseError for another one's"""
        if not self.is_own(notebook):
            name = built_from(notebook).get("lesson")
            what = f"the notebook of {name}" if isinstance(name, str) else "no notebook of it"
            raise CourseError(f"{path}: need the notebook of {self.name}; this is {what[:80]}.")

    def check_notes(self, notebook: NotebookNode) -> dict[str, str]:
        """Return by key a note on a check cell that is not the task's own."""
        found = exercise_cells(notebook, "check")
        notes = {}
        for key, text in self.checks.items():
            texts = [cell.source.strip() for cell in found.get(key, [])]
            if texts != [text.strip()]:
                what = "was changed" if texts else "is missing"
                notes[key] = f"The check cell {what}; the original was used."
        return notes


KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def _cell(name: str, text: str) -> NotebookNode:
    return nbformat.v4.new_code_cell(text, id=name)


def _names(text: str) -> set[str]:
    """Return the names that a cell may use; all its words where it is not Python."""
    try:
        return names_used(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"[^\W\d]\w*", text))


def task_of_assignment(folder: Path) -> GradingTask:
    """Return what submissions of an assignment are graded for.

    Raises: CourseError where it cannot be read
    """
    assignment = read_assignment(folder)
    return _task(Lesson(assignment.name, folder.resolve()), assignment)


def task_of_lesson(lesson: Lesson) -> GradingTask:
    """Return what submissions of a whole lesson are graded for: a point an exercise."""
    items = tuple((exercise.key, 1.0) for exercise in exercises_of(lesson.word))
    return _task(lesson, Assignment(name="lesson", title=lesson.name, items=items))


def _task(lesson: Lesson, assignment: Assignment) -> GradingTask:
    cells = code_cells(lesson.source)
    checks = {cell.exercise: cell.text for cell in cells if cell.exercise and not cell.is_exercise}
    if missing := [key for key in assignment.keys if key not in checks]:
        raise CourseError(f"{lesson.source}: need the cells of {', '.join(missing)}; found none.")
    with at_work_in(lesson.folder):
        hidden = hidden_exercises(lesson.folder)
        demand_parts(assignment, hidden)
        on_ranks = [key for key in assignment.keys if hasattr(find_exercise(key).check, "worlds")]
    return GradingTask(
        hidden=frozenset(hidden),
        on_ranks=frozenset(on_ranks),
        lesson=lesson,
        assignment=assignment,
        cells=cells,
        checks={key: checks[key] for key in assignment.keys},
        stubs={cell.exercise: stub(cell) for cell in cells if cell.is_exercise},
    )


def _with_marks(
    notebook: NotebookNode, stubs: Mapping[str, str], checks: Mapping[str, str]
) -> tuple[NotebookNode, dict[str, str]]:
    """Return a notebook in which lost marks are back, and by key a note on each such exercise.

    A cell without a mark is an exercise's if it is the only one that defines all that the stub
    does, and no cell has the mark of that exercise. A check is found by its text.
    """
    notebook, notes = copy.deepcopy(notebook), dict[str, str]()
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and not key_of(cell)]
    has_mark, has_check = exercise_cells(notebook), exercise_cells(notebook, "check")
    for key, text in stubs.items():
        names = set(DEFINED.findall(text))
        cells = [cell for cell in code if names and names <= set(DEFINED.findall(cell.source))]
        if key not in has_mark and len(cells) == 1:
            cells[0].metadata = NotebookNode(tags=["exercise"], exercise=key)
            notes[key] = FOUND
    for key, text in checks.items():
        cells = [cell for cell in code if cell.source.strip() == text.strip()]
        if key not in has_check and len(cells) == 1:
            cells[0].metadata = NotebookNode(tags=["check"], exercise=key)
    return notebook, notes
