"""An assignment: which exercises, how many points, until when; its settings and its files.

assignments/hw1/
    assignment.toml     what `Assignment` holds
    source/hw1.py       the cells, in the form of a lesson's source
    hw1.ipynb           the student's notebook, built from the source
    solved/hw1.ipynb    the solved one
    checks/             the checks of exercises that are in no lesson: hw1-1, hw1-2, ...
    hidden.py           HIDDEN: by key a further check, which only the grading runs
"""

import importlib.util
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from course_lib.checks.exercise import Check, Exercise, exercises_of, find_exercise
from course_lib.checks.right_answer import SETTINGS, seed_of
from course_lib.core import CourseError
from course_lib.core.files import read_text, write_whole
from course_lib.workbooks.late_rule import LateRule
from course_lib.workbooks.lessons import Lesson

NAME = re.compile(r"[a-z][a-z0-9]*")
KEY = re.compile(r"[a-z][a-z0-9_]*-[1-9]\d*")
STUDENT = re.compile(r"[\w.@+-]{1,80}")
NEED = "the settings of an assignment"


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The settings of an assignment.

    items    pairs of an exercise's key and its points, in the order of the notebook
    due      the time until which it is due, with a time zone; None: no such time
    seeded   each student has some cases of their own
    kit      the version of the course that it was made with
    student  whose copy it is; empty: the instructor's, or everybody's
    parts    by key the points of an exercise's parts (course_lib.checks.parts), where it has some
    late     what is taken off for late work; None: nothing

    Raises: CourseError for values that cannot be used
    """

    name: str
    title: str
    items: tuple[tuple[str, float], ...]
    due: datetime | None = None
    seeded: bool = False
    kit: str = ""
    student: str = ""
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    late: LateRule | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise CourseError(
                f"need a name of small letters and digits, like hw1; got {self.name!r}."
            )
        if not self.title.isprintable():
            raise CourseError(f"{self.name}: need a title on one line; got {self.title!r}.")
        if self.due and self.due.tzinfo is None:
            raise CourseError(f"{self.name}: need a due time with a time zone; got {self.due}.")
        if self.student and not STUDENT.fullmatch(self.student):
            raise CourseError(
                f"{self.name}: need a student's id of letters, digits and . @ + - _; "
                f"got {self.student!r}."
            )
        for key, points in self.items:
            if not KEY.fullmatch(key):
                raise CourseError(f"{self.name}: need keys like collectives-2; got {key!r}.")
            if not (math.isfinite(points) and points >= 0):
                raise CourseError(f"{self.name}: need points of 0 or more for {key}; got {points}.")
        for key, parts in self.parts.items():
            if not all(math.isfinite(points) and points >= 0 for points in parts.values()):
                raise CourseError(f"{self.name}: need points of 0 or more for the parts of {key}.")
            most, found = self.points[key], math.fsum(parts.values())
            if not math.isclose(most, found):
                need = f"parts of {key} that add up to its {number(most)} points"
                raise CourseError(f"{self.name}: need {need}; got {number(found)}.")
        if self.late and not self.due:
            raise CourseError(f"{self.name}: need a due time for the rule on late work; got none.")
        keys = [key for key, _ in self.items]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise CourseError(
                f"{self.name}: need each exercise once; got {', '.join(twice)} again."
            )

    @property
    def points(self) -> Mapping[str, float]:
        """The points of each exercise, by key, in the order of the notebook."""
        return dict(self.items)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its exercises, in the order of the notebook."""
        return tuple(key for key, _ in self.items)

    def is_own(self, key: str) -> bool:
        """Whether an exercise is the assignment's own, in no lesson."""
        return key.rpartition("-")[0] == self.name

    def seed(self, student: str) -> str:
        """Return what a student's own cases are drawn from; empty where there are none."""
        return seed_of(self.name, student) if self.seeded and student else ""

    def for_student(self, student: str) -> "Assignment":
        """Return the settings of a student's copy."""
        return replace(self, student=student)


def kit_version() -> str:
    """Return the version of the course."""
    return version("distributed-training-course")


def due_time(text: str) -> datetime:
    """Return the time in `2026-12-01T18:00`, in the local time zone where none is given.

    Raises: CourseError for another text
    """
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise CourseError(f"need a due time like 2026-12-01T18:00; got {text!r}.") from None
    return when if when.tzinfo else when.astimezone()


def number(points: float) -> str:
    """Format points: `10`, `2.5`."""
    return f"{points:g}"


def to_toml(assignment: Assignment) -> str:
    """Return the text of assignment.toml."""
    lines = [
        f"name = {_quoted(assignment.name)}",
        f"title = {_quoted(assignment.title)}",
        *([f"due = {assignment.due.isoformat()}"] if assignment.due else []),
        f"seeded = {str(assignment.seeded).lower()}  # true: each student has cases of their own",
        f"kit = {_quoted(assignment.kit)}  # the version of the course",
        *([f"student = {_quoted(assignment.student)}"] if assignment.student else []),
        "items = [",
        *(_item_line(assignment, key, points) for key, points in assignment.items),
        "]",
        *([assignment.late.to_toml()] if assignment.late else []),
    ]
    return "\n".join(lines) + "\n"


