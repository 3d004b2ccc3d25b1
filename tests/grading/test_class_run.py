"""A class is graded: each answer by what it does, and nothing is run twice."""

import csv
import json
import threading
import zipfile

import nbformat
import pytest

from course_lib.core import CourseError
from course_lib.workbooks.check_notebook import Verdict
from course_lib.workbooks.lessons import exercise_cells
from course_tools.grading import class_run
from course_tools.grading.class_run import grade_class, graders
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.graded import Graded
from course_tools.grading.grader import Grader, RunGroup, Turns
from course_tools.grading.sandbox import Ended, Sandbox
from course_tools.grading.submission import find_submissions
from tests.grading.conftest import RIGHT, Class

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
    rows = (tmp_path / "grades/gradebook.csv").read_text().splitlines()[1:]
    (judged,) = (row for row in rows if "the grading ended before" not in row)
    assert [row.split(",")[0] for row in rows] == ["ann", "bob", "cem"]
    told = []
    found = small_class.grade(tmp_path / "grades", told=told.append)
    assert sorted(found) == ["ann", "bob", "cem"]
    assert told[0].student == judged.split(",")[0]  # known, so told before anything runs


def test_every_file_keeps_its_row_where_the_machine_cannot_judge(tmp_path, monkeypatch, capsys):
    def no_proof(grader):
        raise CourseError("need right answers to be right")

    monkeypatch.setattr(class_run, "proved", no_proof)
    toy = Class(tmp_path)
    for name in ("ann", "bob"):
        toy.hand_in(f"{name}.ipynb")
    task = toy.task()
    files = find_submissions(toy.submissions, "toy")
    late = Verdict(key="toy-2", status="not judged", detail="Too slow here")
    known = {"student": "ann", "path": str(files[0].path), "digest": files[0].digest(task.digest)}
    before = Graded(**known, assignment="toy", verdicts=(late,))
    with Gradebook(tmp_path / "grades", task.points) as book:
        book.add(before)
    with (
        pytest.raises(CourseError, match="to be right"),
        Gradebook(tmp_path / "grades", task.points) as book,
        graders(task, Sandbox(), 1, 60) as made,
    ):
        grade_class(made, files, book, lambda one: None)
    assert [one.student for one in book.rows] == ["ann", "bob"]
    assert book.rows[0] == before
    assert book.rows[1].problem == "not judged: the grading ended before."
    assert "first its 3 right answers run" in capsys.readouterr().err


def test_nothing_is_judged_once_the_grading_is_stopped(tmp_path):
    with graders(Class(tmp_path).task(), Sandbox(), 1, 60) as (grader,):
        grader.sandbox.stop()
        with pytest.raises(CourseError, match="was stopped"):
            grader._seen("toy-1", tmp_path, tmp_path, tmp_path, {})


def test_ranks_are_ready_before_an_answer_that_needs_them(tmp_path):
    task = Class(tmp_path).task()
    given = [task.merged({key: RIGHT[key]}).cells[0].source for key in RIGHT]
    assert ["wait_for_ranks()" in text for text in given] == [False, False, True]


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


def test_a_time_limit_is_no_wrong_answer_and_does_not_stick(small_class, tmp_path):
    slow = {
        "toy_1": "",
        "toy_2": "import time\ndef times(x, y):\n    time.sleep(6 * (x == 7))\n    return x * y\n",
        "toy_3": RIGHT["toy-3"].replace("    x = ", "    import time\n    time.sleep(6)\n    x = "),
    }
    small_class.hand_in("ann.ipynb", **slow)  # the second one sleeps in a hidden case
    small_class.prove()
    one = small_class.grade(tmp_path / "grades", timeout_s=3)["ann"]
    assert [one.status(key) for key in ("toy-2", "toy-3")] == ["not judged"] * 2, details(one)
    assert "you" not in " ".join([one.problem, *details(one)])
    assert one.problem or all("Too slow here" in told for told in details(one)[1:])
    again = small_class.grade(tmp_path / "grades", timeout_s=300)["ann"]
    assert statuses(again) == ["not done", "right", "right"]


class Busy:
    """A sandbox on a machine that has too much to do, which runs nothing: only what is given."""

    def __init__(self, outcomes, how):
        self.outcomes, self.how, self.runs = outcomes, how, []
        self.stopped = threading.Event()

    def at(self, path, inner):
        return inner

    def run(self, _command, *, work, out, **_):
        cells = [cell.id for cell in nbformat.read(work / "merged.ipynb", as_version=4).cells]
        self.runs.append(cells[1::2])
        given = {"given": {"how": "passed"}}
        wrote = given if len(cells) == 1 else self.outcomes
        (out / "outcomes.json").write_text(json.dumps(wrote))
        return Ended("ended" if len(cells) == 1 else self.how, 1, "")


LATE = {"how": "timeout", "name": "KeyboardInterrupt"}
GIVEN_PASSED = {"given": {"how": "passed"}}


