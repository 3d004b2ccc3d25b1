"""Merge a learner's exercise cells into the solved notebook, and run them there."""

import copy
import tempfile
from pathlib import Path

from nbformat import NotebookNode

from course_lib.workbooks.lessons import exercise_cells, key_of, tags_of, write_notebook
from course_lib.workbooks.nbval_run import Outcome, run_nbval
from course_lib.workbooks.progress_bar import CellEnded

IMPORT_CHECK = "from course_lib.checks import check\n"  # whatever the learner calls `check`


def run_exercises(
    reference: NotebookNode,
    learner: NotebookNode,
    keys: list[str],
    timeout_s: float,
    ended: CellEnded,
) -> dict[str, Outcome]:
    """Run the exercises; return their cells' outcomes by cell id.

    An exercise that ends the kernel is left out when those behind it run in a second round.
    """
    outcomes: dict[str, Outcome] = {}
    while keys:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "merged.ipynb"
            write_notebook(merge(reference, learner, keys), path)
            latest = run_nbval(path, timeout_s, ended)
        outcomes |= latest
        last = list(latest)[-1].partition("-")[2]
        unseen = [key for key in keys if key != last and f"check-{key}" not in latest]
        keys = unseen if last in keys else []
    return outcomes


def merge(reference: NotebookNode, learner: NotebookNode, keys: list[str]) -> NotebookNode:
    """Return the solved notebook with the learner's cells for `keys`, up to their last check.

    The other exercises, and what is for instructors, are left out.
    """
    merged = copy.deepcopy(reference)
    written = exercise_cells(learner)
    merged.cells = [cell for cell in merged.cells if _takes_part(cell, keys)]
    for cell in merged.cells:
        if "exercise" in tags_of(cell):
            cell.source = written[key_of(cell)][0].source
        elif key_of(cell):
            cell.source = IMPORT_CHECK + cell.source
        if "check" not in tags_of(cell):
            cell.outputs, cell.execution_count = [], None
    while merged.cells and not key_of(merged.cells[-1]):
        merged.cells.pop()
    return merged


def _takes_part(cell: NotebookNode, keys: list[str]) -> bool:
    is_ours = key_of(cell) in keys if key_of(cell) else "instructor-only" not in tags_of(cell)
    return cell.cell_type == "code" and is_ours
