"""Cases, ByExample, Edit: what they accept, what they reject, and which cause they tell."""

import itertools
import pickle
import resource
import sys
import time

import pytest
import torch
import torch.distributed as dist

from course_lib.checks import (
    Cause,
    CheckFailed,
    Exercise,
    NotDone,
    check,
    exercise,
    find_exercise,
    right_answer,
)
from course_lib.checks.cases import NO_RESULT, Cases, alike, plain
from course_lib.checks.edits import Own, edited
from course_lib.checks.exercise import NotJudged, Stopped, TooLong, failed
from course_lib.checks.judge import ByExample
from course_lib.checks.on_ranks import ENDLESS, Run, Trouble
from course_lib.checks.watch import ALWAYS, ORDER, Watch
from course_lib.core import CourseError
from course_lib.core.errors import MachineError
from course_lib.ranks import Ranks
from course_lib.ranks.job import RankJob

SUMMED = Cause("{p} times too large: summed.")


# --- causes and edits


def test_a_cause_is_the_same_with_and_without_its_values():
    assert SUMMED.of(p=4) == SUMMED
    assert str(SUMMED.of(p=4)) == "4 times too large: summed."
    assert failed("rank 0: got 8", SUMMED, p=4).cause == SUMMED
    assert str(failed("rank 0: got 8", SUMMED, p=4)) == "rank 0: got 8. 4 times too large: summed."
    assert str(failed("Why?")) == "Why?"


@pytest.mark.parametrize("old", ["no such text", "x"])
def test_an_edit_whose_text_does_not_stand_exactly_once_is_an_error(old):
    with pytest.raises(CourseError, match=f"need '{old}' exactly once; it stands"):
        edited("x = 1\ny = x\n", old, "z")


def test_the_lines_of_an_edit_are_indented_like_the_one_that_they_replace():
    text = "def f():\n    first()\n    second()\n"
    assert edited(text, "first()", "a()\nb()") == "def f():\n    a()\n    b()\n    second()\n"
    assert edited(text, "    first()\n", "") == "def f():\n    second()\n"


# --- the right answer


SOURCE = '''
# %%
import math
import torch.distributed as dist
raise ValueError("a cell that nothing needs is not run")

# %%
def half(x):
    return math.floor(x / TWO)

TWO = 2

# %% tags=["exercise"] exercise="toy-1"
def quarter(x):
    """A quarter."""
    ### BEGIN SOLUTION: twice the half
    math_of_mine = half(half(x))
    return math_of_mine
    ### END SOLUTION
'''


@pytest.fixture
def toy_source(tmp_path, monkeypatch):
    source = tmp_path / "01_toy.py"
    source.write_text(SOURCE)
    monkeypatch.setattr(right_answer, "lesson_of", lambda _key: source)
    return source


@pytest.mark.usefixtures("toy_source")
def test_the_right_answer_runs_with_what_it_needs_of_the_cells_above_and_nothing_else():
    right = right_answer.run_cell("toy-1", right_answer.solved_cell("toy-1"))
    assert right(9) == 2
    assert "dist" not in right.__globals__
    assert "### " not in right_answer.solved_cell("toy-1")


@pytest.mark.usefixtures("toy_source")
def test_an_exercise_that_is_not_there_is_one_sentence():
    with pytest.raises(CourseError, match=r"01_toy\.py has no such exercise"):
        right_answer.solved_cell("toy-2")


def test_a_lesson_that_is_not_there_is_one_sentence():
    with pytest.raises(CourseError, match="need its lesson's source"):
        right_answer.lesson_of("nothing-1")


# --- cases

DOUBLED = Cause("Doubled twice.")
AN_ERROR = Cause("Divided by nothing.")


def twice(**more):
    """An exercise whose right answer doubles a number."""
    return Exercise(
        key="toy-1",
        title="twice",
        reference=lambda x: 2 * x,
        check=Cases(
            cases=lambda: [("1 apple", (1,)), ("0 apples", (0,)), ("2.5 apples", (2.5,))],
            success="Twice.",
            look="Count.",
            **more,
        ),
        wrong=(Own(lambda x: 4 * x, DOUBLED), Own(lambda x: 2 / x * x * x, AN_ERROR)),
    )


@pytest.mark.parametrize("answer", [lambda x: x + x, lambda x: float(2 * x)])
def test_cases_accept_equal_numbers(answer):
    assert twice().verdict(answer) == "Twice."


