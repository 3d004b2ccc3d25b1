"""Make the two notebooks of a lesson from its cells: the student's, and the solved one."""

import json
from collections import Counter

import nbformat
from nbformat import NotebookNode

from course_lib.checks.lesson_source import SourceCell, for_students, solved
from course_lib.workbooks.lessons import Lesson, short_hash

MEASURED = "measured"
IGNORED = "nbval-ignore-output"


def student_notebook(lesson: Lesson, cells: list[SourceCell]) -> NotebookNode:
    """Return the student's notebook: stubs, no outputs; the exercise checks let Run All go on."""
    return _notebook(lesson, cells, [_student_cell(cell) for cell in for_students(cells)])


def solved_notebook(lesson: Lesson, cells: list[SourceCell]) -> NotebookNode:
    """Return the lesson with its solutions, not yet executed; nbval ignores measured outputs."""
    return _notebook(lesson, cells, [_solved_cell(cell) for cell in cells])


def _student_cell(cell: SourceCell) -> NotebookNode:
    goes_on = ["raises-exception"] if cell.is_exercise_check else []
    made = _cell(cell, cell.text, [*(tag for tag in cell.tags if tag != MEASURED), *goes_on])
    if cell.exercise:
        made.metadata["deletable"] = False
    return made


def _solved_cell(cell: SourceCell) -> NotebookNode:
    compared = ["nbval-check-output"] if "check" in cell.tags else []
    tags = [IGNORED if tag == MEASURED else tag for tag in cell.tags]
    return _cell(cell, solved(cell) if cell.is_exercise else cell.text, [*tags, *compared])


def _cell(cell: SourceCell, text: str, tags: list[str]) -> NotebookNode:
    kind = "exercise" if cell.is_exercise else "check"
    name = f"{kind}-{cell.exercise}" if cell.exercise else f"lesson-{short_hash(text)}"
    metadata: dict[str, object] = {"exercise": cell.exercise} if cell.exercise else {}
    if tags:
        metadata["tags"] = tags
    new = nbformat.v4.new_code_cell if cell.kind == "code" else nbformat.v4.new_markdown_cell
    return new(text, id=name, metadata=metadata)


def _notebook(lesson: Lesson, source: list[SourceCell], cells: list[NotebookNode]) -> NotebookNode:
    seen: Counter[str] = Counter()
    for cell in cells:
        seen[cell.id] += 1
        cell.id += f"-{seen[cell.id]}" if seen[cell.id] > 1 else ""
    stubs = {
        cell.exercise: short_hash(cell.text) for cell in for_students(source) if cell.is_exercise
    }
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "course": {"lesson": lesson.name, "build": short_hash(json.dumps(cells)), "stubs": stubs},
    }
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)
