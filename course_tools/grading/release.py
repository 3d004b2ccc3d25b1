"""Hand out an assignment: one zip with all that is needed to solve and to check it at home.

In it are the notebook, the course's library, and the values of right answers in the place of the
answers: no solved notebook, no lesson's source, no hidden cases, no solution of an exercise that
only the assignment has.
"""

import ast
import csv
import io
import json
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import nbformat
from rich.console import Console

import course_lib
from course_lib.checks.cases import Cases, Raised, values_of
from course_lib.checks.exercise import CheckFailed, find_exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.lesson_source import read_source, solutions
from course_lib.checks.right_answer import SETTINGS, VALUES, at_work_in
from course_lib.core import CourseError
from course_lib.core.files import read_text
from course_lib.workbooks.assignment import (
    Assignment,
    demand_exercises,
    hidden_exercises,
    kit_version,
    number,
    read_assignment,
    to_toml,
)
from course_lib.workbooks.lessons import Lesson, read_notebook
from course_lib.workbooks.pack import Files, write_zip
from course_tools.authoring.build import build
from course_tools.grading.bare_course import ANSWERS, bare_checks, module_of
from course_tools.grading.compose import buildable
from course_tools.grading.part_points import demand_parts

COURSE = Path(course_lib.__file__).parents[1]
TOOLS = ("environment", "packages", "pip_settings", "progress", "symptoms", "torch_build")
OWN = ("pyproject.toml", "requirements.lock", "LICENSE")  # like TOOLS: what `make lab` needs
TUTOR = "AGENTS.md"
UNUSED = re.compile(r"^(# what starts|(PYTEST|LIVE|FAULTS|BENCHMARKS)\b).*\n(\t.*\n)*", re.M)
TARGETS = ("help", "environment", "lab")  # of the course's Makefile
SHORTEST = 12  # letters of a solution that are looked for: `return x` stands everywhere

README = """\
# {title}

{count} exercises, {points} points. Due: {due}.

| exercise | points |
|---|---|
{rows}

## Begin

    make lab

opens `{name}.ipynb` in JupyterLab; the first time it builds the environment, which takes some
minutes and a network. Where the course is installed already, open `{name}.ipynb` with it instead.

## Check

Run the check below an exercise as often as you like. All of them, as saved:

    make check

(or the button Check in JupyterLab, or `course check {name}.ipynb`). Your answers are graded with
further cases, too: an answer that fits only the cases of the check is not right.

## Hand in

    make pack STUDENT=ann

(your own name or id in place of ann; or the button Hand in, or `course pack {name}.ipynb`) writes
`{name}-STUDENT.zip`, and says what is missing. You can hand in what is not
finished. Keep the folder: the zip is a copy.
"""

MAKE = """\
check: environment ## check the exercises as they are saved
	@PATH="$(BIN):$$PATH" "$(BIN)/course" check "$(LESSON)"

pack: environment ## make the file to hand in (STUDENT=ann: whose it is)
	@PATH="$(BIN):$$PATH" "$(BIN)/course" pack "$(LESSON)" $(if $(STUDENT),--student "$(STUDENT)")
"""


def release(
    folder: Path, out: Path, students: Sequence[str] = (), console: Console | None = None
) -> list[Path]:
    """Write the zip of an assignment; one for each student where it is seeded. Return the paths.

    Notebooks that are stale are built first. Nothing is written before everything is proved.

    Raises: CourseError where an exercise has no check, a right answer fails its hidden cases, or a
            solution would be handed out
    """
    lesson, assignment = buildable(folder), read_assignment(folder)
    assignment = replace(assignment, kit=kit_version())
    if assignment.seeded and not students:
        raise CourseError(f"{assignment.name} is seeded: need the class. Try --students class.csv.")
    copies = list(students) if assignment.seeded else [""]
    with at_work_in(folder):
        demand_exercises(assignment)
        demand_parts(assignment, hidden_exercises(folder))
        build(lesson, console or Console())
        _prove_hidden(folder)
        shared = _shared_files(lesson, assignment)
        frozen = freeze(assignment, "")
        made = {}
        for student in copies:
            own = assignment.for_student(student)
            values = frozen | (freeze(own, student, seeded_only=True) if student else {})
            files = {
                **shared,
                SETTINGS: to_toml(own).encode(),
                VALUES: (json.dumps(values, sort_keys=True) + "\n").encode(),
            }
            _demand_no_solution(lesson, own, files)
            made[out / f"{'-'.join(filter(None, (own.name, student)))}.zip"] = files
    for path, files in made.items():
        write_zip(path, {f"{assignment.name}/{name}": files[name] for name in files})
    return list(made)


def read_class(path: Path) -> list[str]:
    """Return the students in a CSV file: its column `student`, else its first one.

    Raises: CourseError for a file without any, or with one twice
    """
    rows = list(csv.reader(read_text(path, "a list of students, as CSV").splitlines()))
    titles = [title.strip().lower() for title in rows[0]] if rows else []
    column = titles.index("student") if "student" in titles else 0
    body = rows[1:] if "student" in titles else rows
    students = [row[column].strip() for row in body if len(row) > column and row[column].strip()]
    if not students:
        raise CourseError(f"{path}: need students, one a line under `student`; found none.")
    lower = [student.lower() for student in students]
    if twice := sorted({one for one in lower if lower.count(one) > 1}):
        raise CourseError(f"{path}: need each student once; got {', '.join(twice)} again.")
    return students


