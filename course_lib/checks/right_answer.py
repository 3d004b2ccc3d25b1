"""The right answer of an exercise: the solution that stands in its lesson's source, run.

So it is written once. It may use what the cells above it define; of those, only the definitions
that it needs are run.

An assignment has a folder with an `assignment.toml`: the one that the environment variable
COURSE_ASSIGNMENT names, else the working folder, which is where a notebook runs. In it lie the
source and the checks of exercises that are in no lesson (`source/hw1.py`, `checks/`), and, where it
is a student's, the values of right answers in the place of their source (`values.json`).
"""

import ast
import contextlib
import dis
import functools
import gzip
import json
import linecache
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

from course_lib.checks.lesson_source import CELL_START, SourceCell, solved
from course_lib.core import CourseError
from course_lib.core.course_files import course_folder
from course_lib.core.files import read_json, read_text

FOLDER = "COURSE_ASSIGNMENT"  # the environment variable
SETTINGS, VALUES = "assignment.toml", "values.json"
SEEN = "seen.json.gz"  # `python -m course_lib.checks LESSON --freeze` writes it
UNPACK = "Unzip the assignment again, into another folder."


@dataclass(frozen=True)
class AssignmentHere:
    """The assignment whose folder this process works in; `student` is whose it is, or empty."""

    folder: Path
    name: str
    student: str

    @property
    def seed(self) -> str:
        """The string from which the student's own cases are drawn; empty where it is nobody's."""
        return seed_of(self.name, self.student) if self.student else ""


def seed_of(assignment: str, student: str) -> str:
    """Return what a student's own cases are drawn from, at home as when they are graded."""
    return f"{assignment} {student}"


def assignment_here() -> AssignmentHere | None:
    """Return the assignment at hand, or None outside of one.

    Raises: CourseError where its settings cannot be read
    """
    path = Path(os.environ.get(FOLDER, ".")) / SETTINGS
    if not path.is_file():
        return None
    try:
        found = tomllib.loads(read_text(path, "the settings of an assignment", hint=UNPACK))
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{path}: need TOML; got something else ({error}). {UNPACK}") from None
    student = str(found.get("student", "")) if found.get("seeded") is True else ""
    return AssignmentHere(path.parent.resolve(), str(found.get("name", "")), student)


@contextlib.contextmanager
def at_work_in(folder: Path) -> Iterator[None]:
    """Make an assignment the one at hand, for this process and those that it starts."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder.resolve())
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before


def frozen_values(key: str) -> Mapping[str, Any] | None:
    """Return the values of an exercise's answers that a student's folder has, or None.

    `right` holds those of the right answer, `wrong` pairs of a cause and what it leads to, as the
    JSON that `course_lib.checks.cases.from_json` reads.

    Raises: CourseError where the file cannot be read
    """
    here = assignment_here()
    path = here.folder / VALUES if here else None
    if path is None or not path.is_file():
        return None
    found = read_json(path, "the values of an assignment", hint=UNPACK)
    if not isinstance(found, dict) or not isinstance(found.get(key, {}), dict):
        raise CourseError(f"{path}: need the values of each exercise; got others. {UNPACK}")
    return found.get(key)


def seen_values(key: str) -> Mapping[str, Any] | None:
    """Return the values, as in `frozen_values`, that lie beside the checks of a lesson, or None.

    They count as long as neither the solution nor the checks have changed.
    """
    path = seen_file(key.rpartition("-")[0])
    found = _read_seen(path).get(key) if path.is_file() else None
    return found if found and found["of"] == made_of(key) else None


def seen_file(lesson: str) -> Path:
    """Return the file with what the checks of a lesson have seen of right and wrong answers."""
    return Path(__file__).parent / lesson / SEEN


@functools.cache
def _read_seen(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


@functools.cache
def made_of(key: str) -> str:
    """Return a digest of what an exercise's values are made of: its solution and its checks."""
    folder = seen_file(key.rpartition("-")[0]).parent
    files = [Path(__file__).with_name("properties.py"), *sorted(folder.glob("*.py"))]
    texts = [solved_cell(key), *(path.read_text(encoding="utf-8") for path in files)]
    return sha256("\n".join(texts).encode()).hexdigest()


