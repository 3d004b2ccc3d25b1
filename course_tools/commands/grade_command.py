"""`course grade`: the submissions of a class, each judged in a sandbox of its own."""

import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from course_lib.core import CourseError
from course_lib.core.course_files import is_installed
from course_lib.core.plain_text import one_line
from course_lib.jobs.commands import plain_table

if TYPE_CHECKING:  # imported where they are used: `course --help` should not wait for Jupyter
    from course_tools.grading.gradebook import Gradebook
    from course_tools.grading.graded import Graded
    from course_tools.grading.sandbox import Sandbox
    from course_tools.grading.submission import HandedIn
    from course_tools.grading.task import GradingTask


def add_grade_command(app: typer.Typer) -> None:
    """Add `grade` to the command line."""
    app.command()(grade)
    app.command()(term)


TaskName = Annotated[
    str,
    typer.Option(
        "--assignment",
        metavar="NAME",
        help="An assignment (hw1), its folder, or a lesson. Default: that of most submissions.",
    ),
]


Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder for gradebook and reports.")
]
Jobs = Annotated[
    int, typer.Option(min=0, help="Submissions graded at the same time; 0: one per CPU core.")
]
CellTimeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Time limit of a cell, in seconds.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Grade without isolation where bubblewrap cannot work."),
]
Students = Annotated[
    Path | None,
    typer.Option(metavar="CSV", help="The class: who handed in nothing has a row, too."),
]


def grade(
    folder: Annotated[Path, typer.Argument(help="Folder of the submissions.")],
    name: TaskName = "",
    out: Out = Path("grades"),
    jobs: Jobs = 0,
    timeout_s: CellTimeout = 60,
    trust: Trust = False,
    students: Students = None,
) -> None:
    """Grade the submissions of a class. The exit code is 0 if all of them could be judged.

    A submission that an earlier run has graded is not run again, unless it has changed.
    """
    _demand_clone()
    from course_tools.grading import class_run
    from course_tools.grading.gradebook import Gradebook
    from course_tools.grading.release import read_class
    from course_tools.grading.sandbox import WARNING, find_sandbox
    from course_tools.grading.submission import find_submissions

    task = _task(name, folder)
    listed = read_class(students) if students else []
    submissions = find_submissions(folder, task.name)
    if not submissions:
        raise CourseError(f"{folder}: need notebooks (.ipynb) or zips of them; found no file.")
    sandbox = find_sandbox(trust=trust)
    if sandbox.trusts:
        print(WARNING, file=sys.stderr)
    num_jobs = jobs or class_run.num_jobs()
    with Gradebook(out, task.points, task.assignment) as book:
        with (
            _stopped_by_ctrl_c(sandbox, book, len(submissions)),
            class_run.graders(task, sandbox, num_jobs, timeout_s) as made,
            _progress(task, len(submissions)) as one_more,
        ):
            class_run.grade_class(made, submissions, book, one_more)
        strangers = class_run.add_absent(listed, task, book)
    overview = class_run.write_reports(task, book)
    _show(task, book.rows)
    unknown = sorted(book.by_hand.keys() - {graded.student for graded in book.rows})
    _name_students(f"Not in {students}", strangers)
    _name_students("In by_hand.csv, and without a row", unknown)
    if book.late:
        here = (graded.student for graded in book.rows if graded.is_handed_in)
        _name_students("Counted as on time: not in times.csv", book.late.without_time(here))
    print(f"\n{book.folder / 'gradebook.csv'}, feedback for each student, and {overview}")
    raise typer.Exit(0 if all(map(_is_settled(task), book.rows)) else 1)


def term(
    folders: Annotated[
        list[Path], typer.Argument(metavar="GRADES...", help="Folders of gradings, oldest first.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for pages.")] = Path(
        "term"
    ),
) -> None:
    """Show a term so far: progress and misconceptions by student, causes and answers by exercise.

    \b
    course term grades/hw1 grades/hw2 --out term
    """
    from course_tools.grading.term import read_term, write_term

    print(write_term(read_term(folders), out))


