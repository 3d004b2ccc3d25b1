"""The folder of the lessons: beside course_lib in a clone, inside it where a wheel was installed.

`setup.py` puts `notebooks`, `cluster` and the pages for learners into the wheel, in a folder that a
clone does not have.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
BROUGHT = PACKAGE / "course_files"


def is_installed() -> bool:
    """Return whether this is an installed wheel rather than a clone of the course."""
    return BROUGHT.is_dir()


def course_folder() -> Path:
    """Return the folder that holds `notebooks` and `cluster`."""
    return BROUGHT if is_installed() else PACKAGE.parent
