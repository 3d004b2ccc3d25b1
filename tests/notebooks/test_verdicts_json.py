"""What `course check --json` tells a program: the cause by its key, and the section."""

import json

import nbformat
import pytest

from course_lib.checks.exercise import Cause, cause_in, find_exercise
from course_lib.workbooks.check_notebook import GradeReport, Verdict
from course_lib.workbooks.lessons import find_folder, find_lesson
from course_lib.workbooks.verdict_files import verdicts_json

CAUSE = find_exercise("ddp-1").causes()[0]


@pytest.mark.parametrize(
    ("status", "detail", "named"),
    [
        ("wrong", f"5 parameters: need 2; got 3. {CAUSE}", CAUSE.key),
        ("wrong", "Your code raised ValueError: 3", None),
        ("right", f"{CAUSE}", None),
    ],
)
def test_an_assistant_gets_cause_and_section(status, detail, named):
    lesson = find_lesson("06_ddp", find_folder())
    notebook = nbformat.read(lesson.student, as_version=4)
    verdict = Verdict(key="ddp-1", status=status, detail=detail)
    report = GradeReport(lesson="06_ddp", path="x", verdicts=(verdict,))
    (told,) = json.loads(verdicts_json(report, notebook, lesson))["verdicts"]
    assert told["section"] in "".join(cell.source for cell in notebook.cells)
    assert told["section"]
    assert (told["cause"] and told["cause"]["key"]) == named


def test_a_cause_is_found_with_its_values():
    """Also across lines, and not by another cause that begins alike."""
    cause = Cause("{p} times too large for a test: divide by\nwhat {who:>3} has.")
    Cause("times too large for a test")
    text = f"rank 1: {cause.of(p=4, who='you')}\nmore"
    assert cause_in(text) == cause
    assert cause_in("3 times too large for a test: multiply") == Cause("times too large for a test")
