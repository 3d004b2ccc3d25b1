"""The corpus of answers as text: a check that gets smaller still tells right from wrong."""

import ast
import builtins
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from course_lib.checks import CheckFailed, check
from course_lib.checks.right_answer import bound_names, names_used
from tests.checks import corpus
from tests.checks.test_planted_mistakes import (  # noqa: F401 - fixtures
    EXERCISES,
    depends_on,
    each_exercise,
    kept_worlds,
    worlds,
)

WRONG, RIGHT = 2630, 549  # so many answers are there at least
EVERY = 3  # CI tries the first right answer of every third exercise


def slip(entry: corpus.Entry) -> str:
    """Return how a wrong answer gets past its check, or an empty text."""
    try:
        check(entry["key"], corpus.run(entry["text"]))
    except CheckFailed:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"passes: {entry['cause']}"


def right_answers() -> Iterator[Any]:
    """Every right answer in another style than the course's; most of them wait for night."""
    seen: Counter[str] = Counter()
    for entry in (entry for entry in corpus.read() if not entry["cause"]):
        one = next(one for one in EXERCISES if one.key == entry["key"])
        name, marks = f"{one.key}-{entry['name']}", [depends_on(one)]
        seen[one.key] += 1
        is_tried = seen[one.key] == 1 and len(seen) % EVERY == 0
        marks += [] if is_tried else [pytest.mark.nightly]
        yield pytest.param(one, entry["text"], id=name, marks=marks)


def test_the_corpus_has_lost_no_answer():
    entries = corpus.read()
    assert sum(entry["cause"] > "" for entry in entries) >= WRONG
    assert sum(entry["cause"] == "" for entry in entries) >= RIGHT
    assert {entry["key"] for entry in entries} <= {one.key for one in EXERCISES}


@pytest.mark.nightly
def test_a_text_is_enough_by_itself():
    """So none is rejected because a name is missing."""
    for entry in corpus.read():
        tree = ast.parse(entry["text"])
        bound = {name for statement in tree.body for name in bound_names(statement)}
        assert names_used(tree) <= {*bound, *dir(builtins), "__annotations__"}, entry["text"]


@pytest.mark.usefixtures("kept_worlds")
@pytest.mark.parametrize(("one", "text"), list(right_answers()))
def test_a_right_answer_in_another_style_passes(one, text):
    assert one.verdict(corpus.run(text))
    students = one.seeded("hw1 ada")
    assert students is one or students.verdict(corpus.run(text))


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # all answers to an exercise: four minutes on a busy machine
@pytest.mark.usefixtures("kept_worlds")
@each_exercise
def test_wrong_answers_are_rejected(one):
    wrong = [entry for entry in corpus.read() if entry["key"] == one.key and entry["cause"]]
    told = [(entry["name"], slip(entry)) for entry in wrong]
    slipped = [f"{name:63} {what}" for name, what in told if what]
    assert not slipped, "\n".join([f"{len(slipped)} of {len(told)}", *slipped])
