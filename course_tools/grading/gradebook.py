"""The grades of a class as files: two tables, a JUnit report, and the state for going on later.

A row is on disk as soon as a submission is judged. Fields of submissions are cut, kept on one line
and made harmless for spreadsheets, so that a table is never more than its rows and columns.
"""

import csv
import fcntl
import io
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.etree import ElementTree

from course_lib.core import CourseError
from course_lib.core.files import check_result_path, write_result
from course_lib.core.plain_text import csv_field, cut, one_line, printable
from course_lib.workbooks.assignment import Assignment
from course_tools.grading.by_hand import LATE, read_by_hand
from course_tools.grading.graded import Graded
from course_tools.grading.late_work import ON_TIME, late_work

GRADEBOOK, EXERCISES, JUNIT = "gradebook.csv", "exercises.csv", "junit.xml"
RESULTS = "results.json"
STATE, LOCK = ".graded.jsonl", ".lock"


class Gradebook:
    """The results of one run over a class, in `folder`; also a context manager that closes it.

    `points` are the points of each exercise of the assignment, by key, in its order. Each
    submission is given to `add`, also one that an earlier run has judged (`known`). Points and
    comments by hand are read from the folder, and are in every row; so are the times of late work,
    where the `assignment` has a rule for it.

    Raises: CourseError where the folder or a file in it cannot be written, while another run
        writes into the folder, and for a line by hand that cannot be meant
    """

    def __init__(
        self, folder: Path, points: Mapping[str, float], assignment: Assignment | None = None
    ) -> None:
        self.folder, self.points, self.assignment = folder, dict(points), assignment
        for name in (GRADEBOOK, EXERCISES, JUNIT, RESULTS, STATE):
            check_result_path(folder / name)
        self._lock_file = _only_one_in(folder)
        try:
            self.by_hand = read_by_hand(folder, points)
            self.late = late_work(assignment, folder) if assignment else None
        except CourseError:
            self._lock_file.close()
            raise
        self._rows: dict[str, Graded] = {}  # by path
        self._known = {one.digest: one for one in _read_state(folder / STATE)}
        self._lock = threading.Lock()
        lines = "".join(f"{one.to_line()}\n" for one in self._known.values())
        write_result(folder / STATE, lines)
        write_result(folder / GRADEBOOK, csv_text([self._header()]))
        self._state = (folder / STATE).open("ab", buffering=0)
        self._table = (folder / GRADEBOOK).open("ab", buffering=0)

    def __enter__(self) -> "Gradebook":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def rows(self) -> list[Graded]:
        """The entries, sorted by student; of each file the last."""
        rows = map(self._with_hand, self._rows.values())
        in_order = sorted(rows, key=lambda one: (one.student, one.path))
        return sorted(in_order, key=lambda one: one.student.casefold())

    def known(self, digest: str) -> Graded | None:
        """Return what a run, this or an earlier one, added for the same digest."""
        return self._known.get(digest)

    def add(self, graded: Graded) -> None:
        """Append the row of a submission; it is on disk when this returns.

        Raises: CourseError where it cannot be written
        """
        with self._lock:
            if self._known.get(graded.digest) != graded:
                _append(self._state, f"{graded.to_line()}\n")
            _append(self._table, csv_text([self._row(self._with_hand(graded))]))
            self._known[graded.digest] = self._rows[graded.path or graded.student] = graded

    def close(self) -> None:
        """Write the tables whole, sorted by student, one row per file, and the JUnit report.

        Raises: CourseError where they cannot be written
        """
        self._state.close()
        self._table.close()
        rows = self.rows
        with self._lock_file:
            write_result(self.folder / GRADEBOOK, csv_text([self._header(), *map(self._row, rows)]))
            write_result(self.folder / EXERCISES, csv_text(self._exercise_rows(rows)))
            write_result(self.folder / JUNIT, junit_text(rows))
            write_result(self.folder / RESULTS, self._as_json(rows))

    def _with_hand(self, graded: Graded) -> Graded:
        late = self.late.of(graded.student, self.by_hand) if self.late else ON_TIME
        return replace(graded, hand=self.by_hand.get(graded.student, {}), late=late)

    def _as_json(self, rows: Iterable[Graded]) -> str:
        """Return all that is known of the class, for what reads it later."""
        title = self.assignment.title if self.assignment else ""
        found = [
            json.loads(one.to_line(), object_hook=_cut_values)
            | {
                "total": one.total(self.points),
                "by_hand": [cut(_given(one, key)) for key in one.hand],
            }
            for one in rows
        ]
        return json.dumps({"title": title, "points": self.points, "rows": found}, indent=1) + "\n"

    def _header(self) -> list[str]:
        keys = [name for key in self.points for name in (key, f"{key} status")]
        return ["student", "total", "out of", *keys, "note", "path"]

    def _row(self, graded: Graded) -> list[str | float]:
        """Return the row; what is not judged has no points yet, and the total none either."""
        total = graded.total(self.points)
        out_of = math.fsum(self.points.values())
        cells: list[str | float] = [graded.student, "" if total is None else total, out_of]
        for key in self.points:
            cells += [self._points(graded, key), graded.status(key)]
        notes = [f"{one.key}: {one.note}" for one in graded.verdicts if one.note]
        notes += [_given(graded, key) for key in graded.hand]
        notes += [f"{graded.late}."] if graded.late.days else []
        return [
            *cells,
            " ".join(filter(None, [graded.problem, *notes, *graded.notes])),
            graded.path,
        ]

    def _points(self, graded: Graded, key: str) -> str | float:
        return "" if graded.is_open(key) else graded.points_of(key, self.points)

    def _exercise_rows(self, rows: Iterable[Graded]) -> Iterator[list[str | float]]:
        yield ["student", "exercise", "status", "points", "out of", "detail", "note", "path"]
        for graded in rows:
            found = {verdict.key: verdict for verdict in graded.verdicts}
            for key, most in self.points.items():
                status, known = graded.status(key), self._points(graded, key)
                told = [found[key].detail, found[key].note] if key in found else ["", ""]
                told[0] = graded.problem or told[0]
                yield [graded.student, key, status, known, most, *told, graded.path]


