"""The right answer of an exercise: the solution that stands in its lesson's source, run.

So it is written once. It may use what the cells above it define; of those, only the definitions
that it needs are run.
"""

import ast
import contextlib
import dis
import functools
import linecache
import re
from pathlib import Path
from types import CodeType
from typing import Any

from course_lib.checks.lesson_source import CELL_START, SourceCell, solved
from course_lib.core import CourseError


def lesson_of(key: str) -> Path:
    """Return the source of the lesson that an exercise is in: `ddp-2` is in `06_ddp.py`.

    Raises: CourseError where there is none
    """
    idea, folder = key.rpartition("-")[0], Path(__file__).parents[2] / "notebooks" / "source"
    found = sorted(folder.glob(f"[0-9]*_{idea}.py"))
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


@functools.cache
def right_answer(key: str) -> Any:
    """Return the right answer of an exercise: what its solved cell defines last."""
    return run_cell(key, solved_cell(key))


def run_cell(key: str, text: str) -> Any:
    """Run the text of an exercise's cell; return the function, class or value it defines last.

    It finds the names that the cells above it define, and nothing else of them is run.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    file = f"<cell {key} {abs(hash(text)):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    tree = ast.parse(text)
    exec(compile(_needed_above(key, tree), f"<above {key}>", "exec"), names)
    exec(compile(tree, file, "exec"), names)
    return names[_bound(tree.body[-1])[-1]]


def _needed_above(key: str, tree: ast.Module) -> ast.Module:
    """Return the statements of the cells above an exercise that define what it uses."""
    above = list[ast.stmt]()
    for cell in code_cells(lesson_of(key)):
        if cell.is_exercise and cell.exercise == key:
            break
        with contextlib.suppress(SyntaxError):  # a cell with a magic
            above += ast.parse(solved(cell) if cell.is_exercise else cell.text).body
    used, needed = _used(tree), list[ast.stmt]()
    while True:
        found = [stmt for stmt in above if not used.isdisjoint(_bound(stmt))]
        if len(found) == len(needed):
            break
        needed, used = found, used.union(*map(_used, found))
    for statement in needed:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            statement.names = [a for a in statement.names if _alias(a) in used]
    return ast.Module(body=needed, type_ignores=[])


def _used(tree: ast.Module | ast.stmt) -> set[str]:
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


def _bound(statement: ast.stmt) -> list[str]:
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
