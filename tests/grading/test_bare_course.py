"""The copy of the course that graded answers see: it observes, and has nothing that answers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.checks.exercise import exercises_of
from course_lib.checks.right_answer import SEEN
from course_lib.core import CourseError
from course_lib.workbooks.lessons import Lesson, all_lessons, find_folder
from course_tools.grading.bare_course import copy_bare, library_text

LESSONS = [lesson.word for lesson in all_lessons(find_folder())]
LIBRARY = [place for word in LESSONS for one in exercises_of(word) for place in one.library]
LOOK = """
import sys
from course_lib.checks.exercise import exercises_of
for word in sys.argv[1:]:
    for one in exercises_of(word):
        symptoms = getattr(one.check, "symptoms", ())
        print(one.key, len(one.wrong) + len(symptoms), one.reference)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("course")
    copy_bare(to)
    return to


@pytest.fixture(scope="module")
def hiding(tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("hiding")
    copy_bare(to, LIBRARY)
    return to


def test_every_exercise_can_be_observed_and_none_be_judged(copy):
    command = [sys.executable, "-c", LOOK, *LESSONS]
    run = subprocess.run(
        command,
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(copy)},
    )
    assert run.returncode == 0, run.stderr[-1000:]
    seen = [line.split(" ", 1) for line in run.stdout.splitlines()]
    assert [key for key, _ in seen] == [one.key for word in LESSONS for one in exercises_of(word)]
    assert {rest for _, rest in seen} == {"0 None"}


def test_there_is_no_lesson_in_it_and_no_planted_mistake(copy):
    assert {path.name for path in copy.iterdir()} == {"course_lib", "course_tools"}
    texts = {path: path.read_text() for path in copy.glob("course_lib/checks/*/*.py")}
    assert len(texts) > 50
    assert [path for path, text in texts.items() if "Edit(" in text or "Own(" in text] == []
    assert not list(copy.rglob("*.ipynb"))
    assert not list(copy.rglob(SEEN))


@pytest.mark.parametrize("place", LIBRARY)
def test_what_the_library_has_of_an_exercise_raises_in_it(hiding, place):
    assert library_text(place)
    module, _, name = place.partition(":")
    path = hiding.joinpath(*module.split(".")).with_suffix(".py")
    found = next(
        node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name
    )
    functions = [node for node in ast.walk(found) if isinstance(node, ast.FunctionDef)]
    assert functions
    assert all(isinstance(function.body[0], ast.Raise) for function in functions)


def test_a_name_that_the_library_has_not_is_told():
    with pytest.raises(CourseError, match="there is no such object"):
        library_text("course_lib.ddp.buckets:no_such_buckets")


def test_hidden_cases_come_without_what_judges_them(tmp_path):
    own = Lesson("toy", tmp_path / "toy")
    own.folder.mkdir()
    (own.folder / "hidden.py").write_text(
        "from course_lib.checks.cases import Cases\n\nANSWER = 42\n\n\n"
        "def wrong(got, need):\n    return got == ANSWER\n\n\n"
        "HIDDEN = {'toy-1': Cases(cases=list, look='', success='', symptoms=((wrong, None),))}\n"
    )
    copy_bare(tmp_path / "copy", own=own)
    text = (tmp_path / "copy/hidden.py").read_text()
    assert "toy-1" in text
    assert "42" not in text
