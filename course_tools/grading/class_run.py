"""Grade a class: all submissions in a folder, several at a time, each row written at once.

A run that is cut off goes on where it was, and a later run grades only what has changed.
"""

import os
import queue
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from pathlib import Path

from course_lib.core import CourseError
from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.bare_course import copy_bare
from course_tools.grading.feedback import write_feedback
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.graded import Graded
from course_tools.grading.grader import Grader, RunGroup, Turns
from course_tools.grading.sandbox import Sandbox
from course_tools.grading.similarity import similar
from course_tools.grading.similarity_report import write_similarity
from course_tools.grading.submission import HandedIn
from course_tools.grading.task import GradingTask

Told = Callable[[Graded], None]


@contextmanager
def graders(
    task: GradingTask, sandbox: Sandbox, count: int, timeout_s: float
) -> Iterator[list[Grader]]:
    """Make graders of one task; end them with the block."""
    groups, turns = list[RunGroup](), Turns(count)
    made = [Grader(task, sandbox, groups, timeout_s, turns) for _ in range(count)]
    try:
        yield made
    finally:
        for grader in made:
            grader.close()


@contextmanager
def proved(grader: Grader) -> Iterator[None]:
    """Put the exercises into groups whose right answers are right; copies of the course for each.

    So a machine that cannot judge is never anybody's fault. In a copy, what the library has of its
    exercises raises; an exercise whose own check needs that comes into a later group.

    Raises: CourseError where right answers are not right
    """
    task, groups = grader.task, list[RunGroup]()
    with tempfile.TemporaryDirectory(prefix="grading-") as name:
        Path(name).chmod(0o755)  # the sandbox reads it as another user
        while left := [key for key in task.checks if all(key not in one.keys for one in groups)]:
            groups.append(_first_group(grader, left, Path(name, str(len(groups)))))
        grader.groups[:] = groups  # which all graders share
        yield


def _first_group(grader: Grader, left: Sequence[str], scratch: Path) -> RunGroup:
    """Return a group of these exercises whose right answers are right together.

    Raises: CourseError where there is none
    """
    task, problems = grader.task, list[CourseError]()
    plain = [key for key in left if not task.library([key])]
    tries = dict.fromkeys(tuple(keys) for keys in (left, plain, left[:1]) if keys)
    for number, keys in enumerate(tries):
        course = scratch / str(number)
        copy_bare(course, task.library(keys), None if task.is_lesson else task.lesson)
        own = {key: text for key, text in task.solutions().items() if key in keys}
        try:
            found = grader.verdicts_in(RunGroup(keys, course), own, "")
        except CourseError as error:  # where a lesson's own cells need what the copy has not
            problems.append(error)
            continue
        if right := tuple(key for key in keys if found[key].status == "right"):
            return RunGroup(right, course)
        problems.append(CourseError(_not_right(task, list(found.values()))))
    raise problems[0]


def _not_right(task: GradingTask, found: Sequence[Verdict]) -> str:
    wrong = "; ".join(f"{one.key} ({one.status}: {one.detail})" for one in found)
    return (
        f"{task.name}: need right answers to be right before a class is judged; on this machine "
        f"these are not: {wrong}. Is it too slow? Try --timeout or --jobs 1."
    )


def grade_class(
    made: Sequence[Grader], submissions: Sequence[HandedIn], book: Gradebook, told: Told
) -> list[Graded]:
    """Grade the submissions that the gradebook does not know yet; return all, in their order.

    `told` is called with each as soon as it is in the gradebook. On Ctrl-C, everything that was
    started has ended, what was judged is kept, and every file has a row.
    """
    task = made[0].task
    digest = task.digest
    digests = {one: one.digest(digest) for one in submissions}
    earlier = {one: _known(book, one, digests[one]) for one in submissions}
    found = {one: known for one, known in earlier.items() if known and known.is_judged}
    for graded in found.values():
        book.add(graded)
        told(graded)
    waiting = [one for one in submissions if one not in found]
    if waiting:
        print(
            f"{task.name}: first its {len(task.checks)} right answers run, to see that this "
            f"machine can judge; then {len(waiting)} submissions, {len(made)} at a time.",
            file=sys.stderr,
            flush=True,
        )
    try:
        with proved(made[0]) if waiting else nullcontext():
            found |= _graded(made, waiting, digests, book, told)
    finally:  # where the run ends early, the other files have a row, too
        there = {graded.path for graded in book.rows}
        for one in waiting:
            if str(one.path) not in there:
                book.add(earlier[one] or _not_reached(one, task, digests[one]))
    return [found[one] for one in submissions]


def _not_reached(submission: HandedIn, task: GradingTask, digest: str) -> Graded:
    """Return the row of a file that a run has not come to."""
    return Graded(
        student=submission.student,
        path=str(submission.path),
        assignment=task.name,
        verdicts=(),
        digest=digest,
        problem="not judged: the grading ended before.",
    )


def _graded(
    made: Sequence[Grader],
    waiting: Sequence[HandedIn],
    digests: Mapping[HandedIn, str],
    book: Gradebook,
    told: Told,
) -> dict[HandedIn, Graded]:
    """Grade submissions, as many at a time as there are graders."""
    found: dict[HandedIn, Graded] = {}
    free: queue.Queue[Grader] = queue.Queue()
    for grader in made:
        free.put(grader)

    def grade(submission: HandedIn) -> Graded:
        grader = free.get()
        try:
            return grader.grade(submission, digests[submission])
        finally:
            free.put(grader)

    with ThreadPoolExecutor(len(made)) as pool:
        running = {pool.submit(grade, one): one for one in waiting}
        try:
            for ended in as_completed(running):
                found[running[ended]] = ended.result()
                book.add(ended.result())
                told(ended.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            made[0].sandbox.stop()
            for grader in made:
                grader.judge.kill()
            raise
    return found


def _known(book: Gradebook, submission: HandedIn, digest: str) -> Graded | None:
    """Return the row of an earlier run, where it is of the same file for the same task."""
    known = book.known(digest)
    return known if known and known.path == str(submission.path) else None


def num_jobs() -> int:
    """Return how many submissions are graded at a time when nobody says it."""
    return max(1, len(os.sched_getaffinity(0)))


def write_reports(task: GradingTask, book: Gradebook) -> Path:
    """Write what is beside the gradebook: a page a student, and what is alike; return the overview.

    Raises: CourseError where a file cannot be written
    """
    judged = [graded for graded in book.rows if graded.code]
    names = {f"{one.student} ({Path(one.path).name})": one for one in judged}
    submissions = {name: one.code for name, one in names.items()}
    students = {name: one.student for name, one in names.items()}
    sources = {"the course's solution": task.solutions(), "the library": task.library_code()}
    pairs = similar(submissions, sources, task.stubs, students=students)
    write_similarity(book.folder, pairs)
    return write_feedback(book.folder, book.rows, task.points, task.title)


def add_absent(students: Sequence[str], task: GradingTask, book: Gradebook) -> list[str]:
    """Add a row for each student of the class without a file; return who is not in the class."""
    here = {graded.student for graded in book.rows}
    for student in students:
        if student not in here:
            book.add(
                Graded(
                    student=student,
                    path="",
                    assignment=task.name,
                    verdicts=(),
                    digest=f"{task.digest} {student}",
                    problem="Nothing was handed in.",
                )
            )
    return sorted(here - set(students)) if students else []
