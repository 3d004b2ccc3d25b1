"""ByExample: what an answer on ranks shows, and which planted mistake it is named after."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.checks import Cause, CheckFailed, Exercise, exercise
from course_lib.checks.cases import from_json, to_json
from course_lib.checks.edits import Own
from course_lib.checks.judge import ByExample, unlike
from course_lib.checks.properties import EVERY_RANK, REDUCES
from course_lib.checks.right_answer import SEEN, seen_file, seen_values
from course_lib.checks.watch import ALWAYS, ORDER, Watch
from course_lib.core import CourseError
from tests.checks.test_planted_mistakes import EXERCISES, kept_worlds, worlds  # noqa: F401

SUMMED = Cause("{p} times too large: summed.")


def observe(rank, answer):
    watch = Watch()
    for number in range(2):
        x = torch.arange(1.0, 4.0) * 10**rank * (number + 1)
        with watch.step(f"call {number}", x=x) as step:
            flat = x.clone()
            work = answer(flat)
            watch.mark("returned")
            work.wait()
            flat /= dist.get_world_size() if work.divides else 1
        step.show(mean=flat)
    return watch.seen


class Work:
    def __init__(self, work, divides=True):
        self.wait, self.divides = work.wait, divides


def right(x):
    return Work(dist.all_reduce(x, async_op=True))


def summed(x):
    return Work(dist.all_reduce(x, async_op=True), divides=False)


def toy():
    check = ByExample(
        observe_on_rank=observe,
        worlds=(2,),
        facets=(*ALWAYS, ORDER, "mean"),
        success="The mean on 2 ranks.",
    )
    wrong = (Own(summed, SUMMED),)
    return Exercise(key="toy-1", title="mean", check=check, wrong=wrong, reference=right)


def rejected(one, answer):
    with pytest.raises(CheckFailed) as caught:
        one.verdict(answer)
    return caught.value


def writes_before_the_wait(x):
    work = right(x)
    x.mul_(2)
    return work


def triples(x):
    return right(x.mul_(3))


def in_two_calls(x):
    dist.all_reduce(x[:1])
    return Work(dist.all_reduce(x[1:], async_op=True))


def waits_for_all(x):
    future = dist.all_reduce(x, async_op=True).get_future()
    work = Work(future)
    work.wait = lambda: torch.futures.wait_all([future])
    return work


def divides_in_a_callback(x):
    future = dist.all_reduce(x, async_op=True).get_future()
    return Work(future.then(lambda done: done.value()[0].div_(1)))


def exchanged(rank, answer):
    """Give an answer what a message brings, and what it sends; its result is shown."""
    watch, sends, receives = Watch(), torch.ones(3) + rank, torch.zeros(3)
    with watch.step("a message each way") as step:
        step.show(result=answer(1 - rank, sends, receives))
    return watch.seen


def waits_and_reads(other, sends, receives):
    works = [dist.isend(sends, other), dist.irecv(receives, other)]
    for work in works:
        work.wait()
    return receives.clone()


def reads_and_waits(other, sends, receives):
    works = [dist.isend(sends, other), dist.irecv(receives, other)]
    read = receives.clone()
    for work in works:
        work.wait()
    return read


def writes_while_it_sends(other, sends, receives):
    sending = dist.isend(sends, other)
    dist.recv(receives, other)
    sends.add_(1)
    sending.wait()
    return receives


def test_a_message_is_there_once_it_was_waited_for_and_may_not_change_before():
    check = replace(toy().check, observe_on_rank=exchanged, facets=(*ALWAYS, "result"))
    one = replace(toy(), check=check, wrong=(), reference=waits_and_reads)
    assert one.verdict(waits_and_reads)
    assert "result: need [2, 2, 2]; got [7, 7, 7]" in str(rejected(one, reads_and_waits))
    told = "written to before the wait: need nothing; got send of 12 bytes"
    assert told in str(rejected(one, writes_while_it_sends))


@pytest.mark.parametrize("answer", [waits_for_all, divides_in_a_callback])
def test_a_future_waits_for_its_call(answer):
    assert toy().verdict(answer)


def test_what_differs_is_told_and_the_same_mistake_names_the_cause():
    one = toy()
    assert one.verdict(right) == "The mean on 2 ranks."
    error = rejected(one, lambda x: summed(x))
    assert error.cause == SUMMED
    assert str(error) == (
        "rank 0 of 2, call 0: mean: need [5.5, 11, 16.5]; got [11, 22, 33]. "
        "2 times too large: summed."
    )
    unknown = rejected(one, triples)
    assert unknown.cause is None
    assert str(unknown).endswith("mean: need [5.5, 11, 16.5]; got [16.5, 33, 49.5].")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (writes_before_the_wait, "written to before the wait: need nothing; got all_reduce of 12"),
        (in_two_calls, "order: first, need all_reduce of 12 bytes; got all_reduce of 4 bytes"),
        (lambda x: right(x) and 1 / 0, "on 2 ranks, call 0, your code raised an error."),
        (lambda x: right(x if dist.get_rank() else x[:1]), "All ranks have to make the same calls"),
        (lambda x: dist.get_rank() or right(x), "your code raised an error"),
    ],
)
def test_what_was_seen_is_told(answer, says):
    assert says in str(rejected(toy(), answer))


def test_frozen_values_judge_where_no_right_answer_lies(monkeypatch):
    one = toy()
    frozen = {
        "right": to_json(one.right_values()),
        "wrong": [[str(c), to_json(shows)] for c, shows in one.wrong_values()],
    }
    frozen = json.loads(json.dumps(frozen))
    monkeypatch.setattr(exercise, "frozen_values", lambda _key: frozen)
    monkeypatch.setattr(exercise, "right_answer", None)
    student = Exercise(key="toy-1", title="mean", check=one.check)
    assert student.verdict(right)
    assert rejected(student, summed).cause == SUMMED
    assert from_json(to_json(one.right_values()))[0].by_rank[1]["call 0"][ORDER][0]


def test_a_right_answer_that_fails_is_the_checks_own_mistake():
    one = Exercise(key="toy-1", title="mean", check=toy().check, reference=lambda x: 1 / 0)
    with pytest.raises(CourseError, match="the check's own right answer fails"):
        one.verdict(right)


BROKEN = [one for one in REDUCES if one.name not in ("hides nan", "only if any", "four ranks")]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.name)
def test_a_property_breaks_any_right_answer(broken):
    one = toy()
    mistake = Exercise(key="toy-1", title="mean", check=one.check, wrong=(broken,), reference=right)
    error = rejected(mistake, broken.answer(mistake))
    assert error.cause == broken.cause or broken.cause == EVERY_RANK


@pytest.mark.parametrize(
    ("got", "need", "words"),
    [
        ({"a": 1}, {"a": 1}, ""),
        ({"a": 1}, {"a": 2}, "a: need 2; got 1"),
        (["x", "y"], ["x", "z"], "after x, need z; got y (all of it: x, y)"),
        (["x"], ["x", "z"], "after x, need z; got nothing more (all of it: x)"),
        ([], ["x"], "need x; got nothing"),
    ],
)
def test_how_a_value_differs_is_said_in_words(got, need, words):
    assert unlike(got, need) == words


FROZEN = [one for one in EXERCISES if seen_values(one.key)]


def test_what_lies_beside_checks_is_of_these_checks():
    """Where this fails: `python -m course_lib.checks LESSON --freeze`."""
    assert len(FROZEN) >= 3
    for path in Path(exercise.__file__).parent.glob(f"*/{SEEN}"):
        of_lesson = {one.key for one in FROZEN if seen_file(one.key.rpartition("-")[0]) == path}
        assert of_lesson == set(json.loads(gzip.decompress(path.read_bytes())))
    for one in FROZEN:
        assert [cause for cause, _ in one.wrong_values()] == [wrong.cause for wrong in one.wrong]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("kept_worlds")
@pytest.mark.parametrize("one", FROZEN, ids=lambda one: one.key)
def test_answers_show_today_what_lies_beside_the_checks(one):
    today = replace(one)  # of another object nothing is read
    assert one.check.judge(today.right_values(), one)
    for (cause, old), (_, new) in zip(one.wrong_values(), today.wrong_values(), strict=True):
        assert old[:3] == new[:3], cause.sentence


def test_values_are_read_for_a_lessons_own_check_only():
    one = next(one for one in FROZEN if not one.key.startswith("clinic"))
    other = replace(one, check=replace(one.check, worlds=(1,)))
    assert len(other.right_values()) < len(one.right_values())
