"""Grade a class with hostile submissions in it, and hold that nothing but their grades changes."""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

import psutil

import course_lib
from course_tools.grading.class_run import grade_class, graders
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.graded import Graded
from course_tools.grading.sandbox import find_sandbox
from course_tools.grading.submission import find_submissions
from course_tools.grading.watchdog import MiB, RunLimits

T = TypeVar("T")
HONEST = "zoe"  # the last in the class
LIMITS = RunLimits(memory_bytes=2500 * MiB, disk_bytes=64 * MiB, output_bytes=MiB, processes=150)
NOTHING = {f"toy_{number}": "" for number in (1, 2, 3)}  # not done: nothing to run
LEFT_OVER = "98765.4321"  # seconds that a hostile process sleeps, to find it by


def graded_class(small_class, out: Path, timeout_s: float = 20) -> dict[str, Graded]:
    """Grade all that was handed in, and an honest classmate; return it by student.

    Raises: AssertionError where the classmate lost points, a file has changed or something is left
    """
    small_class.hand_in(f"{HONEST}.ipynb", **getattr(small_class, "honest", {}))
    task = small_class.task()
    small_class.prove()  # what the proof keeps is none of the submissions'
    with (
        nothing_left(small_class.folder),
        Gradebook(out, task.points) as book,
        graders(task, find_sandbox(), 2, timeout_s) as made,
    ):
        small = [replace(grader, limits=LIMITS) for grader in made]
        submissions = find_submissions(small_class.submissions, "toy")
        found = grade_class(small, submissions, book, lambda one: None)
    by_student = {graded.student: graded for graded in found}
    assert len(by_student) == len(submissions)
    assert statuses(by_student[HONEST]) == ["right"] * 3, by_student[HONEST]
    return by_student


def one_of_each(kinds: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Return one student of each kind, the same ones in every run."""
    random = Random(5)
    return {name: kind[name] for kind in kinds.values() for name in [random.choice(sorted(kind))]}


def all_of(kinds: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Return the students of all kinds."""
    return {name: text for kind in kinds.values() for name, text in kind.items()}


def statuses(graded: Graded) -> list[str]:
    """Return the statuses of its exercises."""
    return [verdict.status for verdict in graded.verdicts]


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Hold that the block changes no file of the course or below `folder`, and leaves nothing."""
    before, children = contents(folder), len(psutil.Process().children(recursive=True))
    default = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        Path(scratch).chmod(0o755)
        tempfile.tempdir = scratch
        try:
            yield
        finally:
            tempfile.tempdir = default
        assert list(Path(scratch).iterdir()) == []
    assert set(contents(folder).items()) ^ set(before.items()) == set()
    assert len(psutil.Process().children(recursive=True)) == children
    for process in psutil.process_iter(["cmdline"]):
        assert LEFT_OVER not in (process.info["cmdline"] or [])


def contents(folder: Path) -> Mapping[Path, str]:
    """Return a hash of each file of the course, its lessons, and those in a folder."""
    course = Path(course_lib.__file__).parent
    tops = [course, course.parent / "notebooks", folder / "toy", folder / "submissions"]
    files = [path for top in tops for path in sorted(top.rglob("*")) if path.is_file()]
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not {"__pycache__", ".mypy_cache", ".ruff_cache"}.intersection(path.parts)
    }
