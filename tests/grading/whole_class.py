"""A class as it is: students of all kinds, graded twice, with the same result, comments kept."""

import json
import shutil
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import nbformat

from course_lib.workbooks.late_rule import LateRule
from course_tools.grading.class_run import add_absent, grade_class, graders, write_reports
from course_tools.grading.gradebook import GRADEBOOK, RESULTS, Gradebook
from course_tools.grading.sandbox import find_sandbox
from course_tools.grading.submission import find_submissions
from tests.grading.conftest import KEYS

DUE = datetime.fromisoformat("2026-12-01T18:00+01:00")
PARTS = {"toy-1": {"value": 10}, "toy-3": {"value": 7, "traffic": 3}}
HALF = "def add(x, y):\n    return x - y\n"  # right in one case of two
SUMS = "def mean(x):\n    x = x.clone()\n    dist.all_reduce(x)\n    return x\n"
WRONG = "def times(x, y):\n    return x - y\n"
ENDS = "def times(x, y):\n    import os\n    os._exit(0)\n"
LATE = "{student},2026-12-01T12:00\n{student},2026-12-03T09:00\n"
LOST = {HALF: 5, SUMS: 3, WRONG: 10, ENDS: 10}  # points of 10
# by kind: the file's name, and the answers that are not right
KINDS = {
    "right": ("{0}.ipynb", {}),
    "partly": ("{0}.ipynb", {"toy_2": WRONG}),
    "by-parts": ("{0}.ipynb", {"toy_1": HALF, "toy_3": SUMS}),
    "late": ("{0}.ipynb", {}),
    "ends": ("{0}.ipynb", {"toy_2": ENDS}),
    "canvas": ("{0}_LATE_12_345_toy.ipynb", {}),
    "copy": ("toy-{0} (1).ipynb", {"toy_1": HALF}),
    "kernel": ("{0}.ipynb", {}),
    "again": ("{0}.ipynb", {"toy_2": WRONG}),
    "hand": ("{0}.ipynb", {"toy_2": WRONG}),
}


class WholeClass:
    """Students of these kinds, `each` times, in a class with these exercises of the toy one."""

    def __init__(self, small_class, kinds: Iterable[str], each: int, keys: Sequence[str]) -> None:
        self.small_class, self.keys = small_class, keys
        self.students = {f"{kind}{n}": kind for kind in kinds for n in range(each)}
        rule = LateRule(per_day=10, grace_minutes=30, most=50)
        parts = {key: PARTS[key] for key in PARTS if key in keys}
        small_class.settle(keys, due=DUE, late=rule, parts=parts, seeded=False)
        for student, kind in self.students.items():
            name, answers = KINDS[kind]
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
        lines += [f"{one},toy-2,4.5,nearly" for one in self.of("hand")]
        lines += [f"{one},,,see me" for one in self.of("right")]
        (out / "by_hand.csv").write_text("\n".join(lines) + "\n")
        times = "".join(LATE.format(student=one) for one in self.of("late"))
        (out / "times.csv").write_text(f"student,time\n{times}")
        return (out / "by_hand.csv").read_text()

    def points(self, *, resubmitted: bool) -> dict[str, float]:
        """Return what each student has to have: points by hand and days late count."""
        most, found = 10.0 * len(self.keys), dict[str, float]()
        for student, kind in self.students.items():
            answers = KINDS[kind][1]
            found[student] = most - sum(
                LOST[answers[key.replace("-", "_")]]
                for key in self.keys
                if key.replace("-", "_") in answers
            )
        found |= dict.fromkeys(self.of("hand"), most - 10 + 4.5)
        found |= dict.fromkeys(self.of("late"), most * 0.8)  # the last time counts: two days
        return found | (dict.fromkeys(self.of("again"), most) if resubmitted else {})


def graded_twice(
    small_class, folder: Path, kinds: Iterable[str], each: int, keys: Sequence[str] = KEYS
) -> None:
    """Grade a class, then again after resubmissions, then all anew in another folder.

    Raises: AssertionError where a result differs, or what people gave is lost
    """
    whole = WholeClass(small_class, kinds, each, keys)
    first, anew = folder / "grades", folder / "anew"
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
