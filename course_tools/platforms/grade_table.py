"""A class's totals in the file that Canvas or Moodle imports: its own export, filled in.

Both know students by ids of their own, so the file begins as what the platform exports. Canvas: the
gradebook's export; Moodle: the assignment's grading worksheet.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.core import CourseError
from course_lib.core.files import read_json, read_text
from course_tools.grading.gradebook import RESULTS, number_text

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
CANVAS_NAMES = ("SIS Login ID", "SIS User ID", "ID", "Student")
MOODLE_NAMES = ("Username", "ID number", "Email address", "Full name", "Identifier")
GRADE, MOST, FEEDBACK = "Grade", "Maximum Grade", "Feedback comments"
POSSIBLE = "Points Possible"


@dataclass(frozen=True)
class Totals:
    """The totals of a class: by student, the points or None where a verdict is open."""

    by_student: Mapping[str, float | None]
    comments: Mapping[str, str]
    out_of: float
    title: str


def read_totals(grades: Path) -> Totals:
    """Return the totals that `course grade` left in a folder.

    Raises: CourseError where there are none, or a student has several files
    """
    found = read_json(grades / RESULTS, "the results of course grade", hint="Grade first.")
    by_student, comments = dict[str, float | None](), dict[str, str]()
    for row in found["rows"]:
        student = row["student"]
        if student in by_student:
            raise CourseError(
                f"{grades}: need one file of {student} that counts; got several. Move the others "
                "out of the submissions, and grade again."
            )
        by_student[student] = row["total"]
        told = [f"{one['key']}: {one['status']}" for one in row["verdicts"]] or [row["problem"]]
        comments[student] = "; ".join([*told, *row["by_hand"]])
    points = found["points"]
    return Totals(by_student, comments, sum(points.values()), found["title"])


def _letters(name: str) -> str:
    """Return what Canvas makes of a name in the files of submissions: `Lee, Ann` is `leeann`."""
    return re.sub(r"[\W_]+", "", name).casefold()


def _matched(rows: Sequence[Mapping[str, str]], names: Sequence[str], totals: Totals) -> list[str]:
    """Return whose each row is, or an empty text; an id counts before a name.

    Raises: CourseError where two rows or two students would be the same
    """
    whose = [""] * len(rows)
    for column in names:
        for convert in (str.strip, _letters):
            rows_of = dict[str, list[int]]()
            for number, row in enumerate(rows):
                rows_of.setdefault(convert(row.get(column) or ""), []).append(number)
            for student in totals.by_student:
                places = rows_of.get(convert(student), []) if convert(student) else []
                if student in whose or not places:
                    continue
                if len(places) > 1 or whose[places[0]]:
                    raise CourseError(
                        f"need one row for {student} by {column}; got {len(places)} rows, or one "
                        "that is another student's. Name the folders of submissions by id."
                    )
                whose[places[0]] = student
    return whose


def _read_roster(path: Path, needed: Iterable[str]) -> tuple[list[str], list[dict[str, str]]]:
    text = read_text(path, "the platform's export, as CSV").removeprefix("\N{BYTE ORDER MARK}")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    titles = list(reader.fieldnames or ())
    if missing := [one for one in needed if one not in titles]:
        raise CourseError(f"{path}: need the columns {', '.join(needed)}; no {', '.join(missing)}.")
    return titles, [{title: row.get(title) or "" for title in titles} for row in reader]


def canvas_table(roster: Path, totals: Totals, column: str) -> tuple[str, list[str]]:
    """Return Canvas's CSV with one column of points, and who of the class is not in the export.

    column  the assignment's column in the export, `hw1 (4711)`, or the title of a new one
    """
    titles, rows = _read_roster(roster, ("Student", "ID", "Section"))
    same = [one for one in titles if one == column or one.startswith(f"{column} (")]
    title = same[0] if len(same) == 1 else column
    kept = [one for one in CANVAS if one in titles]
    people = [row for row in rows if row["ID"].strip()]
    whose = _matched(people, CANVAS_NAMES, totals)
    body = [
        [*(row[one] for one in kept), _number(totals, student)]
        for row, student in zip(people, whose, strict=True)
        if student
    ]
    possible = [f"    {POSSIBLE}", *[""] * (len(kept) - 1), number_text(totals.out_of)]
    return _csv([[*kept, title], possible, *body]), _strangers(totals, whose)


def moodle_table(roster: Path, totals: Totals, _column: str) -> tuple[str, list[str]]:
    """Return Moodle's grading worksheet with grades and feedback, and who is not in it.

    Raises: CourseError where its maximum grade is another one than the assignment's points
    """
    titles, rows = _read_roster(roster, (GRADE,))
    whose = _matched(rows, MOODLE_NAMES, totals)
    for row, student in zip(rows, whose, strict=True):
        if not student:
            continue
        most = row.get(MOST, "").replace(",", ".").strip()
        if most and float(most) != totals.out_of:
            raise CourseError(
                f"{roster}: need the maximum grade {number_text(totals.out_of)}, the assignment's "
                f"points; got {most}. Change it in Moodle, and download the worksheet again."
            )
        row[GRADE] = _number(totals, student)
        if FEEDBACK in titles:
            row[FEEDBACK] = totals.comments[student]
    return _csv([titles, *([row[one] for one in titles] for row in rows)]), _strangers(
        totals, whose
    )


TABLES: Mapping[str, Callable[[Path, Totals, str], tuple[str, list[str]]]] = {
    "canvas": canvas_table,
    "moodle": moodle_table,
}


def _number(totals: Totals, student: str) -> str:
    value = totals.by_student[student]
    return "" if value is None else number_text(value)


def _strangers(totals: Totals, whose: Sequence[str]) -> list[str]:
    return sorted({*totals.by_student} - {*whose})


def _csv(rows: Iterable[Iterable[Any]]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue()