def _demand_clone() -> None:
    """Raise CourseError for a wheel: its solutions lie where a submission may read them."""
    if is_installed():
        raise CourseError(
            "course grade: expected a clone of the course; got an installed package, whose "
            "solutions a submission could read. Try git clone, make environment, and again there."
        )


@contextmanager
def _stopped_by_ctrl_c(sandbox: "Sandbox", book: "Gradebook", count: int) -> Iterator[None]:
    """On Ctrl-C in the block, end what runs, and say so; when all of it has ended, say that."""

    def stop(*_: object) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the second one cannot make it faster
        print("stopping: ending what runs", file=sys.stderr, flush=True)
        sandbox.stop()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except KeyboardInterrupt:
        judged = sum(graded.is_judged for graded in book.rows)
        kept = f"stopped; {judged} of {count} submissions are judged"
        print(f"{kept}. Type the same command to go on.", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(task: "GradingTask", count: int) -> Iterator[Callable[["Graded"], None]]:
    """Show a bar on stderr while the block runs, or a line per submission where no terminal is.

    Call what it yields with each submission that is judged.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from course_lib.train.progress import terminal_bar

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn())
    with terminal_bar(*columns, TimeRemainingColumn()) as bar:
        shown = bar.add_task(f"{task.name}, submissions", total=count)
        numbers = iter(range(1, count + 1))

        def tell(graded: "Graded") -> None:
            bar.advance(shown)
            if bar.disable:
                words = f"{one_line(graded.student)}: {_in_words(task, graded)}"
                told = f"{next(numbers)} of {count}  {words}, {graded.seconds:.0f} s"
                print(told, file=sys.stderr, flush=True)

        yield tell


def _task(name: str, folder: Path) -> "GradingTask":
    """Return what is graded: the assignment or lesson of this name, else what most notebooks are.

    Raises: CourseError where there is none
    """
    from course_lib.workbooks.assignment import find_assignment
    from course_lib.workbooks.lessons import find_folder, find_lesson
    from course_tools.grading.submission import find_submissions
    from course_tools.grading.task import task_of_assignment, task_of_lesson

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
    from course_lib.workbooks.learner_work import built_from

    names = Counter[str]()
    for submission in submissions:
        with suppress(CourseError):
            names[str(built_from(submission.notebook()).get("lesson", ""))] += 1
    if not names:
        raise CourseError("need notebooks of this course to see what they are. Try --assignment.")
    return names.most_common(1)[0][0]


def _show(task: "GradingTask", rows: "list[Graded]") -> None:
    """Print a line a submission; below, why some are not judged, each sentence once."""
    table, why = plain_table("student", "points", "exercises"), defaultdict[str, list[str]](list)
    for graded in rows:
        total, student = graded.total(task.points), one_line(graded.student)
        points = "" if total is None else f"{total:g} of {sum(task.points.values()):g}"
        table.add_row(Text(student), points, Text(_in_words(task, graded)))
        if graded.problem and graded.is_handed_in:
            why[graded.problem.replace(f"{graded.path}: ", "")].append(student)
        for verdict in graded.verdicts:
            if graded.is_open(verdict.key):
                why[verdict.detail].append(f"{student}, {verdict.key}")
    Console().print(table)
    for sentence, who in why.items():
        print(f"\n{'; '.join(who)}:\n  {one_line(sentence)}")


def _name_students(what: str, students: list[str]) -> None:
    if students:
        print(f"\n{what}: {', '.join(map(one_line, students))}")


def _in_words(task: "GradingTask", graded: "Graded") -> str:
    """Return how many exercises have which verdict; for a file without any, what became of it."""
    if graded.problem:
        return "not judged" if graded.is_handed_in else "nothing handed in"
    counts = Counter(graded.status(key) for key in task.points)
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _is_settled(task: "GradingTask") -> Callable[["Graded"], bool]:
    """Return what says of a row that nothing in it waits for a verdict."""
    return lambda graded: not graded.is_handed_in or graded.total(task.points) is not None
