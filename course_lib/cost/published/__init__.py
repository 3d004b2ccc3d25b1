"""Tables of published measurements, each row with its source: what a laptop can only emulate.

`rows("bandwidth")` are the rows of `bandwidth.csv` beside this file. Numbers are as they were
printed: conventions (FLOP with or without recomputation, GB or GiB) stand in the columns.
"""

import csv
from pathlib import Path

from course_lib.core.errors import CourseError

FOLDER = Path(__file__).parent


def tables() -> list[str]:
    """Return the names of the tables."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a published table; `source` says where each was read.

    Raises: CourseError for a table that is not there
    """
    if name not in tables():
        raise CourseError(f"published: need one of {', '.join(tables())}; got {name!r}.")
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
