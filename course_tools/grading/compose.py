"""Compose an assignment's source from exercises of lessons, and begin exercises of its own.

An exercise brings its text, its cell with the solution's markers, its check, and those definitions
of its lesson that it uses.
"""

import ast
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.checks.exercise import exercises_of
from course_lib.checks.lesson_source import SourceCell, read_source, stub_for_parsing
from course_lib.checks.right_answer import (
    SETTINGS,
    bound_names,
    code_cells,
    needed_above,
    solved_cell,
)
from course_lib.core import CourseError
from course_lib.core.files import write_whole
from course_lib.workbooks.assignment import (
    Assignment,
    lesson_in,
    number,
    read_assignment,
    write_assignment,
)
from course_lib.workbooks.lessons import Lesson, find_lesson
from course_tools.authoring.new_exercise import CELLS, PLAIN_CHECK

HEADING = re.compile(r"^#+ (?:Exercise \d+(?: \(\w+\))?: )?(.*)$")
REACHED_FOR = ("torch", "torch.distributed", "torch.nn")  # also where our solution does without

TITLE = """\
# {title}

**What:** {count} below, {points} points. **Due:** {due}.

**How:** replace the line `raise NotImplementedError(...)` of an exercise, run its cell, then its
check, as often as you like. It says `right`, or what went wrong and what to look at.

**Check all of it:** save (Ctrl+S), then `course check {name}.ipynb` in a terminal.
**Hand in:** `course pack {name}.ipynb` in a terminal makes one file, and says what is missing."""

GIVEN = "What the exercises take from their lessons is given."
OWN_CHECKS = '''"""The checks of the exercises that only {name} has."""

from course_lib.checks.{name}.{module} import {constant}

EXERCISES = ({constant},)
'''


@dataclass
class ExercisePart:
    """One exercise of a lesson: its heading, its text, its two cells, and what it uses."""

    key: str
    lesson: str
    heading: str
    text: str
    cell: SourceCell
    check: SourceCell
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)  # the text of each definition, by name


def chosen(words: Sequence[str], folder: Path) -> list[tuple[Lesson, str]]:
    """Return the exercises that `04_collectives:collectives-2,collectives-3` or `06_ddp` mean.

    Raises: CourseError for an unknown lesson or exercise, or one that is named twice
    """
    found: list[tuple[Lesson, str]] = []
    for word in words:
        name, _, keys = word.partition(":")
        lesson = find_lesson(name, folder)
        known = [exercise.key for exercise in exercises_of(lesson.word)]
        for key in keys.split(",") if keys else known:
            if key not in known:
                raise CourseError(
                    f"{lesson.name}: need one of its exercises, {', '.join(known)}; got {key!r}."
                )
            if (lesson, key) in found:
                raise CourseError(f"need each exercise once; got {key} twice.")
            found.append((lesson, key))
    return found


def compose(
    assignment: Assignment, exercises: Sequence[tuple[Lesson, str]], folder: Path, *, own: bool
) -> list[Path]:
    """Write a new assignment into a folder; return the files, those to be filled in first.

    `own` begins an exercise of its own, NAME-1. Nothing is written unless all can be.

    Raises: CourseError where the folder is taken, or the exercises do not fit together
    """
    if (folder / SETTINGS).exists() or (folder / "source").exists():
        raise CourseError(f"{folder} is an assignment already. Try another name.")
    if exercises_of(assignment.name):
        raise CourseError(f"need a name that no lesson has; got {assignment.name!r}.")
    if not exercises and not own:
        raise CourseError("need exercises. Try --from 06_ddp, or --own to begin one of your own.")
    text = source_text(assignment, [_part(lesson, key) for lesson, key in exercises])
    made = _own_exercise(assignment.name, folder) if own else {}
    source = folder / "source" / f"{assignment.name}.py"
    cells = made.pop(source, "")
    files = {**made, source: text + cells}
    for path, content in files.items():
        write_whole(path, content)
    write_assignment(assignment, folder)
    return [source, *made, folder / SETTINGS]


def _own_exercise(name: str, folder: Path) -> dict[Path, str]:
    """Return the files of an exercise of the assignment's own, to be filled in."""
    function = f"{name}_1"
    values = {"key": f"{name}-1", "number": "1", "lesson": name, "name": function}
    values["constant"] = function.upper()
    return {
        folder / "checks" / f"{function}.py": PLAIN_CHECK.format(**values),
        folder / "checks" / "__init__.py": OWN_CHECKS.format(
            module=function, **values | {"name": name}
        ),
        folder / "source" / f"{name}.py": CELLS.format(**values),
    }


def source_text(assignment: Assignment, parts: Sequence[ExercisePart]) -> str:
    """Return the source of an assignment, in the form of a lesson's."""
    due = assignment.due.strftime("%A %d %B %Y, %H:%M %Z") if assignment.due else "no date"
    count = f"{len(assignment.items)} exercise{'s' if len(assignment.items) != 1 else ''}"
    title = TITLE.format(
        title=assignment.title,
        name=assignment.name,
        count=count,
        points=number(sum(assignment.points.values())),
        due=due,
    )
    given = _given(parts)
    cells = [_text(title), _code(_imports(parts))]
    cells += [_text(GIVEN), *map(_code, given)] if given else []
    for count_, part in enumerate(parts, start=1):
        where = f"`{part.key}`, {number(assignment.points[part.key])} points"
        heading = f"## {count_} {part.heading[:1].upper()}{part.heading[1:]}"
        cells.append(_text(f"{heading}\n\n{where}\n\n{part.text}"))
        for cell, tag in ((part.cell, "exercise"), (part.check, "check")):
            cells.append(f'\n# %% tags=["{tag}"] exercise="{part.key}"\n{cell.text}\n')
    return "\n".join(cells)