@pytest.mark.parametrize(
    ("outcomes", "how"),
    [
        ({}, "ended"),  # no kernel has started
        ({}, "time"),
        ({"given": LATE}, "ended"),
        ({"given": LATE, "exercise-toy-1": {"how": "raised", "name": "NameError"}}, "ended"),
        (GIVEN_PASSED, "time"),
        (GIVEN_PASSED | {"exercise-toy-1": LATE}, "ended"),
        (
            GIVEN_PASSED | {"exercise-toy-1": {"how": "passed"}, "check-toy-1": LATE},
            "ended",
        ),
        (
            GIVEN_PASSED
            | {
                "exercise-toy-1": {"how": "passed"},
                "check-toy-1": {"how": "raised", "name": "NotJudged", "message": "toy-1: no ranks"},
            },
            "ended",
        ),
    ],
)
def test_no_limit_of_the_machine_is_a_wrong_answer(small_class, tmp_path, outcomes, how):
    small_class.hand_in("ann.ipynb", toy_2="", **NO_RANKS)
    (submission,) = find_submissions(small_class.submissions, "toy")
    groups, sandbox = [RunGroup(("toy-1",), tmp_path / "course")], Busy(outcomes, how)
    grader = Grader(small_class.task(), sandbox, groups, 60, Turns(1))
    graded = grader.grade(submission, "digest")
    assert graded.status("toy-1") == "not judged", graded
    assert not graded.is_judged
    assert sandbox.runs.count(["exercise-toy-1"]) == 2  # at once, and alone


def test_who_repeats_a_run_is_alone():
    turns, running, seen = Turns(3), [], []

    def take(number):
        for turn in range(40):
            alone = (number + turn) % 4 == 0
            with turns.taken(alone=alone):
                running.append(number)
                seen.append((alone, len(running)))
                running.remove(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(count for _, count in seen) <= 3
    assert {count for alone, count in seen if alone} == {1}


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
        ("Ann Lee_123_assignsubmission_file_/toy.ipynb", "Ann Lee"),
        ("Ann_Lee_123_assignsubmission_file/one/toy.zip", "Ann_Lee"),
        ("leeann_LATE_12_345_toy-1.ipynb", "leeann"),
        ("leeann_12_345_toy.zip", "leeann"),
        ("toy.ipynb", "toy"),
        ("O'Neill-van der Meer_toy.ipynb", "O'Neill-van der Meer"),
    ],
)
def test_a_files_place_says_whose_it_is(tmp_path, file, student):
    for name in (file, "__MACOSX/._toy.ipynb", ".hidden/toy.ipynb", "solved/toy.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [(one.student, one.path) for one in find_submissions(tmp_path, "toy")] == [
        (student, tmp_path / file)
    ]


def test_every_file_is_in_a_row(tmp_path):
    for name in (
        *("ann.ipynb", "hw1.py", "bob/report.docx", "bob/toy.py", "cem/toy.zip", "cem/notes.txt"),
        *("Thumbs.db", ".DS_Store"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = {one.student: one for one in find_submissions(tmp_path, "toy")}
    told = {student: (one.path.name, one.besides) for student, one in found.items()}
    assert told == {
        "ann": ("ann.ipynb", ()),
        "bob": ("report.docx", ("toy.py",)),
        "cem": ("toy.zip", ("notes.txt",)),
        "hw1": ("hw1.py", ()),
    }
    with pytest.raises(CourseError, match=r"need a notebook.*another kind \(\.docx\)") as caught:
        found["bob"].notebook()
    assert "Clear Outputs" not in str(caught.value)


def test_students_of_one_name_in_moodle_stay_two(tmp_path):
    for number in (12, 34):
        place = tmp_path / f"Ann Lee_{number}_assignsubmission_file_"
        place.mkdir()
        (place / "toy.ipynb").touch()
    names = [one.student for one in find_submissions(tmp_path, "toy")]
    assert names == ["Ann Lee 12", "Ann Lee 34"]


def test_of_several_notebooks_in_a_zip_the_assignments_own_is_taken(small_class):
    place, task = small_class.submissions, small_class.task()
    small_class.hand_in("own.ipynb")
    for name, texts in (("one", ["other"]), ("two", ["own"]), ("none", [])):
        with zipfile.ZipFile(place / f"{name}.zip", "w") as archive:
            archive.writestr("a/own.ipynb", (place / "own.ipynb").read_text())
            for text in texts:
                content = (place / "own.ipynb").read_text()
                other = content.replace('"lesson": "toy"', '"lesson": "ddp"')
                archive.writestr(f"{text}.ipynb", other if text == "other" else content)
    found = {one.student: one for one in find_submissions(place, "toy")}
    for name in ("one", "none"):
        assert task.is_own(found[name].notebook(task.is_own))
    with pytest.raises(CourseError, match="need a zip with one notebook; got 2, 2 of them of this"):
        found["two"].notebook(task.is_own)


def without_marks(path, *, lesson="", twice=False):
    """Delete what the course has noted in a notebook, as another editor does."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {"course": {"lesson": lesson}} if lesson else {}
    if twice:
        notebook.cells.append(nbformat.v4.new_code_cell(notebook.cells[0].source))
    path.write_text(nbformat.writes(notebook))


def test_lost_marks_are_found_by_what_a_cell_defines_where_that_is_certain(small_class):
    task = small_class.task()
    names = {"lost": {}, "named": {"lesson": "toy"}, "twice": {"lesson": "toy", "twice": True}}
    for name, options in names.items():
        without_marks(small_class.hand_in(f"{name}.ipynb"), **options)
    found = {one.student: one for one in find_submissions(small_class.submissions, "toy")}
    marked = {name: task.with_marks(found[name].notebook(task.is_own)) for name in found}
    for name, (notebook, notes) in marked.items():
        keys = ["toy-2", "toy-3"] if name == "twice" else ["toy-1", "toy-2", "toy-3"]
        assert list(exercise_cells(notebook)) == list(notes) == keys
        assert set(task.check_notes(notebook).values()) <= {
            "The check cell is missing; the original was used."
        }
        assert "lost its mark" in notes["toy-2"]
    without_marks(small_class.hand_in("part.ipynb", toy_1="x = 1"))
    part = find_submissions(small_class.submissions, "toy")[2].notebook()
    assert not task.is_own(part)  # one exercise is not found: it is not certain what this is
