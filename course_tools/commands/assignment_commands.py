"""The commands of `course` that compose exercises and assignments, and hand them out."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from course_lib.core import CourseError
from course_lib.jobs.site_commands import plain_table
from course_tools.commands.export_command import export

assignment_app = typer.Typer(
    help="Compose an assignment from exercises, and hand it out.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AssignmentName = Annotated[
    str, typer.Argument(metavar="NAME", help="The assignment's name, such as hw1, or its folder.")
]


NewName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A name of lower-case letters and digits, such as hw1."),
]
Lessons = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="LESSON",
        help="A lesson (06_ddp), or some of its exercises (04:collectives-2,collectives-3).",
    ),
]
PointsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=N",
        help="Points of an exercise, such as collectives-2=10. Default: 1 each.",
    ),
]
Due = Annotated[
    str, typer.Option(metavar="TIME", help="Such as 2026-12-01T18:00, in your time zone.")
]
Seeded = Annotated[bool, typer.Option("--seeded", help="Draw other cases for each student.")]
AssignmentsFolder = Annotated[Path, typer.Option(help="The folder of all assignments.")]


def new(
    name: NewName,
    more: Annotated[list[str] | None, typer.Argument(metavar="[LESSON...]", hidden=True)] = None,
    lessons: Lessons = None,
    own: Annotated[bool, typer.Option("--own", help="Add an exercise of your own.")] = False,
    points: PointsOption = None,
    due: Due = "",
    title: Annotated[str, typer.Option(help="The notebook's title.")] = "",
    seeded: Seeded = False,
    folder: AssignmentsFolder = Path("assignments"),
) -> None:
    """Compose an assignment from exercises of lessons, and of your own.

    \b
    course assignment new hw1 --from 04_collectives:collectives-2,collectives-3 06_ddp
    course assignment new hw1 --from 00:ranks-1 --own --points ranks-1=5 --due 2026-12-01T18:00
    """
    from course_lib.workbooks.assignment import Assignment, due_time, kit_version
    from course_lib.workbooks.lessons import find_folder
    from course_tools.authoring.build import build
    from course_tools.grading.compose import buildable, chosen, compose

    exercises = chosen([*(lessons or ()), *(more or ())], find_folder())
    keys = [key for _, key in exercises] + ([f"{name}-1"] if own else [])
    given = _points(points or (), keys)
    assignment = Assignment(
        name=name,
        title=title or f"Assignment {name}",
        due=due_time(due) if due else None,
        items=tuple((key, given.get(key, 1.0)) for key in keys),
        seeded=seeded,
        kit=kit_version(),
    )
    made = compose(assignment, exercises, folder / name, own=own)
    if own:
        print("Fill in, from FILL IN to FILL IN (docs/authoring.md has an example):\n")
    else:
        build(buildable(folder / name), Console(highlight=False))
    for path in made:
        print(f"  {path}")
    print(f"\nHidden cases, if you like: {folder / name / 'hidden.py'}, HIDDEN = {{key: check}}.")
    print(f"Hand out:    course assignment release {folder / name}")


def _points(words: list[str] | tuple[()], keys: list[str]) -> dict[str, float]:
    """Return the points in `collectives-2=10`, `ddp-1=5,ddp-2=5`."""
    found = {}
    for word in ",".join(words).split(",") if words else ():
        key, _, value = word.partition("=")
        if key not in keys:
            raise CourseError(f"--points: need one of {', '.join(keys)}; got {key!r}.")
        try:
            found[key] = float(value)
        except ValueError:
            raise CourseError(f"--points: need a number for {key}; got {value!r}.") from None
    return found


def release(
    name: AssignmentName,
    students: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="For a seeded assignment: the class, in a column `student`."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to write. Default: `release` in the assignment's folder."
        ),
    ] = None,
) -> None:
    """Write the zip for students, in which they can check their answers. It has no solutions."""
    from course_lib.workbooks.assignment import find_assignment
    from course_tools.grading.release import read_class, release

    folder = find_assignment(name)
    there = out or folder / "release"
    listed = read_class(students) if students else []
    for path in release(folder, there, listed, Console(highlight=False)):
        print(path)


def show(name: AssignmentName) -> None:
    """Show an assignment: its exercises, points, due time and hidden cases."""
    from course_lib.checks.exercise import find_exercise
    from course_lib.checks.right_answer import at_work_in
    from course_lib.workbooks.assignment import (
        find_assignment,
        hidden_exercises,
        number,
        read_assignment,
    )
    from course_tools.grading.compose import buildable
    from course_tools.grading.part_points import demand_parts, part_names
    from course_tools.grading.release import stale_notebooks

    folder = find_assignment(name)
    assignment, lesson = read_assignment(folder), buildable(folder)
    with at_work_in(folder):
        hidden = hidden_exercises(folder)
        demand_parts(assignment, hidden)
        parts = {key: part_names(find_exercise(key), hidden) for key in assignment.keys}
    table = plain_table("exercise", "points", "parts", "")
    for key, points in assignment.items:
        given = assignment.parts.get(key, {})
        names = ", ".join(f"{one} {number(given[one])}" if given else one for one in parts[key])
        table.add_row(key, number(points), names, "and hidden cases" if key in hidden else "")
    print(f"{assignment.title}, {folder}, due {assignment.due or 'at no time'}")
    if late := assignment.late:
        grace = f"{late.grace_minutes:g} minutes of grace"
        print(f"late: {late.per_day:g} % a day, at most {late.most:g} %, {grace}")
    print("Each student has cases of their own.\n" if assignment.seeded else "")
    Console().print(table)
    for sentence in stale_notebooks(lesson):
        print(sentence)


def new_exercise(
    notebook: Annotated[str, typer.Argument(metavar="NB", help="A lesson: 04 or 04_collectives.")],
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The new exercise's key, such as collectives-7.")
    ],
    name: Annotated[
        str,
        typer.Option("--name", help="The function that a learner writes, such as mean_of_ranks."),
    ] = "",
    on_ranks: Annotated[
        bool, typer.Option("--on-ranks", help="The exercise runs on ranks.")
    ] = False,
) -> None:
    """Create an exercise to fill in: its cells, its check with planted mistakes, and its test."""
    from course_lib.workbooks.lessons import find_folder, find_lesson
    from course_tools.authoring.new_exercise import before_build
    from course_tools.authoring.new_exercise import new_exercise as begin

    lesson = find_lesson(notebook, find_folder())
    made = begin(lesson, key, name or key.replace("-", "_"), on_ranks)
    print(
        f"Fill in, from FILL IN to FILL IN (docs/authoring.md has an example):\n\n  {made.source}"
    )
    print(f"  {made.check}\n  {made.test}\n")
    print(f"Prove it:    python -m course_lib.checks {key} --show")
    if on_ranks:
        print(f"             python -m course_lib.checks {lesson.word} --freeze")
    tests = f"{key}- or {made.test.stem} or beside_checks"
    print(f'             python -m pytest tests/checks -k "{tests}"')
    print(f"Then:        make notebooks NOTEBOOKS_ARGS={notebook}")
    for sentence in before_build(lesson):
        print(f"Before that: {lesson.name}: {sentence}.")


def add_assignment_commands(app: typer.Typer) -> None:
    """Add all commands of this file to the command line."""
    for command in (new, release, show, export):
        assignment_app.command()(command)
    app.add_typer(assignment_app, name="assignment")
    app.command()(new_exercise)
