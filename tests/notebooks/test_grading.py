"""Grading: only the learner's exercise cells count, and each verdict says what it is."""

import json
from collections.abc import Callable
from pathlib import Path

import nbformat
import nbval.kernel
import psutil
import pytest

from course_lib.core import CourseError
from course_lib.workbooks.check_notebook import GradeReport, Verdict, grade

RIGHT = "    return x + y\n"


def add(number: int, body: str = RIGHT) -> str:
    return f"def add_{number}(x, y):\n{body}"


def judge(toy, timeout_s: float = 30) -> GradeReport:
    return grade(toy.lesson.student, toy.folder, timeout_s, lambda done, total: None)


def verdicts(report: GradeReport) -> dict[str, Verdict]:
    return {verdict.key: verdict for verdict in report.verdicts}


def statuses(report: GradeReport) -> list[str]:
    return [verdict.status for verdict in report.verdicts]


def test_the_stubs_are_not_done_and_nothing_runs(toy, monkeypatch):
    monkeypatch.delattr("course_lib.workbooks.merge_answers.run_nbval")
    report = judge(toy)
    assert statuses(report) == ["not done"] * 4
    assert "saved" in report.notes[0]


def test_right_wrong_and_broken_answers_stand_side_by_side(toy):
    toy.fill(1, add(1, "    print('working')\n" + RIGHT))
    toy.fill(2, add(2, "    return x - y\n"))
    toy.fill(3, "def add_3(x, y)\n    return 3\n")
    toy.fill(4, add(4, "    return x + z\n"))
    report = judge(toy)
    first, second, third, fourth = report.verdicts
    assert (first.status, first.detail) == ("right", "1 + 2 = 3.")
    assert (second.status, second.detail) == (
        "wrong",
        "rank 0: need 3; got -1. Subtracted, not added.",
    )
    assert third.status == "wrong"
    assert "SyntaxError" in third.detail
    assert fourth.status == "wrong"
    assert "NameError" in fourth.detail
    assert "return x + z" in fourth.detail
    assert not report.all_right
    assert not report.notes


def test_a_saved_output_passes_for_nothing(toy):
    toy.fill(1, add(1, "    return x - y\n"))
    notebook = toy.read()
    printed = nbformat.v4.new_output("stream", name="stdout", text="toy-1: right. 1 + 2 = 3.\n")
    toy.cell(notebook, "check-toy-1").update(outputs=[printed], execution_count=1)
    toy.write(notebook)
    assert verdicts(judge(toy))["toy-1"].status == "wrong"


def test_a_hacked_check_cell_is_told_and_does_not_count(toy):
    toy.fill(1, add(1, "    return x - y\n"))
    toy.fill(2, "def check(key, answer):\n    print('toy-2: right. 1 + 2 = 3.')\nadd_2 = 0")
    notebook = toy.read()
    toy.cell(notebook, "check-toy-1").source = 'print("hacked")'
    notebook.cells.remove(toy.cell(notebook, "check-toy-3"))
    toy.write(notebook)
    found = verdicts(judge(toy))
    assert found["toy-1"].status == "wrong"
    assert found["toy-1"].note == "The check cell was changed; the original was used."
    assert found["toy-2"].status == "wrong"
    assert found["toy-3"].note == "The check cell is missing; the original was used."


def test_deleted_renamed_doubled_and_emptied_cells_are_told(toy):
    for number in range(1, 5):
        toy.fill(number, add(number))
    notebook = toy.read()
    notebook.cells.remove(toy.cell(notebook, "exercise-toy-1"))
    toy.cell(notebook, "exercise-toy-2").metadata.exercise = "toy-22"
    twin = nbformat.from_dict({**toy.cell(notebook, "exercise-toy-3"), "id": "twin"})
    notebook.cells.append(twin)
    toy.cell(notebook, "exercise-toy-4").source = " \n"
    toy.write(notebook)
    report = judge(toy)
    assert statuses(report) == ["missing", "missing", "twice", "not done"]
    assert report.verdicts[0].detail.endswith("Try course reset 00_toy toy-1")
    assert report.verdicts[2].detail.startswith("Cells 9 and 15 are both this exercise.")
    assert report.notes == ("A cell carries the key toy-22, which is no exercise of this lesson.",)


def test_an_answer_that_ends_the_kernel_does_not_spoil_the_others(toy):
    toy.fill(1, add(1))
    toy.fill(2, "import os\n\n" + add(2, "    os._exit(3)\n"))
    toy.fill(3, add(3))
    report = judge(toy)
    assert statuses(report) == ["right", "wrong", "right", "not done"]
    assert report.verdicts[1].detail == "Your code ended the Python process."


def test_an_endless_loop_ends_and_does_not_spoil_the_others(toy):
    toy.fill(1, add(1, "    while True:\n        continue\n"))
    toy.fill(2, add(2))
    report = judge(toy, timeout_s=2)
    assert statuses(report) == ["not judged", "right", "not done", "not done"]
    assert "more than 2 s" in report.verdicts[0].detail


