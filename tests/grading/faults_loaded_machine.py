"""Right answers on a machine that has too much to do: none of them is wrong, whatever the limit.

`make faults` runs this; `test_class_run.py` has a sample without a loaded machine.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from random import Random

import nbformat
import pytest

from course_lib.core.course_files import course_folder
from course_lib.workbooks.assignment import Assignment
from course_tools.grading import class_run
from course_tools.grading.class_run import grade_class, graders
from course_tools.grading.compose import chosen, compose
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.sandbox import find_sandbox
from course_tools.grading.submission import HandedIn
from course_tools.grading.task import task_of_assignment

SEED, NUM_STUDENTS, NUM_ANSWERS = 7, 20, 2
LIMITS_S = (8, 15, 30, 60)  # of a cell: the first ones strike while right answers run
EXERCISES = (
    *("00_ranks:ranks-2", "04_collectives:collectives-3", "06_ddp:ddp-1"),
    *("09_zero:zero-2", "10_fsdp:fsdp-1"),
)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep that many cores busy while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def the_task(folder):
    """Compose an assignment of exercises on ranks and others, with cases of each student's own."""
    exercises = chosen(EXERCISES, course_folder() / "notebooks")
    items = tuple((key, 1.0) for _, key in exercises)
    compose(Assignment(name="hw", title="", items=items, seeded=True), exercises, folder, own=False)
    return task_of_assignment(folder)


def hand_in(task, folder, student: str, random: Random) -> HandedIn:
    """Write a notebook with right answers to some of the exercises, in an order of its own."""
    right = task.solutions()
    cells = [
        nbformat.v4.new_code_cell(
            f"{right[key]}\n# by {student}", metadata={"tags": ["exercise"], "exercise": key}
        )
        for key in random.sample(sorted(right), NUM_ANSWERS)
    ]
    path = folder / f"{student}.ipynb"
    metadata = {"course": {"lesson": task.name}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return HandedIn(student, path)


@pytest.mark.timeout(7200)
def test_no_right_answer_is_wrong_on_a_loaded_machine(tmp_path, monkeypatch):
    task, random = the_task(tmp_path / "hw"), Random(SEED)
    students = [hand_in(task, tmp_path, f"s{number}", random) for number in range(NUM_STUDENTS)]
    by_limit = {limit_s: students[n :: len(LIMITS_S)] for n, limit_s in enumerate(LIMITS_S)}
    with (
        Gradebook(tmp_path / "grades", task.points) as book,
        graders(task, find_sandbox(), 2, 600) as made,
        class_run.proved(made[0]),
    ):
        monkeypatch.setattr(class_run, "proved", lambda _: nullcontext())  # once is enough
        with busy_loops(2):
            for limit_s, some in by_limit.items():
                quick = [replace(grader, timeout_s=limit_s) for grader in made]
                found = grade_class(quick, some, book, lambda _: None)
                statuses = [{one.status for one in each.verdicts} for each in found]
                print(limit_s, Counter(map(str, map(sorted, statuses))), file=sys.stderr)
                allowed = {"right", "not judged", "missing"}
                assert not set().union(*statuses) - allowed, found
        for each in grade_class(made, students, book, lambda _: None):
            assert Counter(one.status for one in each.verdicts)["right"] == NUM_ANSWERS, each
