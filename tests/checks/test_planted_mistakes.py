"""Checks: every planted mistake is rejected and named, every reference passes."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import course_lib.checks
from course_lib.checks import (
    Cause,
    CheckFailed,
    Exercise,
    NotDone,
    check,
    exercise,
    find_exercise,
)
from course_lib.checks.expect import on_ranks
from course_lib.checks.judge import ByExample
from course_lib.core import CourseError
from course_lib.ranks import Ranks

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "source"


def all_exercises() -> list[Exercise]:
    """The exercises of all modules of checks, in order."""
    names = sorted(module.name for module in pkgutil.iter_modules(course_lib.checks.__path__))
    modules = [importlib.import_module(f"course_lib.checks.{name}") for name in names]
    return [one for module in modules for one in getattr(module, "EXERCISES", ())]


EXERCISES = all_exercises()
# where wrong answers leave something behind on the ranks: messages that nobody takes, state
ALONE = (
    *("ranks-2", "ranks-4", "collectives-", "pipeline-3", "pipeline-5"),
    *("data_parallel-1", "tensor_parallel-4", "tensor_parallel-6", "fsdp-3"),
)
MOST, MOST_ON_RANKS = (3, 6), (3, 3)  # so many causes: in `make test`, in CI


def depends_on(one: Exercise) -> pytest.MarkDecorator:
    """What an exercise depends on: its check, and its lesson, which has the right answer."""
    word = one.key.rpartition("-")[0]
    (source,) = SOURCES.glob(f"*_{word}.py")
    return pytest.mark.reaches(f"course_lib.checks.{word}", f"notebooks/source/{source.name}")


def planted() -> Iterator[Any]:
    """Every planted mistake: one for each cause, of the first causes; all nightly."""
    for one in EXERCISES:
        causes: list[Cause] = []  # that have an example
        for wrong in one.wrong:
            marks = [depends_on(one)]
            if wrong.cause in causes:
                marks.append(pytest.mark.nightly)
            else:
                causes.append(wrong.cause)
                quick, in_ci = MOST_ON_RANKS if isinstance(one.check, ByExample) else MOST
                if len(causes) > quick:
                    is_late = len(causes) > in_ci or one.key.startswith(ALONE)
                    marks.append(pytest.mark.nightly if is_late else pytest.mark.ci)
            yield pytest.param(one, wrong, id=f"{one.key}-{wrong.name}", marks=marks)


each_exercise = pytest.mark.parametrize(
    "one", [pytest.param(one, id=one.key, marks=depends_on(one)) for one in EXERCISES]
)


class Kept:
    """Worlds that outlast a check, so that a thousand wrong answers need not start one each."""

    worlds: ClassVar[dict[int, Ranks]] = {}

    def __init__(self, world_size: int, **_where: str) -> None:
        self.world_size = world_size

    def __enter__(self) -> Ranks:
        if self.world_size not in self.worlds:
            self.worlds[self.world_size] = Ranks(self.world_size, cluster="laptop")
        return self.worlds[self.world_size]

    def __exit__(self, *_error: object) -> None:
        """Keep it: a world that an answer broke has been started again already."""


@pytest.fixture(scope="module")
def worlds():
    yield Kept
    while Kept.worlds:
        Kept.worlds.popitem()[1].close()


@pytest.fixture
def kept_worlds(worlds, monkeypatch, one):
    if not one.key.startswith(ALONE):
        monkeypatch.setattr("course_lib.checks.judge.Ranks", worlds)


@pytest.mark.usefixtures("kept_worlds")
@each_exercise
def test_the_right_answer_passes_with_one_line(one):
    detail = one.verdict(one.right)
    assert detail.strip()
    assert len(detail.splitlines()) == 1


@pytest.mark.usefixtures("kept_worlds")
@pytest.mark.parametrize(("one", "wrong"), list(planted()))
def test_every_planted_mistake_is_rejected_and_named(one, wrong):
    with pytest.raises(CheckFailed) as caught:
        one.verdict(wrong.answer(one))
    assert caught.value.cause == wrong.cause
    assert str(caught.value.cause) in str(caught.value)


@each_exercise
def test_an_exercise_has_its_mistakes_and_one_key(one):
    assert len({wrong.cause.sentence for wrong in one.wrong}) >= 3
    assert [other.key for other in EXERCISES].count(one.key) == 1
    assert find_exercise(one.key) is one


@each_exercise
def test_an_empty_stub_is_not_done(one):
    def stub(*args, **kwargs):
        raise NotImplementedError(f"exercise {one.key}: fill it in")

    with pytest.raises(NotDone, match=f"{one.key} is not done yet: fill it in"):
        check(one.key, stub)


@pytest.fixture
def toy_check(monkeypatch):
    """A lesson `toy` whose one check calls the answer and wants 3."""

    class Three:
        def observe(self, answer):
            yield answer()

        def judge(self, seen, _exercise):
            if list(seen) != [3]:
                raise CheckFailed("need 3. Count again.")
            return "That is 3."

    one = Exercise(key="toy-1", title="three", check=Three(), reference=lambda: 3)
    known = {"toy": (one,)}
    monkeypatch.setattr(exercise, "exercises_of", lambda lesson: known.get(lesson, ()))


@pytest.mark.usefixtures("toy_check")
class TestCheck:
    def test_success_is_one_line_whatever_the_answer_prints(self, capsys):
        def answer():
            print("thinking")
            return 3

        check("toy-1", answer)
        assert capsys.readouterr().out == "toy-1: right. That is 3.\n"

    def test_what_a_wrong_answer_prints_is_shown(self, capsys):
        with pytest.raises(CheckFailed, match=r"^toy-1: need 3\. Count again\.$"):
            check("toy-1", lambda: print("thinking"))
        assert capsys.readouterr().out == "thinking\n"

    def test_the_notebook_shows_the_text_alone(self):
        with pytest.raises(CheckFailed) as caught:
            check("toy-1", lambda: 4)
        assert caught.value._render_traceback_() == ["toy-1: need 3. Count again."]
        assert isinstance(caught.value, AssertionError)

    def test_a_stub_is_not_done(self):
        def answer():
            raise NotImplementedError("exercise toy-1: return three")

        with pytest.raises(NotDone, match=r"^toy-1 is not done yet: return three$"):
            check("toy-1", answer)

    def test_an_error_of_the_answer_is_told_with_its_line(self):
        names: dict = {}
        exec(compile("def answer():\n    return 3 + None\n", "<cell>", "exec"), names)
        with pytest.raises(CheckFailed, match=r"your code raised TypeError: .*\n +line 2 of"):
            check("toy-1", names["answer"])

    def test_something_that_no_check_can_use_is_told(self):
        with pytest.raises(
            CheckFailed, match=r"the check cannot use .*'int' object is not callable"
        ):
            check("toy-1", 3)

    def test_the_courses_own_function_is_sent_back(self):
        with pytest.raises(CheckFailed, match="the course's own on_ranks, not yours"):
            check("toy-1", on_ranks)

    @pytest.mark.parametrize(
        ("key", "says"),
        [("toy-11", "Try toy-1"), ("nothing-1", "has no exercises"), ("", "has no exercises")],
    )
    def test_an_unknown_key_is_one_sentence(self, key, says):
        with pytest.raises(CourseError, match=says):
            check(key, lambda: 3)


def test_every_lesson_of_checks_can_be_found_by_its_key():
    assert exercise.exercises_of("tools") == ()
    assert exercise.exercises_of("no_such_lesson") == ()
    assert exercise.exercises_of("no such lesson") == ()
