"""docs/authoring.md: the exercise on the page works; what `course new-exercise` begins fails."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, NotDone, __main__, right_answer
from course_lib.core import CourseError
from course_lib.workbooks.lessons import Lesson
from course_tools.authoring.new_exercise import before_build, new_exercise

ROOT = Path(__file__).parents[2]
IMPORTS = "# %%\nimport torch.distributed as dist\n\nfrom course_lib.checks import check\n\n"
PAGE = (ROOT / "docs/authoring.md").read_text()


def block(name):
    return re.search(rf"```python {name}\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture(scope="module")
def greatest(tmp_path_factory):
    """The exercise of the page, its solution read from the page's cells."""
    source = tmp_path_factory.mktemp("source") / "04_collectives.py"
    source.write_text(IMPORTS + block("source"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(right_answer, "lesson_of", lambda _key: source)
        names: dict = {"__name__": "__main__"}
        exec(compile(block("check"), "<page>", "exec"), names)
        yield names["GREATEST"]


def test_the_pages_right_answer_passes(greatest):
    assert greatest.verdict(greatest.right).startswith("The greatest on 1 to 4 ranks")


@pytest.mark.parametrize("number", range(8))
def test_the_pages_planted_mistakes_are_named(greatest, number):
    wrong = greatest.wrong[number]
    with pytest.raises(CheckFailed) as caught:
        greatest.verdict(wrong.answer(greatest))
    assert caught.value.cause == wrong.cause
    assert len(greatest.wrong) == 8


def test_another_right_answer_passes_the_pages_check(greatest):
    def by_minimum(x):
        lowest = -x
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return torch.neg(lowest)

    def without_a_call_where_alone(x):
        return x.clone() if dist.get_world_size() == 1 else by_minimum(x)

    assert greatest.verdict(by_minimum)
    assert greatest.verdict(without_a_call_where_alone)


@pytest.fixture
def course(tmp_path):
    """A copy of what an exercise is made of."""
    for folder in ("notebooks/source", "course_lib", "tests/checks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    return Lesson("06_ddp", tmp_path / "notebooks")


@pytest.mark.parametrize("on_ranks", [False, True])
def test_what_is_begun_can_be_found_and_fails_until_it_is_filled_in(course, on_ranks):
    made = new_exercise(course, "ddp-7", "which_rank", on_ranks)
    assert 'exercise="ddp-7"' in made.source.read_text()
    prove = [sys.executable, "-m", "course_lib.checks", "ddp-7"]
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(made.test)]
    for command, says in ((prove, "write its solution"), (test, "1 failed")):
        run = subprocess.run(
            command, cwd=course.folder.parent, capture_output=True, text=True, check=False
        )
        assert run.returncode == 1
        assert says in run.stdout


@pytest.mark.parametrize(
    ("key", "name", "says"),
    [
        ("ddp-1", "which_rank", "an exercise ddp-1 already"),
        ("zero-6", "which_rank", "need a key like ddp-6"),
        ("ddp-7", "which rank", "need a function's name"),
        ("ddp-7", "buckets", "is there already"),
    ],
)
def test_what_cannot_be_begun_changes_nothing(course, key, name, says):
    before = {path: path.read_bytes() for path in course.folder.parent.rglob("*.py")}
    with pytest.raises(CourseError, match=says):
        new_exercise(course, key, name, on_ranks=False)
    assert {path: path.read_bytes() for path in course.folder.parent.rglob("*.py")} == before


def test_who_begins_an_exercise_is_told_that_the_lesson_is_full(course):
    assert not before_build(course)
    more = "\n# %% [markdown]\n# A cell.\n" * 60
    course.source.write_text(course.source.read_text() + more)
    new_exercise(course, "ddp-7", "which_rank", on_ranks=True)
    (sentence,) = before_build(course)
    assert sentence.startswith("need at most 60 cells in a lesson; got 1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "got 'nosuch'. The lesson 'nosuch' has no exercises"),
        (["--freeze", "nosuch"], "need a lesson that has exercises on ranks"),
        (["--freeze", "collectives-6"], "need a lesson that has exercises on ranks"),
    ],
)
def test_what_cannot_be_proved_is_told_in_a_sentence(arguments, says, capsys):
    assert __main__.main(arguments) == 1
    assert says in capsys.readouterr().out


def test_a_stub_of_the_page_is_not_done(greatest):
    def stub(x):
        raise NotImplementedError("exercise collectives-7: which operation?")

    with pytest.raises(NotDone, match="which operation"):
        greatest.verdict(stub)
