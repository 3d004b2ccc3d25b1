"""`course assignment export`: what other platforms take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from course_lib.core import CourseError
from course_lib.core.files import write_result
from course_lib.core.plain_text import one_line


class Platform(StrEnum):
    """The platforms that an assignment, or its grades, can be exported to."""

    GRADESCOPE = "gradescope"
    GITHUB = "github-classroom"
    NBGRADER = "nbgrader"
    CANVAS = "canvas"
    MOODLE = "moodle"


def export(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The assignment, such as hw1.")],
    to: Annotated[Platform, typer.Option("--to", help="Where to.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: `export` in its folder.")
    ] = None,
    grades: Annotated[
        Path, typer.Option(metavar="DIR", help="Of course grade; for Canvas and Moodle.")
    ] = Path("grades"),
    roster: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="What Canvas or Moodle has exported, to be filled in."),
    ] = None,
    column: Annotated[
        str, typer.Option(help="Canvas: the assignment's column. Default: its title.")
    ] = "",
    trust: Annotated[
        bool, typer.Option("--trust", help="Gradescope: grade where bubblewrap cannot work, too.")
    ] = False,
) -> None:
    """Export an assignment to a platform, or its grades in the form that the platform imports.

    \b
    course assignment export hw1 --to gradescope
    course assignment export hw1 --to canvas --grades grades --roster canvas.csv
    """
    from course_lib.workbooks.assignment import find_assignment

    folder = find_assignment(name)
    there = out or folder / "export"
    if to in (Platform.CANVAS, Platform.MOODLE):
        if roster is None:
            raise CourseError(f"need what {to} has exported, to fill it in. Try --roster FILE.")
        _fill_in(to, folder, there, grades, roster, column)
        return
    for path in _for_platform(to, folder, there, trust=trust):
        print(path)


def _for_platform(to: Platform, folder: Path, out: Path, *, trust: bool) -> list[Path]:
    """Write what a platform grades with; return the paths."""
    from course_tools.platforms.bundle import autograder_files, write_autograder, write_classroom
    from course_tools.platforms.for_nbgrader import write_for_nbgrader

    if to == Platform.GITHUB:
        return write_classroom(folder, out)
    if to == Platform.NBGRADER:
        return write_for_nbgrader(folder, out)
    path = out / f"{folder.resolve().name}-gradescope.zip"
    write_autograder(path, autograder_files(folder, trust=trust))
    return [path]


def _fill_in(
    to: Platform, folder: Path, out: Path, grades: Path, roster: Path, column: str
) -> None:
    """Fill the platform's own table in with grades; say who is not in it."""
    from course_lib.workbooks.assignment import read_assignment
    from course_tools.platforms.grade_table import TABLES, read_totals

    assignment = read_assignment(folder)
    table, strangers = TABLES[to](roster, read_totals(grades), column or assignment.title)
    path = out / f"{assignment.name}-{to}.csv"
    write_result(path, table)
    print(path)
    if strangers:
        print(f"Not in {roster}: {', '.join(map(one_line, strangers))}")
