"""Run a merged notebook by nbval: what the grading starts in the sandbox. It judges nothing.

`python -m course_tools.grading.inside NOTEBOOK SECONDS OUT` writes the outcome of each cell into
`outcomes.json` in the folder OUT, where the check cells write what they observed.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from course_lib.core.files import write_whole
from course_lib.workbooks.nbval_run import SHOWN, Outcome, run_nbval

OUTCOMES = "outcomes.json"


def main(notebook: str, timeout_s: str, out: str) -> None:
    """Run it; write down the outcomes so far after every cell."""
    outcomes: dict[str, Outcome] = {}
    path = Path(out, OUTCOMES)

    def write(*_: int) -> None:
        told = {name: asdict(cut(outcome)) for name, outcome in outcomes.items()}
        write_whole(path, json.dumps(told))

    write()
    with tempfile.TemporaryDirectory() as scratch:
        run_nbval(Path(shutil.copy(notebook, scratch)), float(timeout_s), write, outcomes)


def cut(outcome: Outcome) -> Outcome:
    """Return an outcome with the beginning of its texts."""
    message, printed = outcome.message[:SHOWN], outcome.printed[:SHOWN]
    return replace(outcome, message=message, printed=printed)


if __name__ == "__main__":
    main(*sys.argv[1:])