@pytest.mark.parametrize(
    ("answer", "says", "cause"),
    [
        (lambda x: x * 4, "1 apple: need 2 kg; got 4 kg. Doubled twice.", DOUBLED),
        (lambda x: x, "1 apple: need 2 kg; got 1 kg. Count.", Cause("Count.")),
        (lambda x: 2 * x or 7, "0 apples: need 0 kg; got 7 kg. Count.", Cause("Count.")),
        (lambda x: 4 * x or 7, "1 apple: need 2 kg; got 4 kg. Count.", Cause("Count.")),
        (lambda x: None, "got None. Does your function return", NO_RESULT),
        (lambda x: 2 * x / x * x, "0 apples: your code raised ZeroDivisionError", AN_ERROR),
        (lambda x: "2", "need 2 kg; got '2'. Count.", Cause("Count.")),
        (lambda x: True, "got True kg. Count.", Cause("Count.")),
    ],
)
def test_cases_tell_the_cause_that_fits_every_case(answer, says, cause):
    with pytest.raises(CheckFailed) as caught:
        twice(unit=" kg").verdict(answer)
    assert says in str(caught.value)
    assert caught.value.cause == cause


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda x: [[n, 0] for n in range(98)] + [[98, x], [99, 0]], "entry 98: need [98, 0]; got"),
        (lambda x: [[n, 0] for n in range(99)], "[2, 0],"),
    ],
)
def test_a_long_value_is_told_where_it_differs_first(answer, says):
    one = Exercise(
        key="toy-1",
        title="long",
        reference=lambda x: [[n, 0] for n in range(100)],
        check=Cases(cases=lambda: [("1 apple", (1,))], success="", look="Count."),
    )
    with pytest.raises(CheckFailed) as caught:
        one.verdict(answer)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_part_has_no_cause_that_is_wrong_in_a_part_before_it():
    def with_a_tolerance(experiment, alone, percent):
        efficiency, fixed_s, most = exercise.right(experiment, alone, percent)
        return efficiency, fixed_s, 2 * most

    exercise = find_exercise("scaling_study-2")
    with pytest.raises(CheckFailed, match="Solve T_1 / "):
        exercise.verdict(with_a_tolerance)


def test_what_show_cannot_read_is_told_with_its_case():
    def show(_result, _x):
        raise failed("got a text", NO_RESULT)

    with pytest.raises(CheckFailed, match="1 apple: got a text") as caught:
        twice(show=show).verdict(lambda x: 3 * x)
    assert caught.value.cause == NO_RESULT


def test_what_was_observed_is_plain_data_that_another_process_can_judge():
    one = twice()
    observed = pickle.loads(pickle.dumps(list(one.check.observe(lambda x: x * 4))))
    with pytest.raises(CheckFailed, match="Doubled twice"):
        one.check.judge(observed, one)


@pytest.mark.parametrize(
    ("found", "wanted", "equal"),
    [
        (1, 1.0, True),
        (1 + 1e-12, 1, True),
        (1.001, 1, False),
        (True, 1, False),
        ([1, 2], (1, 2), True),
        ([1], [1, 2], False),
        ({"a": 1.0}, {"a": 1}, True),
        ({"b": 1}, {"a": 1}, False),
        ("1", 1, False),
        (float("nan"), 1.0, False),
        (float("inf"), 1.0, False),
    ],
)
def test_plain_values_are_compared(found, wanted, equal):
    assert alike(found, wanted, 1e-9) is equal


def test_plain_values_are_shown():
    assert plain([1000, 0.25, "a", None, True]) == "[1,000, 0.25, a, None, True]"


# --- on ranks


def observe(rank, answer, shift=0.0):
    watch, x = Watch(), torch.arange(3.0).double() + 10**rank + shift
    with watch.step("3 numbers", x=x) as step:
        step.show(mean=answer(x))
    return watch.seen


def mean(x):
    y = x.clone()
    dist.all_reduce(y)
    return y / dist.get_world_size()


MEAN = Exercise(
    key="toy-2",
    title="mean",
    reference=mean,
    check=ByExample(
        observe_on_rank=observe,
        worlds=(2,),
        runs=lambda _p: ({}, {"shift": 1.0}),
        facets=(*ALWAYS, ORDER, "mean"),
        success="The mean.",
    ),
    wrong=(Own(lambda x: mean(x) * 2, SUMMED),),
)


def test_a_right_answer_passes_on_ranks():
    assert MEAN.verdict(mean) == "The mean."


def test_a_stub_on_ranks_is_not_done():
    def stub(x):
        raise NotImplementedError("exercise toy-2: sum, then divide")

    with pytest.raises(NotDone, match="sum, then divide"):
        MEAN.verdict(stub)


def test_what_ranks_observed_can_be_judged_in_another_process():
    observed = pickle.loads(pickle.dumps(list(MEAN.check.observe(lambda x: mean(x) * 2))))
    with pytest.raises(CheckFailed, match="2 times too large"):
        MEAN.check.judge(observed, MEAN)


# --- the limit


def test_a_check_that_never_ends_is_ended(monkeypatch):
    class Endless(Cases):
        def observe(self, _answer):
            while True:
                time.sleep(0.01)

    check_it = Endless(cases=list, look="", success="")
    one = Exercise(key="toy-1", title="endless", check=check_it, reference=0)
    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (one,))
    with pytest.raises(TooLong, match=r"(?s)toy-1: ended after 0\.2 s.*Does a wait never return"):
        check("toy-1", lambda: 3, limit_s=0.2)


def test_an_answer_that_never_ends_is_ended_and_not_called_again(monkeypatch):
    calls = []

    def endless(x):
        calls.append(x)
        while True:
            time.sleep(0.01)

    check_it = Cases(cases=lambda: [("1", (1,)), ("2", (2,))], look="", success="")
    one = Exercise(key="toy-1", title="endless", check=check_it, reference=abs)
    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (one,))
    with pytest.raises(TooLong, match=r"toy-1: ended after 0\.2 s"):
        check("toy-1", endless, limit_s=0.2)
    assert calls == [1]


