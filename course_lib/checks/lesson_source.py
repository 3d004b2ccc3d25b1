"""The source of a lesson, `notebooks/source/NN_idea.py`, as cells that know their line.

A jupytext py:percent file. An exercise cell carries its key, `# %% tags=["exercise"]
exercise="collectives-1"`, and holds its solution between markers inside a function:

    ### BEGIN SOLUTION: the hint that the stub will show
    ### END SOLUTION

`### BEGIN SOLUTION FROM course_lib.collectives.ring:ring_all_reduce: hint` takes the body of that
function instead, so that no solution is written twice. It names the file that defines the function,
not a package that offers it: the text is read, nothing is imported.

In a cell tagged predict, the line `### GUESS guess_steps.commit(40)` is a statement of the solved
notebook; the student's notebook, where the learner commits to a number, leaves it out.
"""

import ast
import importlib.util
import json
import re
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from course_lib.core import CourseError

CELL_START = re.compile(r"^\s*# ?%%+( |$)")
BEGIN = re.compile(
    r"^(?P<indent> *)### BEGIN SOLUTION(?: FROM (?P<module>[\w.]+):(?P<name>[\w.]+))?"
    r"(?:: *(?P<hint>.*?))?\s*$"
)
END = re.compile(r"^ *### END SOLUTION\s*$")
GUESS = re.compile(r"^### GUESS (?P<statement>(?P<name>\w+)\.commit\(.+\))\s*$")
LOOKS_LIKE_GUESS = re.compile(r"^\s*#+ *GUESS\b")
LINE_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class SourceCell:
    """One cell of a source: its text, its tags, its exercise, its line in the file.

    guesses   the lines of the text that only the solved notebook has, counted from 0
    """

    kind: str
    text: str
    line: int
    tags: tuple[str, ...] = ()
    exercise: str = ""
    unknown: tuple[str, ...] = ()
    guesses: tuple[int, ...] = ()

    @property
    def is_exercise(self) -> bool:
        return "exercise" in self.tags

    @property
    def is_exercise_check(self) -> bool:
        return "check" in self.tags and bool(self.exercise)


def read_source(path: Path) -> list[SourceCell]:
    """Return the cells of a source file; a guess is the statement that the solved notebook shows.

    Raises: CourseError for a first cell without `# %%`, or a guess that is none
    """
    import jupytext  # takes half a second, which no check needs

    text = path.read_text(encoding="utf-8")
    numbered = enumerate(text.splitlines(), start=1)
    starts = [number for number, line in numbered if CELL_START.match(line)]
    cells = jupytext.reads(text, fmt="py:percent").cells
    if len(cells) != len(starts):
        raise CourseError(
            f"{path}: need every cell to start with `# %%`, also the first one; "
            f"got {len(starts)} such lines and {len(cells)} cells."
        )
    read = [_cell(cell, line) for cell, line in zip(cells, starts, strict=True)]
    return [_with_guesses(cell, path) for cell in read]


def _cell(cell: dict, line: int) -> SourceCell:
    metadata = dict(cell["metadata"])
    metadata.pop("lines_to_next_cell", None)
    return SourceCell(
        kind=cell["cell_type"],
        text=cell["source"].strip("\n"),
        line=line,
        tags=tuple(metadata.pop("tags", ())),
        exercise=str(metadata.pop("exercise", "")),
        unknown=tuple(metadata),
    )


def _with_guesses(cell: SourceCell, path: Path) -> SourceCell:
    """Return a cell with its guesses as plain statements."""
    lines = cell.text.splitlines()
    found = [at for at, line in enumerate(lines) if LOOKS_LIKE_GUESS.match(line)]
    for at in found:
        match = GUESS.match(lines[at])
        asked = rf"^{match['name']} *= *predict\(" if match else ""
        above = "\n".join(lines[:at])
        if cell.kind != "code" or "predict" not in cell.tags:
            wrong = 'a guess stands outside of a code cell with tags=["predict"]'
        elif match is None or not _is_python(match["statement"]):
            wrong = f"need `### GUESS name.commit(value)`; got `{lines[at].strip()}`"
        elif not re.search(asked, above, re.MULTILINE):
            wrong = f"need `{match['name']} = predict(...)` above its guess, in the same cell"
        else:
            lines[at] = match["statement"]
            continue
        raise CourseError(f"{path.name}, line {cell.line + 1 + at}: {wrong}.")
    return replace(cell, text="\n".join(lines), guesses=tuple(found)) if found else cell


def _is_python(statement: str) -> bool:
    try:
        ast.parse(statement)
    except SyntaxError:
        return False
    return True


@dataclass(frozen=True)
class Solution:
    """A solution between markers: its lines in the cell, and the text of the markers."""

    begin: int
    end: int
    indent: str
    module: str
    name: str
    hint: str


