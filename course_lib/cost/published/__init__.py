"""Tables of published measurements, each row with its source: what a laptop can only emulate.

`rows("bandwidth")` are the rows of `bandwidth.csv` beside this file. Numbers are as they were
printed, or read off a figure where `source` says so: conventions (FLOP with or without
recomputation, GB or GiB) stand in the columns.
"""

import csv
from pathlib import Path

from course_lib.core.errors import CourseError

FOLDER = Path(__file__).parent


def tables() -> list[str]:
    """Return the names of the tables."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))


def playbook_data_parallel() -> dict[int, float]:
    """Return tokens/s per GPU, by number of H100s, of a 1.3B model under plain data parallelism.

    All runs share 256 sequences of 4,096 tokens in micro-batches of one sequence (ZeRO stage 0).
    Source: Tazi et al. 2025, The Ultra-Scale Playbook, the benchmark runs of `ultrascale.csv`
    """
    plain = {"model": "1B", "tp": "1", "pp": "1", "zero": "0", "mbs": "1", "status": "ok"}
    runs = [row for row in rows("ultrascale") if plain.items() <= row.items()]
    return {int(row["dp"]): float(row["tok_s_gpu"]) for row in runs}


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a published table; `source` says where each was read.

    Raises: CourseError for a table that is not there
    """
    if name not in tables():
        raise CourseError(f"published: need one of {', '.join(tables())}; got {name!r}.")
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
