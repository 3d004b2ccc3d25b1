"""A term's pages: each student's misconceptions by name, each exercise's answers."""

import json

import pytest

from course_lib.checks.exercise import find_exercise
from course_lib.core import CourseError
from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.graded import Graded
from course_tools.grading.term import mistakes, read_term, sample, write_term

CAUSE = find_exercise("ddp-1").causes()[0].sentence
WRONG = f"5 parameters: need 2; got 3. {CAUSE}"


def grading(folder, **answers):
    """Write what a grading leaves; by student, whether the answer to ddp-1 is right."""
    with Gradebook(folder, {"ddp-1": 4.0}) as book:
        for student, is_right in answers.items():
            status = "right" if is_right else "wrong"
            detail = "fine" if is_right else WRONG.replace("5", str(len(student)), 1)
            verdicts = (Verdict(key="ddp-1", status=status, detail=detail),)
            book.add(
                Graded(
                    student=student,
                    path=student,
                    assignment="hw1",
                    verdicts=verdicts,
                    digest=f"{folder} {student}",
                    code={"ddp-1": f"code of {student} <b>"},
                )
            )
    return folder


@pytest.fixture
def term(tmp_path):
    first = {"ann": False, "bobby": False, "cyrus": False, "dorothea": False, "eve": True}
    folders = [grading(tmp_path / "one", **first), grading(tmp_path / "two", ann=True, bobby=False)]
    return read_term(folders)


def test_a_students_page_names_misconceptions_and_what_is_overcome(term, tmp_path):
    write_term(term, tmp_path / "term")
    ann, bobby = (
        (tmp_path / f"term/students/{name}.html").read_text() for name in ("ann", "bobby")
    )
    assert ann.count('class="said"') == bobby.count('class="said"') == 1
    assert "right since" in ann
    assert "right since" not in bobby
    assert "seen 2 times" in bobby
    assert "0 of 4" in ann
    assert "4 of 4" in ann


def test_an_exercises_page_has_each_cause_once_and_three_answers(term, tmp_path):
    """Numbers of the moment do not make another cause; markup in an answer stays text."""
    index = write_term(term, tmp_path / "term")
    page = (tmp_path / "term/exercises/ddp-1.html").read_text()
    assert page.count("<h2>") == 1
    assert "<h2>4 students:" in page
    assert page.count("code of") == 3
    assert "<b>" not in page.partition("<body>")[2]
    assert "<td" in index.read_text()
    assert "bobby" in index.read_text()


def test_the_name_is_the_causes_key(term):
    assert {one.name for one in mistakes(term)} == {find_exercise("ddp-1").causes()[0].key}


def test_a_sample_is_the_same_each_time(term):
    found = mistakes(term)
    assert sample(found) == sample(found[::-1])


def test_what_is_no_grading_is_refused(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"rows": [{}]}))
    with pytest.raises(CourseError, match=r"results\.json"):
        read_term([tmp_path])