def _item_line(assignment: Assignment, key: str, points: float) -> str:
    words = [f"key = {_quoted(key)}", f"points = {number(points)}"]
    if parts := assignment.parts.get(key):
        own = (f"{_quoted(name)} = {number(value)}" for name, value in parts.items())
        words.append(f"parts = {{ {', '.join(own)} }}")
    return f"  {{ {', '.join(words)} }},"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_assignment(folder: Path) -> Assignment:
    """Return the assignment in a folder.

    Raises: CourseError where there is none, or its settings cannot be used
    """
    path = folder / SETTINGS
    try:
        found = tomllib.loads(read_text(path, NEED))
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{path}: need {NEED}; this is no TOML ({error}).") from None
    try:
        return _from_table(found)
    except CourseError as error:
        raise CourseError(f"{path}: {error}") from None


def _from_table(found: Mapping[str, Any]) -> Assignment:
    kinds: dict[str, tuple[type, str, Any]] = {
        "name": (str, "a text", None),
        "title": (str, "a text", ""),
        "due": (datetime, "a time like 2026-12-01T18:00:00+01:00", ...),
        "seeded": (bool, "true or false", False),
        "kit": (str, "a text", ""),
        "student": (str, "a text", ""),
    }
    values: dict[str, Any] = {}
    for word, (kind, text, default) in kinds.items():
        value = found.get(word, default)
        if (value is not default and not isinstance(value, kind)) or value is None:
            raise CourseError(f"need {text} as {word}; got {value!r}.")
        values[word] = None if value is ... else value
    items = found.get("items")
    if not isinstance(items, list) or not all(map(_is_item, items)):
        raise CourseError('need items, each like { key = "collectives-2", points = 10 }.')
    if values["due"] and values["due"].tzinfo is None:
        values["due"] = values["due"].astimezone()
    pairs = tuple((item["key"], float(item["points"])) for item in items)
    parts = {item["key"]: item["parts"] for item in items if "parts" in item}
    late = LateRule.from_table(found["late"]) if "late" in found else None
    return Assignment(**values, items=pairs, parts=parts, late=late)


def _is_item(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("key"), str):
        return False
    parts = item.get("parts", {})
    numbers = [item.get("points"), *(parts.values() if isinstance(parts, dict) else [None])]
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)


def write_assignment(assignment: Assignment, folder: Path) -> None:
    """Write the settings into a folder, whole or not at all."""
    write_whole(folder / SETTINGS, to_toml(assignment))


def find_assignment(name: str) -> Path:
    """Return the folder that `hw1` or `assignments/hw1` means, seen from the working folder.

    Raises: CourseError that lists the assignments there are
    """
    for folder in (Path(name), Path("assignments") / name):
        if (folder / SETTINGS).is_file():
            return folder
    known = sorted(path.parent.name for path in Path("assignments").glob(f"*/{SETTINGS}"))
    raise CourseError(
        f"need an assignment, or its folder; got {name!r}. There are: "
        f"{', '.join(known) or 'none yet'}. Try course assignment new."
    )


def lesson_in(folder: Path) -> Lesson:
    """Return the assignment in a folder as a lesson, for `course_tools.authoring.build`."""
    return Lesson(read_assignment(folder).name, folder.resolve())


def hidden_exercises(folder: Path) -> dict[str, Exercise]:
    """Return by key the exercises of an assignment with their hidden cases as their check.

    They are used inside `at_work_in(folder)`.

    Raises: CourseError where hidden.py cannot be imported, or holds something else
    """
    path = folder / "hidden.py"
    if not path.is_file():
        return {}
    assignment = read_assignment(folder)
    exercises_of(assignment.name)  # hidden.py may import from its own checks
    hidden = _imported(path).get("HIDDEN")
    if not isinstance(hidden, dict):
        raise CourseError(f"{path}: need HIDDEN = {{key: check}}; got {type(hidden).__name__}.")
    found = {}
    for key, check in hidden.items():
        if key not in assignment.keys:
            known = ", ".join(assignment.keys)
            raise CourseError(
                f"{path}: need the key of one of its exercises, {known}; got {key!r}."
            )
        if not isinstance(check, Check):
            raise CourseError(f"{path}: need Cases or ByExample for {key}; got {check!r}.")
        found[key] = replace(find_exercise(key), check=check)
    return found


def _imported(path: Path) -> dict[str, Any]:
    """Return what a Python file defines. Raises: CourseError where it raises anything"""
    spec = importlib.util.spec_from_file_location(f"hidden_cases_{path.parent.name}", path)
    if spec is None or spec.loader is None:
        raise CourseError(f"{path}: need a Python file; it cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CourseError(f"{path}: need a file that can be imported; got {what}.") from None
    return vars(module)


def demand_exercises(assignment: Assignment) -> None:
    """Check that each exercise of the assignment at hand has a check.

    Raises: CourseError for those that have none
    """
    lessons = {key.rpartition("-")[0] for key in assignment.keys}
    known = {exercise.key for lesson in lessons for exercise in exercises_of(lesson)}
    missing = [key for key in assignment.keys if key not in known]
    if missing:
        raise CourseError(f"{assignment.name}: need a check of {', '.join(missing)}; found none.")
