"""A class as it is: students of all kinds, graded twice, with the same result, comments kept."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import nbformat

from course_lib.workbooks.assignment import read_assignment, write_assignment
from course_lib.workbooks.late_rule import LateRule
from course_tools.grading.class_run import add_absent, grade_class, graders, write_reports
from course_tools.grading.gradebook import GRADEBOOK, RESULTS, Gradebook
from course_tools.grading.sandbox import find_sandbox
from course_tools.grading.submission import find_submissions

DUE = datetime.fromisoformat("2026-12-01T18:00+01:00")
PARTS = {"toy-3": {"value": 7, "traffic": 3}}
SUMS = "def mean(x):\n    x = x.clone()\n    dist.all_reduce(x)\n    return x\n"
WRONG = "def add(x, y):\n    return x - y\n"
ENDS = "def times(x, y):\n    import os\n    os._exit(0)\n"
LATE = "{student},2026-12-01T12:00\n{student},2026-12-03T09:00\n"
# by kind: the file's name, the answers, and the points of 30 before days late are taken off
KINDS = {
    "right": ("{0}.ipynb", {}, 30),
    "partly": ("{0}.ipynb", {"toy_1": WRONG}, 20),
    "by-parts": ("{0}.ipynb", {"toy_3": SUMS}, 23),
    "late": ("{0}.ipynb", {}, 30),
    "ends": ("{0}.ipynb", {"toy_2": ENDS}, 20),
    "canvas": ("{0}_LATE_12_345_toy.ipynb", {}, 30),
    "copy": ("toy-{0} (1).ipynb", {"toy_1": WRONG}, 20),
    "kernel": ("{0}.ipynb", {}, 30),
    "again": ("{0}.ipynb", {"toy_1": WRONG}, 20),
    "hand": ("{0}.ipynb", {"toy_1": WRONG}, 20),
}


class WholeClass:
    """Students of these kinds, `each` times, in a class of the toy assignment."""

    def __init__(self, small_class, kinds: Iterable[str], each: int) -> None:
        self.small_class = small_class
        self.students = {f"{kind}{n}": kind for kind in kinds for n in range(each)}
        rule = LateRule(per_day=10, grace_minutes=30, most=50)
        settings = replace(
            read_assignment(small_class.home), due=DUE, late=rule, parts=PARTS, seeded=False
        )
        write_assignment(settings, small_class.home)
        for student, kind in self.students.items():
            name, answers, _ = KINDS[kind]
            path = small_class.hand_in(name.format(student), **answers)
            if kind == "kernel":
                notebook = nbformat.read(path, as_version=4)
                notebook.metadata.kernelspec = {"name": "julia", "display_name": "Julia"}
                nbformat.write(notebook, path)

    def of(self, kind: str) -> list[str]:
        return [student for student, own in self.students.items() if own == kind]

    def grade(self, out: Path) -> dict[str, dict]:
        """Grade the class into a folder; return the rows by student."""
        task = self.small_class.task()
        submissions = find_submissions(self.small_class.submissions, "toy")
        with (
            Gradebook(out, task.points, task.assignment) as book,
            graders(task, find_sandbox(), 2, 300) as made,
        ):
            grade_class(made, submissions, book, lambda one: None)
            add_absent([*self.students, "absent"], task, book)
        write_reports(task, book)
        return {row["student"]: row for row in json.loads((out / RESULTS).read_text())["rows"]}

    def write_by_hand(self, out: Path) -> str:
        """Write what people give: points and a comment; the times of who was late twice."""
        lines = ["student,exercise,points,comment"]
        lines += [f"{one},toy-1,4.5,nearly" for one in self.of("hand")]
        lines += [f"{one},,,see me" for one in self.of("right")]
        (out / "by_hand.csv").write_text("\n".join(lines) + "\n")
        times = "".join(LATE.format(student=one) for one in self.of("late"))
        (out / "times.csv").write_text(f"student,time\n{times}")
        return (out / "by_hand.csv").read_text()

    def points(self, *, resubmitted: bool) -> dict[str, float]:
        """Return what each student has to have: points by hand and days late count."""
        found = {one: float(KINDS[kind][2]) for one, kind in self.students.items()}
        found |= dict.fromkeys(self.of("hand"), 24.5)
        found |= dict.fromkeys(self.of("late"), 24.0)  # the last time counts: two days, 20 %
        return found | (dict.fromkeys(self.of("again"), 30.0) if resubmitted else {})


def graded_twice(small_class, folder: Path, kinds: Iterable[str], each: int) -> None:
    """Grade a class, then again after resubmissions, then all anew in another folder.

    Raises: AssertionError where a result differs, or what people gave is lost
    """
    whole, first, anew = WholeClass(small_class, kinds, each), folder / "grades", folder / "anew"
    first.mkdir()
    hand = whole.write_by_hand(first)
    before = whole.grade(first)
    assert totals(before, whole) == whole.points(resubmitted=False)
    for student in whole.of("again"):
        small_class.hand_in(f"{student}.ipynb")
    after = whole.grade(first)
    assert totals(after, whole) == whole.points(resubmitted=True)
    assert {one for one in after if after[one] != before[one]} == {*whole.of("again")}
    anew.mkdir()
    for name in ("by_hand.csv", "times.csv"):
        shutil.copy(first / name, anew)
    assert totals(whole.grade(anew), whole) == totals(after, whole)
    assert (first / GRADEBOOK).read_text() == (anew / GRADEBOOK).read_text()
    assert (first / "by_hand.csv").read_text() == (anew / "by_hand.csv").read_text() == hand
    for student in whole.of("right"):
        assert "see me" in (anew / f"feedback/{student}.html").read_text()
    assert after["absent"]["problem"] == "Nothing was handed in."


def totals(rows: dict[str, dict], whole: WholeClass) -> dict[str, float]:
    """Return the points of those who handed in."""
    return {student: rows[student]["total"] for student in whole.students}