def solutions(cell: SourceCell) -> list[Solution]:
    """Return the solutions of an exercise cell, by their markers."""
    found: list[Solution] = []
    begin: tuple[int, re.Match[str]] | None = None
    for index, line in enumerate(cell.text.splitlines()):
        match = BEGIN.match(line)
        if (match and begin) or (END.match(line) and not begin):
            raise Misplaced("BEGIN and END SOLUTION have to come in pairs", index)
        if match:
            begin = index, match
        elif END.match(line) and begin:
            parts = begin[1].groupdict(default="")
            found.append(Solution(begin[0], index, **parts))
            begin = None
    if begin:
        raise Misplaced("BEGIN SOLUTION has no END SOLUTION", begin[0])
    return found


class Misplaced(CourseError):
    """An error at one line of a cell."""

    def __init__(self, what: str, index: int) -> None:
        super().__init__(what)
        self.index = index


def stub(cell: SourceCell) -> str:
    """Return the learner's version of the cell: each solution replaced by a NotImplementedError."""
    lines = cell.text.splitlines()
    for solution in reversed(solutions(cell)):
        message = json.dumps(f"exercise {cell.exercise}: {solution.hint}", ensure_ascii=False)
        line = f"{solution.indent}raise NotImplementedError({message})"
        if len(line) > LINE_WIDTH:
            inner = f"{solution.indent}    {message}"
            line = f"{solution.indent}raise NotImplementedError(\n{inner}\n{solution.indent})"
        lines[solution.begin : solution.end + 1] = line.splitlines()
    return "\n".join(lines)


def solved(cell: SourceCell) -> str:
    """Return the cell with its solutions; those in the library are taken from there."""
    lines = cell.text.splitlines()
    for solution in reversed(solutions(cell)):
        body = lines[solution.begin + 1 : solution.end]
        if solution.module:
            text = library_body(solution, _parameters(cell, solution))
            body = textwrap.indent(text, solution.indent).splitlines()
        marked = [f"{solution.indent}### BEGIN SOLUTION", *body, lines[solution.end]]
        lines[solution.begin : solution.end + 1] = marked
    return "\n".join(lines)


def _parameters(cell: SourceCell, solution: Solution) -> list[str] | None:
    """Return the parameter names of the function of a cell that holds a solution."""
    number = solution.begin + 1
    inside = [
        node
        for node in ast.walk(ast.parse(stub_for_parsing(cell)))
        if isinstance(node, ast.FunctionDef) and node.lineno < number <= (node.end_lineno or 0)
    ]
    return _names(max(inside, key=lambda node: node.lineno)) if inside else None


def stub_for_parsing(cell: SourceCell) -> str:
    """Return the cell with `raise` in place of every line of a solution, so line numbers stay."""
    lines = cell.text.splitlines()
    for solution in solutions(cell):
        count = solution.end + 1 - solution.begin
        lines[solution.begin : solution.end + 1] = [f"{solution.indent}raise"] * count
    return "\n".join(lines)


def library_body(solution: Solution, parameters: list[str] | None) -> str:
    """Return the body of a library function, without its docstring, read from the file as text.

    Raises: Misplaced where there is no such function, or it has other parameters.
    """
    text = _library_text(solution)
    node: ast.AST | None = ast.parse(text)
    for name in solution.name.split("."):
        node = next(
            (child for child in getattr(node, "body", []) if getattr(child, "name", "") == name),
            None,
        )
    if not isinstance(node, ast.FunctionDef):
        raise Misplaced(f"{solution.module} has no function {solution.name}", solution.begin)
    if parameters is not None and parameters != _names(node):
        raise Misplaced(
            f"{solution.name} has the parameters {', '.join(_names(node))}; "
            f"the cell's function has {', '.join(parameters)}",
            solution.begin,
        )
    return _body(node, text)


def _library_text(solution: Solution) -> str:
    """Return the text of the library module that holds a solution; it is found, not imported."""
    try:
        spec = importlib.util.find_spec(solution.module)
    except ImportError:  # in a package that is not there
        spec = None
    if spec is None or spec.origin is None:
        raise Misplaced(f"there is no module {solution.module}", solution.begin)
    return Path(spec.origin).read_text(encoding="utf-8")


def _body(node: ast.FunctionDef, text: str) -> str:
    """Return the lines of a function after its docstring, dedented, with their comments."""
    has_docstring = ast.get_docstring(node) is not None
    first = (node.body[0].end_lineno or 0) if has_docstring else node.body[0].lineno - 1
    return textwrap.dedent("\n".join(text.splitlines()[first : node.end_lineno])).strip("\n")


def _names(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs]
    return [argument.arg for argument in every if argument is not None]


def for_students(cells: list[SourceCell]) -> list[SourceCell]:
    """Return the student's cells: stubs in place of solutions, and nothing for instructors."""
    return [_for_student(cell) for cell in cells if "instructor-only" not in cell.tags]


def _for_student(cell: SourceCell) -> SourceCell:
    if cell.is_exercise:
        return replace(cell, text=stub(cell))
    lines = cell.text.splitlines()
    kept = [line for at, line in enumerate(lines) if at not in cell.guesses]
    return replace(cell, text="\n".join(kept).strip("\n"), guesses=()) if cell.guesses else cell
