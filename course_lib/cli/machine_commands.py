"""`course start` and `course doctor`: the lessons in a folder of one's own, and this machine."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from course_lib.core import CourseError
from course_lib.core.course_files import course_folder, is_installed
from course_lib.core.plain_text import one_line

FOLDER = Path("distributed-training-course")
PARTS = ("notebooks", "cluster", "docs")


def add_machine_commands(app: typer.Typer) -> None:
    """Add `start` and `doctor` to the command line."""
    app.command()(start)
    app.command()(doctor)


def start(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to create.")] = FOLDER,
) -> None:
    """Copy the lessons of an installed course to a new folder. A clone already has them."""
    if not is_installed():
        raise CourseError(
            f"course start: expected an installed package; this is a clone, whose lessons are in "
            f"{course_folder() / 'notebooks'}. Open them there."
        )
    if folder.exists() and any(folder.iterdir()):
        raise CourseError(
            f"course start: expected no folder {one_line(str(folder))}, or an empty one; got one "
            "with files in it. Try another name: course start DIR."
        )
    solutions = shutil.ignore_patterns("solved", "source")
    for part in PARTS:
        shutil.copytree(course_folder() / part, folder / part, ignore=solutions, dirs_exist_ok=True)
    print(f"The lessons are in {one_line(str(folder / 'notebooks'))}. Begin with:")
    print(f"\n  cd {one_line(str(folder))}\n  jupyter lab notebooks/00_ranks.ipynb")


def doctor(
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Write an anonymous report, to attach to a question."
        ),
    ] = None,
) -> None:
    """Show what this machine has for running ranks, and what is missing."""
    from course_lib.core.files import check_result_path, write_whole
    from course_lib.ranks.machine import describe_machine, doctor_report

    check_result_path(report)
    machine = describe_machine()
    print(doctor_report(machine))
    if report:
        from course_lib.ranks.machine_report import machine_report

        text, num_failed = machine_report(machine)
        write_whole(report, text)
        said = f"{num_failed} of its tests failed" if num_failed else "all of its tests passed"
        print(f"\n{one_line(str(report))} holds this and more, to attach to a question: {said}.")
        print("Your name, your folders and this machine's name are left out; read it before.")