def freeze(assignment: Assignment, student: str, *, seeded_only: bool = False) -> dict[str, dict]:
    """Return the values of the right answers and of planted mistakes, for checks that need them.

    They are in the form that `Exercise.right_values` and `wrong_values` read: by key, `right` and
    `wrong`. `seeded_only` leaves out what is the same for every student.
    """
    found = {}
    for key in assignment.keys:
        exercise = find_exercise(key).seeded(assignment.seed(student))
        is_drawn = getattr(exercise.check, "drawn", None) is not None
        is_compared = isinstance(exercise.check, Cases | ByExample)
        if is_compared and (is_drawn or not seeded_only):
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                found[key] = values_of(exercise)
    return found


def _prove_hidden(folder: Path) -> None:
    """Send the right answers through the hidden cases."""
    for key, exercise in hidden_exercises(folder).items():
        check = exercise.check
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                values = exercise.right_values()
                check.judge(values, exercise)
            raised = [(n, one) for n, one in enumerate(values, 1) if isinstance(one, Raised)]
            why = "".join(f"case {n}: {one.name}: {one.text}. " for n, one in raised[:1])
        except CheckFailed as error:
            why = str(error)
        if why:
            raise CourseError(
                f"{folder / 'hidden.py'}: the right answer of {key} fails its hidden cases: {why}"
            )


def _shared_files(lesson: Lesson, assignment: Assignment) -> Files:
    """Return the files of every student's copy, by name."""
    notebook = lesson.student.read_bytes()
    files: Files = {
        f"{lesson.name}.ipynb": notebook,
        f".{lesson.name}.original.ipynb": notebook,
        "README.md": _readme(assignment).encode(),
        "Makefile": _makefile(lesson.name).encode(),
        **{name: (COURSE / name).read_bytes() for name in (*OWN, TUTOR)},
        **{f"tools/{tool}.py": (COURSE / "tools" / f"{tool}.py").read_bytes() for tool in TOOLS},
    }
    for path in sorted((COURSE / "course_lib").rglob("*")):
        parts = path.relative_to(COURSE).parts
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
            files["/".join(parts)] = path.read_bytes()
    texts = {path: path.read_text(encoding="utf-8") for path in lesson.folder.glob("checks/*.py")}
    trees = {module_of(lesson.name, path): ast.parse(text) for path, text in texts.items()}
    bare_checks(trees, ANSWERS)
    return files | {
        f"checks/{path.name}": f"{ast.unparse(trees[module_of(lesson.name, path)])}\n".encode()
        for path in sorted(texts)
    }


def _readme(assignment: Assignment) -> str:
    due = assignment.due
    return README.format(
        title=assignment.title,
        name=assignment.name,
        count=len(assignment.items),
        points=number(sum(assignment.points.values())),
        due=due.strftime("%A %d %B %Y, %H:%M %Z") if due else "no date",
        rows="\n".join(f"| `{key}` | {number(points)} |" for key, points in assignment.items),
    )


def _makefile(name: str) -> str:
    """Return those rules of the course's Makefile that an assignment needs, and its own."""
    blocks = (COURSE / "Makefile").read_text(encoding="utf-8").strip().split("\n\n")
    rules = [re.match(r"([\w-]+):(?!=)", block) for block in blocks]
    kept = [
        block
        for block, rule in zip(blocks, rules, strict=True)
        if rule is None or rule[1] in TARGETS
    ]
    text = "\n\n".join([*kept, MAKE])
    text = re.sub(r"^\.PHONY:.*$", f".PHONY: {' '.join(TARGETS)} check pack", text, flags=re.M)
    text = UNUSED.sub("", text)
    text = re.sub(r"^LESSON \?=.*$", f"LESSON ?= {name}.ipynb", text, flags=re.M)
    return re.sub(r" \(LESSON=[^)]*\)", "", text).replace("the first lesson", "the assignment")


def _demand_no_solution(lesson: Lesson, assignment: Assignment, files: Files) -> None:
    """Check that no solution of an own exercise stands in what is the assignment's own.

    Raises: CourseError that names the file
    """
    for cell in read_source(lesson.source):
        if not (cell.is_exercise and assignment.is_own(cell.exercise)):
            continue
        for solution in solutions(cell):
            text = _squeezed("\n".join(cell.text.splitlines()[solution.begin + 1 : solution.end]))
            for name, content in files.items():
                is_theirs = name.startswith(("course_lib/", "tools/"))
                if len(text) >= SHORTEST and not is_theirs and text in _squeezed(_read(content)):
                    raise CourseError(
                        f"{name} would hand out the solution of {cell.exercise}: "
                        f"{text.splitlines()[0]} ... Try another way to write the check."
                    )


def _read(content: bytes) -> str:
    """Return a file's text; of a notebook, that of its cells."""
    text = content.decode("utf-8", errors="replace")
    if not text.startswith('{\n "cells"'):
        return text
    return "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells)


def _squeezed(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#"))


def stale_notebooks(lesson: Lesson) -> list[str]:
    """Return which of the two notebooks are not there yet, for `course assignment show`."""
    found = []
    for path in (lesson.student, lesson.solved):
        try:
            read_notebook(path)
        except CourseError as error:
            found.append(str(error))
    return found