def _cut_values(found: dict[str, Any]) -> dict[str, Any]:
    return {
        cut(key): [cut(one) if isinstance(one, str) else one for one in value]
        if isinstance(value, list)
        else cut(value)
        if isinstance(value, str)
        else value
        for key, value in found.items()
    }


def _given(graded: Graded, key: str) -> str:
    """Return what a person gave for an exercise, or for all of it, as a note."""
    hand = graded.hand[key]
    if key == LATE:
        return f"By hand, days late that count: {graded.late.days:g}. {hand.comment}".rstrip()
    points = "" if hand.points is None else f"{number_text(hand.points)} points. "
    return f"By hand, {key or 'all of it'}: {points}{hand.comment}".rstrip()


def csv_text(rows: Iterable[Iterable[str | float]]) -> str:
    """Return rows as CSV; numbers stay numbers, text is made harmless and cut."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def number_text(value: float) -> str:
    """Return points with at most six decimals, and none that say nothing: 2.5, 10."""
    whole, _, decimals = f"{value:.6f}".partition(".")
    return f"{whole}.{decimals}".rstrip("0").rstrip(".")


def junit_text(rows: Iterable[Graded]) -> str:
    """Return a JUnit report: a suite per student's file, a case per exercise.

    What is not right is a failure, what is not judged an error.
    """
    suites = ElementTree.Element("testsuites")
    for graded in rows:
        suite = ElementTree.SubElement(suites, "testsuite", name=_attribute(graded.student))
        cases = [
            (verdict.key, graded.status(verdict.key), f"{verdict.detail}\n{verdict.note}")
            for verdict in graded.verdicts
        ]
        if graded.problem:
            cases = [("the file", "not judged", graded.problem)]
        statuses = [status for _, status, _ in cases]
        suite.set("tests", str(len(cases)))
        suite.set("errors", str(statuses.count("not judged")))
        failures = sum(status not in ("right", "not judged") for status in statuses)
        suite.set("failures", str(failures))
        suite.set("time", f"{graded.seconds:.3f}")
        for key, status, text in cases:
            case = ElementTree.SubElement(suite, "testcase", name=_attribute(key))
            case.set("classname", _attribute(f"{graded.assignment}.{graded.student}"))
            if status != "right":
                tag = "error" if status == "not judged" else "failure"
                element = ElementTree.SubElement(case, tag, message=_attribute(status))
                element.text = printable(cut(text)).strip()
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _cell(value: str | float) -> str:
    if not isinstance(value, str):
        return number_text(value)
    return csv_field(one_line(cut(value)))


def _attribute(text: str) -> str:
    return one_line(cut(text))


def _only_one_in(folder: Path) -> FileIO:
    """Return an open file that is locked until it is closed, or until this process ends."""
    file = (folder / LOCK).open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise CourseError(
            f"{folder}: need a folder that one run writes into; another run is grading into it. "
            "Wait until that has ended, or try another --out."
        ) from None
    return file


def _append(file: FileIO, text: str) -> None:
    try:
        left = memoryview(text.encode())
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError as problem:
        raise CourseError(
            f"{file.name}: need room for one more row; got: {problem.strerror}. Free some disk "
            "space and grade again: what is judged already is kept."
        ) from None


def _read_state(path: Path) -> Iterator[Graded]:
    """Yield what earlier runs judged; a line that is spoilt, or half written, is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield Graded.from_line(line.decode())
            except (CourseError, UnicodeDecodeError):
                continue
