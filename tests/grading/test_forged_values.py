"""What the judge reads may hold anything: it runs nothing of it, and takes no endless time."""

import os
import pickle
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from course_lib.checks import CheckFailed
from course_lib.checks.cases import Raised
from course_lib.checks.exercise import Cause, find_exercise
from course_lib.checks.on_ranks import Run
from course_lib.checks.right_answer import at_work_in
from course_lib.core import CourseError
from course_tools.grading.judge import LATE, Judge, judge
from course_tools.grading.plain_data import from_plain, read_data, to_plain, write_data

SECRET = "a-secret-of-the-instructor"


@pytest.fixture
def toy(small_class, monkeypatch):
    """The class, whose checks are imported; a secret is in the environment."""
    monkeypatch.setenv("SECRET", SECRET)
    with at_work_in(small_class.home):
        find_exercise("toy-1")
    (small_class.folder / "out").mkdir()
    (small_class.folder / "right").mkdir()
    yield small_class
    del sys.modules["course_lib.checks.toy"]


def verdict(toy, key, value, *, raw=None):
    """Return the verdict where this lies in the output folder."""
    out = toy.folder / "out"
    path = out / f"{key}.pt"
    if raw is None:
        torch.save(value, path)
    else:
        path.write_bytes(raw)
    return judge(key, toy.home, out, toy.folder / "right")


def kind(name, content):
    return {"kind": name, "of": content}


def course(path, **content):
    return kind(f"course_lib.{path}", content)


class Touches:
    """Pickles as a call that would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def laughs():
    """Return a list of 10**40 items that takes a few hundred bytes."""
    items = [1] * 10
    for _ in range(40):
        items = [items] * 10
    return items


def around():
    items = []
    items.append(items)
    return items


LEAK = "{p.__init__.__globals__[sys].modules[os].environ}"
HOLDER = course("checks.cases:Raised", name="", text="", line="")
EMPTY = torch.zeros(2)
FORGED = {
    "not a list": 3,
    "none": [],
    "one case": [3],
    "text": "right",
    "nan": [float("nan")] * 2,
    "infinite": [float("inf")] * 2,
    "giant": [10**100_000] * 2,
    "tensor": [torch.tensor(3)] * 2,
    "true": [True, True],
    "other": [kind("other", ["int", "3"])] * 2,
    "other of more": [kind("other", ["int", "3", "4"])] * 2,
    "no class": [kind("course_lib.checks.cases:Nothing", {})] * 2,
    "no course": [kind("os:system", ["true"])] * 2,
    "popen": [course("grading.judge:subprocess.Popen", args=["true"])] * 2,
    "exercise": [course("checks.exercise:Exercise", key="toy-1")] * 2,
    "no field": [course("checks.cases:Raised", name="x")] * 2,
    "enum": [kind("course_lib.checks.on_ranks:torch", "x")] * 2,
    "dict of lists": [kind("dict", [[[], 1]])] * 2,
    "shared": laughs(),
    "cycle": around(),
    "cycle of kinds": kind("list", around()),
    "expanded": [torch.zeros(1).expand(10**12)] * 2,
    "sparse": [EMPTY.to_sparse()] * 2,
    "meta": [torch.empty(10**12, device="meta")] * 2,
    "long text": ["x" * 10**7] * 2,
    "leak": [
        course(
            "checks.cases:Raised",
            name=course(
                "checks.exercise:Cause", sentence=LEAK, values=kind("dict", [["p", HOLDER]])
            ),
            text="",
            line="",
        )
    ]
    * 2,
    "leak of a cause": [kind("CheckFailed", ["x", [LEAK, kind("dict", [["p", HOLDER]])]])] * 2,
    "wide": [kind("CheckFailed", ["x", ["{p:>99999999999}", kind("dict", [["p", HOLDER]])]])] * 2,
}


@pytest.mark.parametrize("name", FORGED)
def test_values_that_no_answer_returns_are_wrong(toy, name):
    found = verdict(toy, "toy-1", FORGED[name])
    assert found.status == "wrong"
    assert 0 < len(found.detail) < 11_000
    assert SECRET not in found.detail


def test_nothing_in_a_file_is_run(toy, tmp_path):
    made = tmp_path / "made"
    assert verdict(toy, "toy-1", [Touches(made), 3]).status == "wrong"
    assert verdict(toy, "toy-1", None, raw=pickle.dumps(Touches(made))).status == "wrong"
    assert verdict(toy, "toy-1", torch.nn.Linear(2, 2)).status == "wrong"
    assert verdict(toy, "toy-1", None, raw=b"").status == "wrong"
    assert not made.exists()


def test_values_of_much_memory_are_wrong_and_the_next_are_judged(toy):
    out, right = toy.folder / "out", toy.folder / "right"
    torch.save([["x" * 10**7] * 1000, 3], out / "toy-1.pt")  # 10 GB as one text
    asked = Judge()
    try:
        found = asked.verdict("toy-1", toy.home, out, right)
        assert (found.status, "MemoryError" in found.detail) == ("wrong", True)
        torch.save([3, 3], out / "toy-1.pt")
        assert asked.verdict("toy-1", toy.home, out, right).status == "right"
    finally:
        asked.close()


def test_runs_that_show_less_than_the_right_answer_are_wrong(toy):
    out, right = toy.folder / "out", toy.folder / "right"
    step = {"mean": torch.full((4,), 5.5), "order": ["all_reduce of 16 bytes", "wait"]}
    honest = [Run(2, {}, [{"4 numbers": step}] * 2)]
    for path in (out / "toy-3.pt", right / "toy-3.pt"):
        write_data(honest, path)
    assert judge("toy-3", toy.home, out, right).status == "right"
    run = honest[0]
    for less in (
        [],
        [Run(2, {}, [{}, {}])],
        [replace(run, by_rank=run.by_rank[:1])],
        [replace(run, world_size=1, by_rank=[{}])],
        [replace(run, options={"easy": True})],
        [run, run],
        [replace(run, by_rank=[{"4 numbers": {}}] * 2)],
        [replace(run, by_rank=[{"4 numbers": step, "more": step}] * 2)],
        ["right"],
    ):  # fmt: skip
        write_data(less, out / "toy-3.pt")
        assert judge("toy-3", toy.home, out, right).status == "wrong", less


class Number(int):
    """An int that says it is equal to everything."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __repr__(self):
        return "3"


