"""`python -m course_lib.cli` is the `course` command."""

from course_lib.cli import main

main()
