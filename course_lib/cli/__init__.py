"""The `course` command."""

from course_lib.cli.commands import main

__all__ = ["main"]
