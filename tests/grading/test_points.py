"""Points by parts, points by hand, and the rule for late work."""

import csv
import json
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from course_lib.checks.exercise import find_exercise
from course_lib.core import CourseError
from course_lib.workbooks.assignment import Assignment, read_assignment, write_assignment
from course_lib.workbooks.check_notebook import Verdict
from course_lib.workbooks.late_rule import LateRule
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.graded import Graded
from course_tools.grading.late_work import LateWork, read_times

DUE = datetime.fromisoformat("2026-12-01T18:00+01:00")
PARTS = {
    "toy-1": {"value": 10},
    "toy-2": {"value": 6, "hidden": 4},
    "toy-3": {"value": 7, "traffic": 3},
}


def with_parts(small_class, parts=PARTS):
    small_class.settle(parts=parts)


def test_a_wrong_answer_has_the_points_of_the_parts_that_hold(small_class, tmp_path):
    with_parts(small_class)
    three = "def mean(x):\n    x = x.clone()\n"
    reduce, divided = "    dist.all_reduce(x)\n", "    return x / dist.get_world_size()\n"
    hidden = "def times(x, y):\n    return 0 if x == 7 else x * y\n"
    answers = {
        "right": {},
        "sums": {"toy_3": f"{three}{reduce}    return x\n"},
        "twice": {"toy_3": f"{three}    y = x * 0\n    dist.all_reduce(y)\n{reduce}{divided}"},
        "none": {
            "toy_3": "def mean(x):\n    return x\n",
            "toy_1": "def add(x, y):\n    return x\n",
        },
        "shown": {"toy_2": hidden, "toy_3": ""},
    }
    for name, own in answers.items():
        small_class.hand_in(f"{name}.ipynb", **own)
    found = small_class.grade(tmp_path / "grades", timeout_s=300)
    points = small_class.task().points
    reached = {n: [one.points_of(key, points) for key in points] for n, one in found.items()}
    with (tmp_path / "grades/gradebook.csv").open(newline="") as file:
        totals = {row["student"]: row["total"] for row in csv.DictReader(file)}
    assert reached == {
        "right": [10, 10, 10],
        "sums": [10, 10, 3],
        "twice": [10, 10, 7],
        "none": [3.33, 10, 0],  # right in one of three cases
        "shown": [10, 6, 0],
    }
    assert totals["sums"] == "23"
    assert "value 0 of 7, traffic 3 of 3" in found["sums"].verdicts[2].note


@pytest.mark.parametrize(
    ("key", "parts"), [("toy-2", {"value": 10}), ("toy-3", {"value": 5, "speed": 5})]
)
def test_parts_are_those_of_the_check(small_class, key, parts):
    with_parts(small_class, {key: parts})
    with pytest.raises(CourseError, match=f"all parts of {key}"):
        small_class.task()


def test_parts_add_up():
    with pytest.raises(CourseError, match=r"add up to its 3 points; got 2\."):
        Assignment(name="a", title="", items=(("ddp-1", 3.0),), parts={"ddp-1": {"value": 2}})


def test_who_does_nothing_reaches_nothing():
    """Within budgets, and right on one rank, is also who sends nothing."""
    exercise = find_exercise("collectives-1")
    right = exercise.right_values()
    idle = [replace(run, by_rank=[spoilt(rank) for rank in run.by_rank]) for run in right]
    assert set(exercise.check.shares(right, right).values()) == {1.0}
    assert set(exercise.check.shares(idle, right).values()) == {0.0}
    assert set(exercise.check.shares(right[:1], right).values()) == {0.0}


def spoilt(rank):
    return {label: {**step, "value": None} for label, step in rank.items()}


RULE = LateRule(per_day=10, grace_minutes=30, most=25)


