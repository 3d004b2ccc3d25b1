"""Points and comments that a person gives, in a file that the course reads and never changes.

`by_hand.csv` stands beside the gradebook, a line each: student, exercise, points, comment. Without
an exercise a line is a comment on all of it; with `late` in its place, its points are the days that
count as late.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from course_lib.core import CourseError
from course_lib.core.files import read_text, write_result

BY_HAND = "by_hand.csv"
COLUMNS = ("student", "exercise", "points", "comment")
LATE = "late"  # in the place of an exercise


@dataclass(frozen=True)
class Hand:
    """What a person gave one student for one exercise; None: no points of their own."""

    points: float | None = None
    comment: str = ""


ByHand = Mapping[str, Mapping[str, Hand]]  # by student, then by exercise; "": all of it


def read_by_hand(folder: Path, keys: Iterable[str]) -> ByHand:
    """Return what a person gave, by student and exercise; begin the file where there is none.

    Raises: CourseError for a line that cannot be meant
    """
    path = folder / BY_HAND
    if not path.exists():
        write_result(path, ",".join(COLUMNS) + "\n")
    rows = read_table(path, "points and comments by hand")
    if missing := set(COLUMNS) - set(rows.fieldnames or ()):
        raise CourseError(
            f"{path}: need the columns {', '.join(COLUMNS)}; these are missing: "
            f"{', '.join(sorted(missing))}."
        )
    found, known = defaultdict[str, dict[str, Hand]](dict), {*keys, LATE}
    for row in rows:
        student, key, points, comment = ((row[name] or "").strip() for name in COLUMNS)
        if not (student or key or points or comment):
            continue
        where = f"{path}, line {rows.line_num}"
        if not student or (key and key not in known):
            what = f"one of {', '.join(sorted(known))}" if student else "a student"
            raise CourseError(f"{where}: need {what}; got {key if student else student!r}.")
        if points and not key:
            raise CourseError(f"{where}: need the exercise that gets {points} points; got none.")
        if key in found[student]:
            raise CourseError(f"{where}: need one line for {student}, {key or 'all of it'}; got 2.")
        found[student][key] = Hand(_number(points, where) if points else None, comment)
    return found


def read_table(path: Path, what: str) -> "csv.DictReader[str]":
    """Return the rows of a CSV file, whichever separator a spreadsheet has chosen.

    Raises: CourseError where it cannot be read
    """
    text = read_text(path, what).removeprefix("\N{BYTE ORDER MARK}")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    return csv.DictReader(text.splitlines(keepends=True), delimiter=separator)


def _number(text: str, where: str) -> float:
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CourseError(f"{where}: need points as a number; got {text!r}.")
    return value
