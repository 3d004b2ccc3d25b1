"""The commands of `course` that instructors have, and students' copies of the course do not."""

import typer

from course_tools.commands.assignment_commands import add_assignment_commands
from course_tools.commands.grade_command import add_grade_command


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    add_assignment_commands(app)
    add_grade_command(app)
