"""Rules for a lesson's source, checked before it is built: a sentence for each breach."""

import ast
import re
from collections.abc import Iterator
from itertools import chain

from course_lib.checks.lesson_source import (
    LINE_WIDTH,
    Misplaced,
    SourceCell,
    for_students,
    solutions,
    solved,
    stub,
    stub_for_parsing,
)
from course_lib.workbooks.two_notebooks import MEASURED

TAGS = (
    *("predict", "exercise", "check", "picture", "failure", MEASURED),
    *("instructor-only", "raises-exception"),
)
MAX_CELL_LINES, MAX_STUB_LINES = 15, 25
MAX_CELLS, MAX_CODE_LINES = 60, 250

Problem = tuple[int, str]


def problems(cells: list[SourceCell], word: str) -> list[Problem]:
    """Return everything wrong with the source of lesson `word`, as (line, sentence), by line.

    An assignment has no word: its exercises are of any lessons, and as many as its author likes.
    """
    found = list(chain(_opening(cells), _labels(cells), _exercises(cells, word), _pairs(cells)))
    if not found and word:
        found = list(_sizes(for_students(cells)))
    return sorted(found)


def _opening(cells: list[SourceCell]) -> Iterator[Problem]:
    first = cells[0] if cells else SourceCell(kind="raw", text="", line=1)
    if first.kind != "markdown" or not first.text.startswith("# "):
        yield first.line, "need a markdown cell with a title, `# # 04 ...`, as the first cell"


def _labels(cells: list[SourceCell]) -> Iterator[Problem]:
    """Find tags and metadata that mean nothing, most likely typos."""
    for cell in cells:
        unknown = [tag for tag in cell.tags if tag not in TAGS]
        if unknown:
            yield cell.line, f"need tags out of {', '.join(TAGS)}; got {', '.join(unknown)}"
        if MEASURED in cell.tags and (cell.kind != "code" or {"check", "exercise"} & {*cell.tags}):
            yield cell.line, f"need the tag {MEASURED} on code that is neither exercise nor check"
        if cell.unknown:
            words = ", ".join(cell.unknown)
            yield cell.line, f"need nothing but tags and exercise after `# %%`; got {words}"
        if cell.kind == "raw":
            yield cell.line, "need a markdown or a code cell; got a raw cell"
        if cell.exercise and not (cell.is_exercise or cell.is_exercise_check):
            yield cell.line, f"{cell.exercise}: need the tag exercise or check beside an exercise"


def _exercises(cells: list[SourceCell], word: str) -> Iterator[Problem]:
    for cell in cells:
        if cell.is_exercise:
            yield from _exercise(cell, word)
        elif "### BEGIN SOLUTION" in cell.text or "### END SOLUTION" in cell.text:
            yield cell.line, 'a solution stands outside of a cell with tags=["exercise"]'


def _exercise(cell: SourceCell, word: str) -> Iterator[Problem]:
    key = cell.exercise or "this exercise"
    words = re.escape(word) if word else r"[a-z]\w*"
    if cell.kind != "code" or not re.fullmatch(rf"{words}-[1-9]\d*", cell.exercise):
        like = f"{word or 'ddp'}-1"
        yield cell.line, f'need a code cell with a key like exercise="{like}"; got {key!r}'
        return
    try:
        found = solutions(cell)
        if not found:
            yield cell.line, f"{key}: need ### BEGIN SOLUTION: hint ... ### END SOLUTION; got none"
        for solution in found:
            line = cell.line + 1 + solution.begin
            if not solution.hint:
                yield line, f"{key}: need a hint after `BEGIN SOLUTION:`, what the stub will say"
            if not solution.indent:
                yield line, f"{key}: need the solution inside a function; it stands at the margin"
        if max(map(len, stub(cell).splitlines())) > LINE_WIDTH:
            yield cell.line, f"{key}: the stub has a line of more than {LINE_WIDTH} characters"
        ast.parse(stub_for_parsing(cell))
        ast.parse(solved(cell))
    except Misplaced as error:
        yield cell.line + 1 + error.index, f"{key}: {error}"
    except SyntaxError as error:
        yield cell.line + (error.lineno or 1), f"{key}: this is not Python ({error.msg})"


def _pairs(cells: list[SourceCell]) -> Iterator[Problem]:
    """Check that each exercise appears once, followed by one check of its key."""
    exercises: dict[str, SourceCell] = {}
    checked: dict[str, int] = {}
    for cell in cells:
        key = cell.exercise
        if cell.is_exercise and key in exercises:
            yield cell.line, f"the exercise {key} stands at line {exercises[key].line} already"
        elif cell.is_exercise:
            exercises[key] = cell
        elif cell.is_exercise_check and key not in exercises:
            yield cell.line, f"a check for {key}, but no such exercise stands before it"
        elif cell.is_exercise_check and key in checked:
            yield cell.line, f"the check of {key} stands at line {checked[key]} already"
        elif cell.is_exercise_check:
            checked[key] = cell.line
            yield from _check_line(cell, exercises[key])
    for key in exercises.keys() - checked.keys():
        yield exercises[key].line, f"the exercise {key} has no check cell after it"


def _check_line(cell: SourceCell, exercise: SourceCell) -> Iterator[Problem]:
    match = re.fullmatch(rf'check\("{re.escape(cell.exercise)}", (\w+)\)', cell.text.strip())
    if match is None:
        yield cell.line, f'need the single line check("{cell.exercise}", name); got something else'
    elif not re.search(rf"^(def|class) {match[1]}\b", exercise.text, re.MULTILINE):
        yield cell.line, f"the check wants {match[1]}; the exercise cell does not define it"


def _sizes(cells: list[SourceCell]) -> Iterator[Problem]:
    """Check the size limits of a lesson, measured on the student's version."""
    code = [cell for cell in cells if cell.kind == "code"]
    for cell in code:
        limit = MAX_STUB_LINES if cell.is_exercise else MAX_CELL_LINES
        if num_lines(cell) > limit:
            yield cell.line, f"need at most {limit} lines in this cell; got {num_lines(cell)}"
    for what, amount, limit in (
        ("cells", len(cells), MAX_CELLS),
        ("code lines", sum(map(num_lines, code)), MAX_CODE_LINES),
    ):
        if amount > limit:
            yield cells[-1].line, f"need at most {limit} {what} in a lesson; got {amount}"


def num_lines(cell: SourceCell) -> int:
    """Count the lines of a cell that are not blank."""
    return sum(bool(line.strip()) for line in cell.text.splitlines())
