"""Run the `course` command: `python -m course_lib.cli`."""

from course_lib.cli import main

main()
