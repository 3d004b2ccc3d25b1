"""A class is graded: each answer by what it does, and nothing is run twice."""

import csv

import pytest

from course_lib.core import CourseError
from course_lib.grading.grader import Grader
from course_lib.grading.submission import find_submissions

NO_RANKS = {"toy_3": ""}  # not done: ranks take the longest to start
STUB = 'def add(x, y):\n    """The sum."""\n    raise NotImplementedError("exercise toy-1: add")'


def statuses(graded):
    return [verdict.status for verdict in graded.verdicts]


def details(graded):
    return [verdict.detail for verdict in graded.verdicts]


def test_every_submission_gets_what_it_earned(small_class, tmp_path):
    small_class.hand_in("ann.ipynb")
    minus = "def add(x, y):\n    return x - y\n"
    small_class.hand_in("bob/toy.ipynb", toy_1=minus, **NO_RANKS)
    typo = "def times(x, y)\n    return x * y\n"
    small_class.hand_in("toy-cem.ipynb", toy_1=STUB, toy_2=typo, **NO_RANKS)
    by_heart = "def times(x, y):\n    return {1: 2, 3: 0}[x]\n"
    small_class.hand_in("dora.ipynb", toy_2=by_heart, **NO_RANKS)
    small_class.hand_in("eve.ipynb", toy_3="def mean(x):\n    dist.all_reduce(x)\n    return x\n")
    his_own = "def add(x, y):\n    return {1: 3, 3: 3}[x]\n"
    small_class.hand_in("finn.ipynb", toy_1=his_own, **NO_RANKS)
    (small_class.submissions / "gus.ipynb").write_text("[" * 200_000)
    found = small_class.grade(tmp_path / "grades")
    assert statuses(found["ann"]) == ["right"] * 3
    assert details(found["ann"])[2] == "The mean over 2 ranks."
    assert statuses(found["bob"]) == ["wrong", "right", "not done"]
    assert details(found["bob"])[0] == "1 and 2: need 3; got -1. Subtracted, not added."
    assert statuses(found["cem"]) == ["not done", "wrong", "not done"]
    assert "SyntaxError" in details(found["cem"])[1]
    assert statuses(found["dora"]) == ["right", "wrong", "not done"]
    assert "In a case that the notebook does not show: 7 and 8" in details(found["dora"])[1]
    assert statuses(found["eve"]) == ["right", "right", "wrong"]
    assert "divide by the number of ranks" in details(found["eve"])[2]
    assert statuses(found["finn"]) == ["wrong", "right", "not done"]  # his own case, drawn
    assert found["gus"].problem.startswith("not judged: ")
    with (tmp_path / "grades/gradebook.csv").open(newline="") as file:
        table = {row["student"]: row["total"] for row in csv.DictReader(file)}
    assert table == {
        **{"ann": "30", "bob": "10", "cem": "0", "dora": "10", "eve": "20", "finn": "10"},
        "gus": "",
    }


def test_what_is_known_and_unchanged_is_not_run_again(small_class, tmp_path, monkeypatch):
    small_class.hand_in("ann.ipynb", **NO_RANKS)
    small_class.hand_in("bob.ipynb", toy_1="def add(x, y):\n    return x - y\n", **NO_RANKS)
    first = small_class.grade(tmp_path / "grades")
    small_class.hand_in("bob.ipynb", toy_1="def add(x, y):\n    return y + x\n", **NO_RANKS)
    ran = []
    grade = Grader.grade

    def noted(self, submission, digest):
        ran.append(submission.student)
        return grade(self, submission, digest)

    monkeypatch.setattr(Grader, "grade", noted)
    second = small_class.grade(tmp_path / "grades")
    assert ran == ["bob"]
    assert second["ann"] == first["ann"]
    assert statuses(second["bob"]) == ["right", "right", "not done"]


def test_a_run_that_is_cut_off_keeps_what_it_judged(small_class, tmp_path):
    for name in ("ann", "bob", "cem"):
        small_class.hand_in(f"{name}.ipynb", **NO_RANKS)

    def stop(graded):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_class.grade(tmp_path / "grades", jobs=1, told=stop)
    rows = (tmp_path / "grades/gradebook.csv").read_text().splitlines()
    assert len(rows) == 2
    told = []
    found = small_class.grade(tmp_path / "grades", told=told.append)
    assert sorted(found) == ["ann", "bob", "cem"]
    assert told[0].student == rows[1].split(",")[0]  # known, so told before anything runs


def test_a_machine_that_cannot_judge_judges_nobody(small_class, tmp_path):
    source = small_class.home / "source/toy.py"
    differs = "import os\n\nOFFSET = int('COURSE_OUT' in os.environ)"
    source.write_text(source.read_text().replace("OFFSET = 0", differs))
    small_class.hand_in("ann.ipynb")
    with pytest.raises(CourseError, match=r"need right answers to be right.*toy-1"):
        small_class.grade(tmp_path / "grades")


def test_a_lesson_too_slow_for_the_machine_judges_nobody(small_class, tmp_path):
    source = small_class.home / "source/toy.py"
    slow = "import os, time\n\nOFFSET = 0\n'COURSE_OUT' in os.environ and time.sleep(600)"
    source.write_text(source.read_text().replace("OFFSET = 0", slow))
    small_class.hand_in("ann.ipynb")
    with pytest.raises(CourseError, match=r"Is it too slow\? Try --timeout"):
        small_class.grade(tmp_path / "grades", timeout_s=1)


def test_cells_of_the_lesson_that_fail_are_never_the_students_fault(small_class, tmp_path):
    offset, broken = (
        f"def add(x, y):\n    return x + y + {name}\n" for name in ("OFFSET", "BROKEN")
    )
    small_class.hand_in("ann.ipynb", toy_1=offset, **NO_RANKS)
    small_class.hand_in("bob.ipynb", toy_1=broken, **NO_RANKS)
    source = small_class.home / "source/toy.py"
    source.write_text(source.read_text().replace("OFFSET = 0", "OFFSET = 0\nBROKEN = 1 / 0"))
    found = small_class.grade(tmp_path / "grades")
    assert statuses(found["ann"]) == ["right", "right", "not done"]
    assert (
        "the lesson's own cells failed on this machine (ZeroDivisionError" in found["bob"].problem
    )


@pytest.mark.parametrize(
    ("file", "student"),
    [
        ("ann.ipynb", "ann"),
        ("toy-ann.zip", "ann"),
        ("toy-ann (2).zip", "ann"),
        ("ann/toy.ipynb", "ann"),
        ("ann/week 1/toy-1.ipynb", "ann"),
        ("leeann_LATE_12_345_toy-1.ipynb", "leeann"),
        ("leeann_12_345_toy.zip", "leeann"),
        ("toy.ipynb", "toy"),
        ("O'Neill-van der Meer_toy.ipynb", "O'Neill-van der Meer"),
    ],
)
def test_a_files_place_says_whose_it_is(tmp_path, file, student):
    for name in (file, "__MACOSX/._toy.ipynb", ".hidden/toy.ipynb", "solved/toy.ipynb", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [(one.student, one.path) for one in find_submissions(tmp_path, "toy")] == [
        (student, tmp_path / file)
    ]