class Items(list):
    """A list that says it is another one."""

    def __reduce__(self):
        return eval, ("[3]",)

    def __eq__(self, other):
        return True


class Named(torch.Tensor):
    """A tensor of a class of its own."""


def test_objects_that_lie_cross_as_what_they_hold(tmp_path):
    value = [Number(7), Items([1]), torch.Size([1, 2]), Counter("a"), object(), CheckFailed("no")]
    write_data(value, tmp_path / "values.pt")
    number, items, size, counter, other, failed = read_data(tmp_path / "values.pt")
    assert (type(number), number) == (int, 7)
    assert (type(items), items) == (list, [1])
    assert (size, counter, str(failed)) == ((1, 2), {"a": 1}, "no")
    assert repr(other).startswith("<object object")
    write_data([torch.zeros(2).as_subclass(Named)], tmp_path / "named.pt")
    with pytest.raises(CourseError, match="cannot be read"):
        read_data(tmp_path / "named.pt")
    deep = [1]
    for _ in range(60):
        deep = [deep]
    with pytest.raises(CourseError, match="nested at most 50 deep"):
        to_plain(deep)


def test_a_cause_crosses_as_its_sentence_and_fills_in_nothing():
    cause = from_plain(to_plain(CheckFailed("x", Cause("{p} too many", {"p": 3})))).cause
    assert str(cause) == "{p} too many"
    assert from_plain(to_plain(Raised("KeyError", "x", ""))) == Raised("KeyError", "", "")


def test_a_judge_that_is_late_has_judged_nothing_and_is_started_again(toy, monkeypatch):
    monkeypatch.setattr("course_tools.grading.judge.LIMIT_S", 0.0)
    out, right = toy.folder / "out", toy.folder / "right"
    torch.save([3, 3], out / "toy-1.pt")
    asked = Judge()
    try:
        late = asked.verdict("toy-1", toy.home, out, right)
        assert (late.status, late.detail) == ("not judged", LATE)
        monkeypatch.setattr("course_tools.grading.judge.LIMIT_S", 120.0)
        assert asked.verdict("toy-1", toy.home, out, right).status == "right"
    finally:
        asked.close()
