"""`course grade`: the submissions of a class, each judged in a sandbox of its own."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from course_lib.cluster.commands import plain_table
from course_lib.core import CourseError
from course_lib.core.course_files import is_installed
from course_lib.core.plain_text import one_line

if TYPE_CHECKING:  # imported where they are used: `course --help` should not wait for Jupyter
    from course_lib.grading.graded import Graded
    from course_lib.grading.sandbox import Sandbox
    from course_lib.grading.submission import HandedIn
    from course_lib.grading.task import GradingTask

KINDS = "bubblewrap, namespaces, other uid or same uid"


def add_grade_command(app: typer.Typer) -> None:
    """Add `grade` to the command line."""
    app.command()(grade)


TaskName = Annotated[
    str,
    typer.Option(
        "--assignment",
        metavar="NAME",
        help="An assignment (hw1), its folder, or a lesson. Default: that of most submissions.",
    ),
]


def grade(
    folder: Annotated[Path, typer.Argument(help="Folder of the submissions.")],
    name: TaskName = "",
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for gradebook and reports.")
    ] = Path("grades"),
    jobs: Annotated[
        int, typer.Option(min=0, help="Submissions graded at the same time; 0: one per CPU core.")
    ] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="Time limit of a cell, in seconds.")
    ] = 60,
    kind: Annotated[
        str, typer.Option("--sandbox", metavar="KIND", help=f"{KINDS}. Default: the best.")
    ] = "",
) -> None:
    """Grade the submissions of a class. The exit code is 0 if all of them could be judged.

    A submission that an earlier run has graded is not run again, unless it has changed.
    """
    _demand_clone()
    from course_lib.grading.class_run import grade_class, graders, num_jobs, write_reports
    from course_lib.grading.gradebook import Gradebook
    from course_lib.grading.submission import find_submissions

    task = _task(name, folder)
    submissions = find_submissions(folder, task.name)
    if not submissions:
        raise CourseError(f"{folder}: need notebooks (.ipynb) or zips of them; found none.")
    sandbox = _sandbox(kind)
    with (
        Gradebook(out, task.points) as book,
        graders(task, sandbox, jobs or num_jobs(), timeout_s) as made,
        _bar(f"{task.name}, submissions", len(submissions)) as one_more,
    ):
        try:
            grade_class(made, submissions, book, lambda _: one_more())
        except KeyboardInterrupt:
            kept = f"stopped; {len(book.rows)} of {len(submissions)} submissions are judged"
            print(f"{kept}. Type the same command to go on.", file=sys.stderr)
            raise
    overview = write_reports(task, book)
    _show(task, book.rows)
    print(f"\n{book.folder / 'gradebook.csv'}, feedback for each student, and {overview}")
    raise typer.Exit(0 if all(graded.is_judged for graded in book.rows) else 1)


def _demand_clone() -> None:
    """Raise CourseError for a wheel: its solutions lie where a submission may read them."""
    if is_installed():
        raise CourseError(
            "course grade: expected a clone of the course; got an installed package, whose "
            "solutions a submission could read. Try git clone, make environment, and again there."
        )


def _sandbox(kind: str) -> "Sandbox":
    """Return the sandbox of a kind, or the best; tell what it does not protect."""
    from course_lib.grading.sandbox import find_sandbox

    try:
        sandbox = find_sandbox(kind)
    except (ValueError, RuntimeError) as error:
        raise CourseError(str(error)) from None
    if sandbox.warning:
        print(f"{sandbox.kind}: {sandbox.warning}", file=sys.stderr)
    return sandbox


@contextmanager
def _bar(what: str, count: int) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr while the block runs; call what it yields when one more is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from course_lib.train.progress import terminal_bar

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn())
    with terminal_bar(*columns, TimeRemainingColumn()) as bar:
        shown = bar.add_task(what, total=count)
        yield lambda: bar.advance(shown)


def _task(name: str, folder: Path) -> "GradingTask":
    """Return what is graded: the assignment or lesson of this name, else what most notebooks are.

    Raises: CourseError where there is none
    """
    from course_lib.grading.assignment import find_assignment
    from course_lib.grading.submission import find_submissions
    from course_lib.grading.task import task_of_assignment, task_of_lesson
    from course_lib.notebooks.lessons import find_folder, find_lesson

    if not folder.is_dir():
        raise CourseError(f"{folder}: need a folder of submissions; there is none.")
    name = name or _most_common(find_submissions(folder, ""))
    try:
        lesson = find_lesson(name, find_folder())
    except CourseError as no_lesson:
        try:
            assignment = find_assignment(name)
        except CourseError as none:
            raise CourseError(f"{none} Or a lesson: {no_lesson}") from None
        return task_of_assignment(assignment)
    return task_of_lesson(lesson)


def _most_common(submissions: "list[HandedIn]") -> str:
    from course_lib.notebooks.learner_work import built_from

    names = Counter[str]()
    for submission in submissions:
        with suppress(CourseError):
            names[str(built_from(submission.notebook()).get("lesson", ""))] += 1
    if not names:
        raise CourseError("need notebooks of this course to see what they are. Try --assignment.")
    return names.most_common(1)[0][0]


def _show(task: "GradingTask", rows: "list[Graded]") -> None:
    """Print a row a submission."""
    table = plain_table("student", "points", "exercises")
    for graded in rows:
        counts = Counter(graded.status(key) for key in task.points)
        words = ", ".join(f"{count} {status}" for status, count in counts.items())
        words = one_line(graded.problem) if graded.problem else words
        total = graded.total(task.points)
        points = "" if total is None else f"{total:g} of {sum(task.points.values()):g}"
        table.add_row(Text(one_line(graded.student)), points, Text(words))
    Console().print(table)
