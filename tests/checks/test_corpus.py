"""The corpus of answers as text: a check that gets smaller still tells right from wrong."""

import ast
import builtins

import pytest

from course_lib.checks import CheckFailed, check
from course_lib.checks.right_answer import bound_names, names_used
from tests.checks import corpus
from tests.checks.test_planted_mistakes import EXERCISES, each_exercise, kept_worlds, worlds  # noqa: F401

WRONG, RIGHT = 2200, 79  # so many answers were there when the corpus was begun


def slip(entry: corpus.Entry) -> str:
    """Return what is amiss in the verdict on an answer, or an empty text."""
    try:
        check(entry["key"], corpus.run(entry["text"]))
    except CheckFailed as error:
        return "" if entry["cause"] else f"right, but rejected: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return entry["cause"] and f"passes: {entry['cause']}"


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


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # all answers to an exercise: four minutes on a busy machine
@pytest.mark.usefixtures("kept_worlds")
@each_exercise
def test_wrong_answers_are_rejected_and_right_ones_pass(one):
    told = [(entry["name"], slip(entry)) for entry in corpus.read() if entry["key"] == one.key]
    slipped = [f"{name:63} {what}" for name, what in told if what]
    assert not slipped, "\n".join([f"{len(slipped)} of {len(told)}", *slipped])