def lesson_of(key: str) -> Path:
    """Return the source of the lesson that an exercise is in: `ddp-2` is in `06_ddp.py`.

    Raises: CourseError where there is none
    """
    idea, folder = key.rpartition("-")[0], course_folder() / "notebooks" / "source"
    found = sorted(folder.glob(f"[0-9]*_{idea}.py"))
    here = assignment_here()
    if here and here.name == idea:
        found += filter(Path.is_file, [here.folder / "source" / f"{idea}.py"])
    if not found:
        raise CourseError(f"{key}: need its lesson's source, {folder}/NN_{idea}.py; it is missing.")
    return found[0]


@functools.cache
def code_cells(path: Path) -> tuple[SourceCell, ...]:
    """Return the code cells of a source, read without jupytext: a check may not wait for it."""
    cells, lines = list[SourceCell](), path.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if CELL_START.match(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        key = re.search(r'exercise="([^"]+)"', lines[start])
        if "[markdown]" not in lines[start]:
            tags = ("exercise",) if '"exercise"' in lines[start] else ()
            text = "\n".join(lines[start + 1 : end]).strip("\n")
            exercise = key[1] if key else ""
            cells.append(
                SourceCell(kind="code", text=text, line=start + 1, tags=tags, exercise=exercise)
            )
    return tuple(cells)


def solved_cell(key: str) -> str:
    """Return the code of an exercise with its solution, as the solved notebook shows it."""
    for cell in code_cells(lesson_of(key)):
        if cell.is_exercise and cell.exercise == key:
            lines = solved(cell).splitlines()
            return "\n".join(line for line in lines if not line.strip().startswith("### "))
    raise CourseError(f"{key}: {lesson_of(key).name} has no such exercise.")


def right_answer(key: str) -> Any:
    """Return the right answer of an exercise: what its solved cell defines last."""
    return _defined_last(key, solved_cell(key))


@functools.cache
def _defined_last(key: str, text: str) -> Any:
    return run_cell(key, text)


def run_cell(key: str, text: str) -> Any:
    """Run the text of an exercise's cell; return the function, class or value it defines last.

    It finds the names that the cells above it define, and nothing else of them is run.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    file = f"<cell {key} {abs(hash(text)):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    tree = ast.parse(text)
    above = ast.Module([statement for _, statement in needed_above(key, tree)], type_ignores=[])
    exec(compile(above, f"<above {key}>", "exec"), names)
    exec(compile(tree, file, "exec"), names)
    return names[bound_names(tree.body[-1])[-1]]


def needed_above(key: str, tree: ast.Module) -> list[tuple[SourceCell, ast.stmt]]:
    """Return what the cells above an exercise define of what it uses: the cell and the statement.

    An import has only the names that are used.
    """
    cells = code_cells(lesson_of(key))
    own = [cell.is_exercise and cell.exercise == key for cell in cells].index(True)
    return needed_of(cells[:own], names_used(tree))


def needed_of(cells: Iterable[SourceCell], used: set[str]) -> list[tuple[SourceCell, ast.stmt]]:
    """Return what the cells define of these names, and of what that uses in its turn."""
    above = list[tuple[SourceCell, ast.stmt]]()
    for cell in cells:
        with contextlib.suppress(SyntaxError):  # a cell with a magic
            body = ast.parse(solved(cell) if cell.is_exercise else cell.text).body
            above += [(cell, statement) for statement in body]
    needed = list[tuple[SourceCell, ast.stmt]]()
    while True:
        found = [one for one in above if not used.isdisjoint(bound_names(one[1]))]
        if len(found) == len(needed):
            break
        needed, used = found, used.union(*(names_used(statement) for _, statement in found))
    for _, statement in needed:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            statement.names = [a for a in statement.names if _alias(a) in used]
    return needed


def names_used(tree: ast.Module | ast.stmt) -> set[str]:
    """Return the global names that code reads, also inside its functions."""
    body = tree.body if isinstance(tree, ast.Module) else [tree]
    module = ast.Module(body=body, type_ignores=[])
    waiting, used = [compile(module, "<cell>", "exec")], set[str]()
    while waiting:
        code = waiting.pop()
        loads = (i for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        used |= {str(instruction.argval) for instruction in loads}
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return used


def bound_names(statement: ast.stmt) -> list[str]:
    """Return the names that a definition, an import or an assignment binds."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [_alias(alias) for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name)]
    return []


def _alias(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]