def test_a_cell_that_does_not_define_the_answer_is_told(toy):
    toy.fill(1, add(11))
    verdict = judge(toy).verdicts[0]
    assert verdict.status == "wrong"
    assert "name 'add_1' is not defined" in verdict.detail


def test_a_library_function_is_no_answer(toy):
    toy.fill(1, "from course_lib.core.units import format_bytes as add_1")
    verdict = judge(toy).verdicts[0]
    assert verdict.status == "wrong"
    assert "the course's own format_bytes" in verdict.detail


def test_a_lesson_cell_that_the_answer_breaks_is_noted(toy):
    toy.fill(1, "def print(*args): raise OSError('mine')\n" + add(1))
    toy.fill(2, add(2))
    report = judge(toy)
    assert report.verdicts[0].status == "right"
    assert report.notes == ('The lesson\'s own cell `print("walk", 1)` failed (OSError: mine).',)


def test_a_notebook_that_another_tool_has_saved_is_judged(toy):
    toy.fill(1, add(1))
    notebook = json.loads(toy.lesson.student.read_text())
    for cell in notebook["cells"]:
        del cell["id"]
        cell["colab"] = {"base_uri": "somewhere"}
    toy.lesson.student.write_text(json.dumps({**notebook, "nbformat_minor": 0}))
    assert statuses(judge(toy)) == ["right", "not done", "not done", "not done"]


@pytest.fixture
def kernels_that_end(monkeypatch) -> Callable[[int], None]:
    """Let as many kernels end at their start, as one does whose port another has taken."""

    def end(number: int) -> None:
        start, left = nbval.kernel.start_new_kernel, iter(range(number))

        def start_or_end(*args, **kwargs):
            if next(left, None) is None:
                return start(*args, **kwargs)
            raise RuntimeError("Kernel died before replying to kernel_info")

        monkeypatch.setattr("nbval.kernel.start_new_kernel", start_or_end)

    return end


def test_a_kernel_that_ends_at_its_start_is_started_again(toy, kernels_that_end):
    toy.fill(1, add(1))
    kernels_that_end(2)
    assert statuses(judge(toy)) == ["right", "not done", "not done", "not done"]


def test_where_no_kernel_starts_one_sentence_says_so(toy, kernels_that_end):
    toy.fill(1, add(1))
    kernels_that_end(3)
    with pytest.raises(
        CourseError, match=r"kernel .* 3 of them ended at once\. Try: course doctor"
    ):
        judge(toy)


def test_no_kernel_is_left(toy):
    toy.fill(1, add(1))
    judge(toy)
    names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "ipykernel" in name]


def garbage(path: Path) -> None:
    path.write_text("{ not json")


def of_something_else(path: Path) -> None:
    path.write_text('{"cells": 3, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}')


def a_list(path: Path) -> None:
    path.write_text("[1, 2]")


def emptied(path: Path) -> None:
    path.write_text("")


def of_no_course(path: Path) -> None:
    nbformat.write(nbformat.v4.new_notebook(), path)


def of_another_lesson(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    notebook.metadata.course.lesson = "01_memory"
    nbformat.write(notebook, path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (Path.unlink, "No such file"),
        (garbage, "this is none"),
        (of_something_else, "this is none"),
        (a_list, "this is none"),
        (emptied, "Save the notebook"),
        (of_no_course, "does not say of which lesson"),
        (of_another_lesson, "need the lesson 00_toy; the notebook in it is 01_memory"),
    ],
)
def test_a_file_that_cannot_be_judged_is_one_sentence(toy, spoil: Callable, says: str):
    spoil(toy.lesson.student)
    with pytest.raises(CourseError, match=says) as caught:
        judge(toy)
    assert len(str(caught.value).splitlines()) == 1


def test_a_lesson_that_is_not_built_says_so(toy):
    toy.lesson.solved.unlink()
    with pytest.raises(CourseError, match="make notebooks"):
        judge(toy)


@pytest.mark.parametrize(
    ("body", "timeout_s", "status", "says"),
    [
        ("    while True:\n        print('x', flush=True)\n", 2, "not judged", "more than 2 s"),
        ("    for _ in range(99999):\n        print('x' * 9999)\n", 60, "wrong", "without end"),
        (
            "    while True:\n        try:\n            while True:\n"
            "                print(1, flush=True)\n        except KeyboardInterrupt:\n"
            "            pass\n",
            2,
            "not judged",
            "more than 2 s",
        ),
    ],
)
def test_a_cell_that_prints_without_end_ends_and_does_not_spoil_the_others(
    toy, body, timeout_s, status, says
):
    toy.fill(1, add(1, body))
    toy.fill(2, add(2))
    report = judge(toy, timeout_s)
    assert statuses(report) == [status, "right", "not done", "not done"]
    assert says in report.verdicts[0].detail