def test_a_check_that_is_stopped_says_nothing_about_the_answer(monkeypatch):
    def interrupted(_job):
        raise KeyboardInterrupt  # by Stop, or by the time limit of whoever runs the notebook

    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (MEAN,))
    monkeypatch.setattr(RankJob, "_watch", interrupted)
    with pytest.raises(NotJudged, match=r"toy-2: on \d ranks?, it had not ended\.") as told:
        check("toy-2", mean)
    assert "by you" not in str(told.value)
    assert "you stopped" not in str(told.value)


def test_ranks_that_do_not_start_say_nothing_about_the_answer(monkeypatch):
    def slow(_ranks):
        raise MachineError("Ranks: need ranks that start within 60 s; one did not.")

    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (MEAN,))
    monkeypatch.setattr(Ranks, "_wait_until_ready", slow)
    with pytest.raises(NotJudged, match="toy-2: Ranks: need ranks that start"):
        check("toy-2", mean)


def test_the_limit_also_ends_ranks(monkeypatch):
    def spins(x):
        while True:
            x = x + 1

    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (MEAN,))
    with pytest.raises(TooLong, match="ended after 3 s"):
        check("toy-2", spins, limit_s=3)
    assert MEAN.verdict(mean) == "The mean."


SPINS = """
def answer(x):
    while True:
        try:
            x = x + 1
        except Exception:
            pass
"""


@pytest.fixture
def spins(monkeypatch):
    """An answer that computes without an end; checks soon notice that here."""
    monkeypatch.setattr("course_lib.checks.exercise.COMPUTING_S", 0.2)
    monkeypatch.setattr("course_lib.checks.on_ranks.COMPUTING_S", 0.2)
    names: dict = {}
    exec(compile(SPINS, "<cell>", "exec"), names)
    return names["answer"]


def test_a_loop_without_an_end_is_told_with_its_line_and_without_the_librarys_frames(
    monkeypatch, spins
):
    one = twice()
    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (one,))
    with pytest.raises(
        CheckFailed,
        match=r"toy-1: your code does not return: ended after 0\.2 s of computing, at line \d of",
    ) as caught:
        check("toy-1", spins)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_on_ranks_too(spins):
    with pytest.raises(CheckFailed, match="Does a loop never end") as caught:
        MEAN.verdict(spins)
    assert caught.value.cause == ENDLESS
    assert "Endless: ended after 0.2 s of computing" in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has no limit")
@pytest.mark.parametrize("endless", ["list(itertools.count())", "itertools.count()"])
def test_a_loop_in_c_without_an_end_ends_with_its_memory(monkeypatch, endless):
    monkeypatch.setattr("course_lib.checks.limits.MOST_BYTES", 2**27)
    names: dict = {"itertools": itertools}
    exec(compile(f"def answer(x):\n    return {endless}\n", "<cell>", "exec"), names)
    check_it = Cases(cases=lambda: [("1", (1,))], look="", success="", show=lambda x, _: list(x))
    one = Exercise(key="toy-1", title="endless", check=check_it, reference=lambda x: [x])
    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (one,))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(CheckFailed, match=r"toy-1: your code took more than .* GiB of memory"):
        check("toy-1", names["answer"])
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


DTYPES = (
    "Invalid usage of tensors with different dtypesFound torch.float32 and  torch.float64",
    "ProcessGroupGloo::allgather: invalid tensor type at index 0 (expected TensorOptions(...",
    "result type Float can't be cast to the desired output type Long",
)


@pytest.mark.parametrize("said", DTYPES)
@pytest.mark.parametrize("key", ["fsdp-1", "fsdp-4", "tensor_parallel-1", "tensor_parallel-6"])
def test_two_dtypes_in_a_call_are_told_as_that(key, said):
    trouble = Trouble("raised", {0: ("RuntimeError", said)}, said)
    one = find_exercise(key)
    with pytest.raises(CheckFailed, match=r"dtype.*(new_empty|given)"):
        one.check.judge([Run(2, {}, trouble=trouble)], one)


def test_a_rank_whose_memory_is_full_is_asked_for_a_loop():
    trouble = Trouble("raised", {0: ("MemoryError", "")}, "rank 0 raised MemoryError")
    with pytest.raises(CheckFailed) as caught:
        MEAN.check.judge([Run(2, {}, trouble=trouble)], MEAN)
    assert caught.value.cause == ENDLESS


def test_stop_is_one_line_that_says_where(monkeypatch):
    names: dict = {}
    exec(compile("def answer(x):\n    raise KeyboardInterrupt\n", "<cell>", "exec"), names)
    one = twice()
    monkeypatch.setattr(exercise, "exercises_of", lambda _lesson: (one,))
    with pytest.raises(Stopped) as caught:
        check("toy-1", names["answer"])
    (line,) = caught.value._render_traceback_()
    assert line.startswith("toy-1: stopped, at line 2 of your cell")
