"""A small class: an assignment of three exercises of its own, and what students hand in."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course_lib.workbooks.assignment import Assignment, write_assignment
from course_tools.grading import class_run
from course_tools.grading.class_run import grade_class, graders
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.grader import Grader, RunGroup
from course_tools.grading.sandbox import find_sandbox
from course_tools.grading.submission import find_submissions
from course_tools.grading.task import GradingTask, task_of_assignment
from tests.grading.hostile_answers import RIGHT_SPLIT, SPLIT

KEYS = ("toy-1", "toy-2", "toy-3")
CHECKS = '''
"""The checks of the toy assignment: a sum, a product, a mean over ranks."""

import torch
import torch.distributed as dist

from course_lib.checks.cases import Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.watch import ORDER, Watch

DIFFERENCE = Cause("Subtracted, not added.")
SUMMED = Cause("Those are sums: divide by the number of ranks.")


def _plain():
    return [("1 and 2", (1, 2)), ("3 and 0", (3, 0))]


def _observe(rank, answer):
    watch, x = Watch(), torch.full((4,), 10.0**rank)
    with watch.step("4 numbers") as step:
        step.show(mean=answer(x))
    return watch.seen


EXERCISES = (
    Exercise(
        key="toy-1",
        title="sum",
        check=Cases(
            cases=_plain,
            drawn=lambda random: [("drawn", (random.randint(5, 99), random.randint(5, 99)))],
            look="Add by hand.",
            success="Sums are right.",
        ),
        wrong=(Edit("x + y", "x - y", DIFFERENCE),),
    ),
    Exercise(
        key="toy-2",
        title="product",
        check=Cases(cases=_plain, look="Multiply by hand.", success="Products are right."),
        wrong=(Edit("x * y", "x - y", DIFFERENCE),),
    ),
    Exercise(
        key="toy-3",
        title="mean",
        check=ByExample(
            observe_on_rank=_observe,
            worlds=(2,),
            facets=("mean", ORDER),
            looks=((ORDER, Cause("One all_reduce does it.")),),
            success="The mean over 2 ranks.",
        ),
        wrong=(Edit(" / dist.get_world_size()", "", SUMMED),),
    ),
)
'''
SOURCE = '''
# %% [markdown]
# # Toy

# %%
import torch
import torch.distributed as dist

from course_lib.checks import check

OFFSET = 0

# %% tags=["exercise"] exercise="toy-1"
def add(x, y):
    """The sum."""
    ### BEGIN SOLUTION: add
    return x + y + OFFSET
    ### END SOLUTION

# %% tags=["check"] exercise="toy-1"
check("toy-1", add)

# %% tags=["exercise"] exercise="toy-2"
def times(x, y):
    """The product."""
    ### BEGIN SOLUTION: multiply
    return x * y
    ### END SOLUTION

# %% tags=["check"] exercise="toy-2"
check("toy-2", times)

# %% tags=["exercise"] exercise="toy-3"
def mean(x):
    """The mean over the ranks."""
    ### BEGIN SOLUTION: reduce
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()
    ### END SOLUTION

# %% tags=["check"] exercise="toy-3"
check("toy-3", mean)
'''
HIDDEN = """
from dataclasses import replace

from course_lib.checks import find_exercise

check = find_exercise("toy-2").check
HIDDEN = {"toy-2": replace(check, cases=lambda: [("7 and 8", (7, 8))], drawn=None)}
"""
RIGHT = {
    "toy-1": "def add(x, y):\n    return x + y\n",
    "toy-2": "def times(x, y):\n    return x * y\n",
    "toy-3": (
        "def mean(x):\n    x = x / dist.get_world_size()\n    dist.all_reduce(x)\n    return x\n"
    ),
}


class Class:
    """The toy assignment in `folder`, and the submissions of its class."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submissions = folder / "submissions"
        self.submissions.mkdir()
        self.home = folder / "toy"
        for name, text in (
            ("source/toy.py", SOURCE),
            ("checks/__init__.py", CHECKS.lstrip()),
            ("hidden.py", HIDDEN),
        ):
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.settle()

    def settle(self, keys: Sequence[str] = KEYS, **settings: Any) -> None:
        """Write the settings, with these exercises only; without toy-3 nothing needs ranks."""
        items = tuple((key, 10.0) for key in keys)
        settings = {"seeded": True, **settings}
        write_assignment(Assignment(name="toy", title="Toy", items=items, **settings), self.home)

    def task(self) -> GradingTask:
        return task_of_assignment(self.home)

    def hand_in(self, name: str, **answers: str) -> Path:
        """Write a submission; exercises that are not given have right answers."""
        texts = {**RIGHT, **{key.replace("_", "-"): text for key, text in answers.items()}}
        checks = {"toy-1": "add", "toy-2": "times", "toy-3": "mean"}
        cells = []
        for key, text in texts.items():
            tagged = {"tags": ["exercise"], "exercise": key}
            cells.append(nbformat.v4.new_code_cell(text, metadata=tagged))
            told = {"tags": ["check"], "exercise": key}
            checked = f'check("{key}", {checks[key]})'
            cells.append(nbformat.v4.new_code_cell(checked, metadata=told))
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"course": {"lesson": "toy"}})
        path = self.submissions / name
        path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path)
        return path

    def prove(self) -> None:
        """Prove the right answers, with more time than a test grades with."""
        task = self.task()
        with graders(task, find_sandbox(), 1, 300) as made, class_run.proved(made[0]):
            pass

    def grade(self, out: Path, timeout_s: float = 60, jobs: int = 2, told=lambda one: None):
        """Grade all that was handed in; return it by student."""
        task = self.task()
        with (
            Gradebook(out, task.points) as book,
            graders(task, find_sandbox(), jobs, timeout_s) as made,
        ):
            found = grade_class(made, find_submissions(self.submissions, "toy"), book, told)
        return {graded.student: graded for graded in found}


class Proofs:
    """Right answers are proved once for each task here, and not again before each class."""

    def __init__(self, kept: ExitStack) -> None:
        self._prove = class_run.proved
        self._kept = kept
        self._groups: dict[str, tuple[RunGroup, ...]] = {}

    @contextmanager
    def proved(self, grader: Grader) -> Iterator[None]:
        digest = grader.task.digest
        if digest not in self._groups:
            self._kept.enter_context(self._prove(grader))
            self._groups[digest] = tuple(grader.groups)
        grader.groups[:] = self._groups[digest]
        yield


@pytest.fixture(scope="session")
def proofs(bubblewrap) -> Iterator[Proofs]:
    with ExitStack() as kept:
        yield Proofs(kept)


@pytest.fixture
def small_class(tmp_path, monkeypatch, proofs) -> Class:
    monkeypatch.setattr(class_run, "proved", proofs.proved)
    return Class(tmp_path)


@pytest.fixture
def split_class(small_class):
    """A class whose first exercise is one that the library has a function for."""
    checks, source = small_class.home / "checks/__init__.py", small_class.home / "source/toy.py"
    text = checks.read_text().replace(
        'key="toy-1",', 'key="toy-1", library=("course_lib.pipeline.token_pipeline:even_cut",),'
    )
    text = text.replace('[("1 and 2", (1, 2)), ("3 and 0", (3, 0))]', '[("4 and 2", (4, 2))]')
    checks.write_text(text.replace('Edit("x + y", "x - y"', 'Edit("x // y", "x"'))
    source.write_text(source.read_text().replace("return x + y + OFFSET", SPLIT))
    small_class.honest = {"toy_1": RIGHT_SPLIT}
    return small_class