def _text(text: str) -> str:
    lines = (f"# {line}".rstrip() for line in text.splitlines())
    return "\n".join(["# %% [markdown]", *lines, ""])


def _code(text: str) -> str:
    return f"# %%\n{text}\n"


def _part(lesson: Lesson, key: str) -> ExercisePart:
    """Read an exercise, and what it needs, from its lesson's source."""
    cells = read_source(lesson.source)
    at = next(n for n, cell in enumerate(cells) if cell.is_exercise and cell.exercise == key)
    check = next(cell for cell in cells if cell.is_exercise_check and cell.exercise == key)
    before = next(cell for cell in reversed(cells[:at]) if cell.kind == "markdown")
    lines = before.text.splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith("#")]
    begin = heads[-1] if heads else -1
    match = HEADING.match(lines[begin]) if heads else None
    part = ExercisePart(
        key=key,
        lesson=lesson.name,
        heading=match[1] if match else key,
        text="\n".join(lines[begin + 1 :]).strip(),
        cell=cells[at],
        check=check,
    )
    _add_needed(part, lesson)
    return part


def _add_needed(part: ExercisePart, lesson: Lesson) -> None:
    """Add the imports and the definitions that the stub or the solution uses.

    Of several definitions of a name the last one counts.
    """
    text = f"{solved_cell(part.key)}\n\n{stub_for_parsing(part.cell)}"
    needed = needed_above(part.key, ast.parse(text))
    last = {name: n for n, (_, one) in enumerate(needed) for name in bound_names(one)}
    for n, (cell, one) in enumerate(needed):
        if isinstance(one, ast.Import | ast.ImportFrom):
            part.imports.append(one)
        elif n in last.values():
            if cell.is_exercise:
                raise CourseError(
                    f"{part.key} builds on {cell.exercise}, and cannot stand in an assignment."
                )
            part.given[", ".join(bound_names(one))] = _lines_of(cell, one)
    for cell in code_cells(lesson.source)[:1]:
        body = ast.parse(_without_magic(cell.text)).body
        part.imports += [
            each
            for each in body
            if isinstance(each, ast.Import | ast.ImportFrom) and _is_reached_for(each)
        ]


def _is_reached_for(one: ast.Import | ast.ImportFrom) -> bool:
    modules = [one.module] if isinstance(one, ast.ImportFrom) else [each.name for each in one.names]
    return all(module in REACHED_FOR for module in modules)


def _without_magic(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(("%", "# %")))


def _lines_of(cell: SourceCell, one: ast.stmt) -> str:
    """Return the lines of a statement in its cell, with its decorators and comments."""
    decorators = getattr(one, "decorator_list", [])
    first = min([one.lineno, *(each.lineno for each in decorators)])
    return "\n".join(cell.text.splitlines()[first - 1 : one.end_lineno])


def _given(parts: Iterable[ExercisePart]) -> list[str]:
    """Return the definitions of all parts, each once.

    Raises: CourseError where two exercises need different ones under one name
    """
    found: dict[str, tuple[str, str]] = {}
    for part in parts:
        for name, text in part.given.items():
            first, there = found.setdefault(name, (part.key, text))
            if there != text:
                raise CourseError(
                    f"{first} and {part.key} need different definitions of {name}: they cannot "
                    "stand in one assignment."
                )
    return [text for _, text in found.values()]


def _imports(parts: Sequence[ExercisePart]) -> str:
    """Return the imports of all parts, in groups, one line a module.

    Raises: CourseError where a name means two things
    """
    names: dict[str, tuple[str, str]] = {"check": ("course_lib.checks", "check")}
    for part in parts:
        for one in part.imports:
            module = one.module or "" if isinstance(one, ast.ImportFrom) else ""
            for alias in one.names:
                bound, place = alias.asname or alias.name, (module, alias.name)
                if names.setdefault(bound, place) != place:
                    raise CourseError(
                        f"{part.key} needs another {bound} than an exercise before it: they "
                        "cannot stand in one assignment."
                    )
    lines: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for module in sorted({module for module, _ in names.values()}):
        inside = sorted((name, bound) for bound, (place, name) in names.items() if place == module)
        words = [name if name == bound else f"{name} as {bound}" for name, bound in inside]
        for line in (
            [f"from {module} import {', '.join(words)}"]
            if module
            else map("import {}".format, words)
        ):
            lines[_group(module or line.split()[1])].append(line)
    return "\n\n".join("\n".join(group) for group in lines.values() if group)


def _group(module: str) -> int:
    top = module.partition(".")[0]
    return 2 if top == "course_lib" else int(top not in sys.stdlib_module_names)


def buildable(folder: Path) -> Lesson:
    """Return the assignment in a folder as a lesson, its source checked against its settings.

    Raises: CourseError where the exercises in the source are others than those of the settings
    """
    lesson, assignment = lesson_in(folder), read_assignment(folder)
    there = [cell.exercise for cell in read_source(lesson.source) if cell.is_exercise]
    if there != list(assignment.keys):
        raise CourseError(
            f"{folder / SETTINGS}: need the exercises of {lesson.source.name}, in their order: "
            f"{', '.join(there)}; got {', '.join(assignment.keys)}."
        )
    return lesson