@pytest.mark.parametrize(
    ("minutes", "days", "percent"),
    [(-5, 0, 0), (30, 0, 0), (31, 1, 10), (24 * 60, 1, 10), (24 * 60 + 1, 2, 20), (9999, 7, 25)],
)
def test_each_day_that_has_begun_counts(minutes, days, percent):
    found = RULE.days(DUE, DUE + timedelta(minutes=minutes))
    assert (found, RULE.percent(found)) == (days, percent)


@pytest.mark.parametrize(
    "text",
    [
        "student,time\nann,2026-12-02T18:30\n",
        "Identifier,Full name,Last modified (submission)\n"
        'Participant 1,ann,"Wednesday, 2 December 2026, 6:30 PM"\n',
        "Name,SID,Submission Time\nAnn Lee,ann,2026-12-02 18:30:00 +0100\n",
        "student;time\nann;2026-12-02 17:30:00 UTC\nann;2026-12-01T10:00\nbob;\n",
    ],
)
def test_times_come_from_the_platforms_file(tmp_path, text):
    (tmp_path / "times.csv").write_text(text)
    times = read_times(tmp_path / "times.csv", DUE.tzinfo)
    assert times["ann"] == DUE + timedelta(days=1, minutes=30)
    work = LateWork(Assignment(name="a", title="", items=(), due=DUE, late=RULE), times)
    assert work.of("ann", {}).percent == 20
    assert work.without_time(["ann", "bob"]) == ["bob"]


def test_a_time_is_nobodys_where_two_have_one_name(tmp_path):
    rows = "Name,SID,Submission Time\nAnn,a1,2026-12-02\nAnn,a2,2026-12-09\nAnn,a2,2026-12-10\n"
    (tmp_path / "times.csv").write_text(rows)
    times = read_times(tmp_path / "times.csv", DUE.tzinfo)
    assert {name: time.day for name, time in times.items()} == {"a1": 2, "a2": 10}


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "student,time\nann,soon\n"])
def test_what_is_no_time_is_refused(tmp_path, text):
    (tmp_path / "times.csv").write_text(text)
    with pytest.raises(CourseError, match="need a "):
        read_times(tmp_path / "times.csv", DUE.tzinfo)


def test_late_points_and_points_by_hand_stay(tmp_path):
    """Points by hand, days by hand and times are in the totals of every later grading."""
    assignment = Assignment(name="a", title="A", items=(("a-1", 10.0),), due=DUE, late=RULE)
    (tmp_path / "times.csv").write_text("student,time\nann,2026-12-02\nbob,2026-12-03\n")
    hand = "student,exercise,points,comment\nbob,late,0,ill\nbob,a-1,8,nearly\n"
    (tmp_path / "by_hand.csv").write_text(hand)
    for _ in range(2):
        with Gradebook(tmp_path, assignment.points, assignment) as book:
            for name in ("ann", "bob"):
                verdicts = (Verdict(key="a-1", status="right" if name == "ann" else "wrong"),)
                row = {"student": name, "path": name, "assignment": "a", "digest": name}
                book.add(Graded(**row, verdicts=verdicts))
        results = json.loads((tmp_path / "results.json").read_text())
        assert [row["total"] for row in results["rows"]] == [9, 8]
        assert (tmp_path / "by_hand.csv").read_text() == hand


def test_a_rule_and_parts_are_read_as_they_were_written(tmp_path):
    items = (("ddp-1", 3.0),)
    made = Assignment(
        name="a", title="A", items=items, due=DUE, late=RULE, parts={"ddp-1": {"the work": 3}}
    )
    write_assignment(made, tmp_path)
    assert read_assignment(tmp_path) == made


@pytest.mark.parametrize("late", ["per_day = 200", "per_day = 'ten'", "most = 3", ""])
def test_a_rule_that_cannot_be_meant_is_refused(tmp_path, late):
    write_assignment(Assignment(name="a", title="A", items=(), due=DUE), tmp_path)
    path = tmp_path / "assignment.toml"
    path.write_text(f"{path.read_text()}[late]\n{late}\n")
    with pytest.raises(CourseError, match=r"assignment\.toml: .*late"):
        read_assignment(tmp_path)
