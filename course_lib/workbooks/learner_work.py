"""Find what a learner has written into a student notebook, and carry it over to every rebuild."""

import copy
from typing import Any

import nbformat
from nbformat import NotebookNode

from course_lib.workbooks.lessons import exercise_cells, key_of, short_hash, tags_of

KEPT = (
    "## Kept from an earlier version of this lesson\n\n"
    "The lesson has changed, and what follows no longer has a place in it. It is your work, so it "
    "stays here until you delete it."
)


def is_touched(notebook: NotebookNode) -> bool:
    """Whether anybody has worked in a student notebook: run, filled in, changed or added a cell."""
    ran = any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    wrote = any(is_own(cell) or _is_changed(cell) for cell in notebook.cells)
    return ran or wrote or bool(filled_in(notebook))


def is_own(cell: NotebookNode) -> bool:
    """Whether a cell is the learner's own addition and not the lesson's."""
    return not cell.get("id", "").startswith(("lesson-", "exercise-", "check-"))


def _is_changed(cell: NotebookNode) -> bool:
    """Whether the learner has edited a cell of the lesson's own; its id remembers its text."""
    is_lesson = cell.get("id", "").startswith("lesson-")
    return is_lesson and short_hash(cell.source) != cell.id.split("-")[1]


def filled_in(notebook: NotebookNode) -> dict[str, list[NotebookNode]]:
    """Return the exercise cells whose text is no longer the stub they were built with, by key."""
    stubs = built_from(notebook).get("stubs", {})
    filled = {
        key: [cell for cell in cells if short_hash(cell.source) != stubs.get(key)]
        for key, cells in exercise_cells(notebook).items()
    }
    return {key: cells for key, cells in filled.items() if cells}


def work_in(notebook: NotebookNode) -> set[str]:
    """Return the texts a learner has written: filled-in exercises and cells of their own."""
    filled = {cell.source for cells in filled_in(notebook).values() for cell in cells}
    return filled | {cell.source for cell in notebook.cells if is_own(cell)}


def built_from(notebook: NotebookNode) -> dict[str, Any]:
    """Return what the build noted in a notebook: `lesson`, `build` (a hash), `stubs` (hashes)."""
    noted = notebook.metadata.get("course", {})
    kinds = {"lesson": str, "build": str, "stubs": dict}
    noted = noted if isinstance(noted, dict) else {}
    return {name: noted[name] for name in kinds if isinstance(noted.get(name), kinds[name])}


def carry_over(new: NotebookNode, old: NotebookNode) -> tuple[NotebookNode, list[str]]:
    """Return the new student notebook with the work of the old one, and sentences on what was done.

    Filled-in exercises keep their text under their key; the learner's own cells stay behind the
    cell they stood behind; what has no place any more goes to the end, under a heading.
    """
    notebook, told = copy.deepcopy(new), []
    work = filled_in(old)
    homeless: list[NotebookNode] = []
    for key, (cell, *_) in exercise_cells(notebook).items():
        if key in work:
            cell.source = work[key][0].source
            homeless += work.pop(key)[1:]
    homeless += [cell for cells in work.values() for cell in cells]
    _put_own_cells(notebook, old)
    if homeless:
        _put_at_end(notebook, homeless)
        keys = ", ".join(sorted({key_of(cell) for cell in homeless}))
        told.append(f"{keys}: no place in the lesson any more; kept at its end")
    changed = sum(map(_is_changed, old.cells))
    if changed:
        told.append(f"{changed} changed lesson cells: set back; yours are in the backup")
    return notebook, told


def _put_own_cells(notebook: NotebookNode, old: NotebookNode) -> None:
    """Put the learner's own cells behind the lesson cells they followed."""
    here = {cell.id for cell in notebook.cells}
    anchor = ""
    groups: dict[str, list[NotebookNode]] = {}
    for cell in old.cells:
        if is_own(cell) and "exercise" not in tags_of(cell):
            groups.setdefault(anchor, []).append(_fresh(cell))
        elif cell.id in here:
            anchor = cell.id
    cells = groups.get("", [])
    for cell in notebook.cells:
        cells = [*cells, cell, *groups.get(cell.id, [])]
    notebook.cells = cells


def _put_at_end(notebook: NotebookNode, cells: list[NotebookNode]) -> None:
    """Add exercise cells without a place as the learner's own cells, under a heading."""
    if not any(cell.source == KEPT for cell in notebook.cells):
        notebook.cells.append(nbformat.v4.new_markdown_cell(KEPT))
    for cell in cells:
        text = f"# your work on {key_of(cell)}\n{cell.source}"
        notebook.cells.append(nbformat.v4.new_code_cell(text))


def _fresh(cell: NotebookNode) -> NotebookNode:
    """Return a copy of a cell without its outputs."""
    cell = copy.deepcopy(cell)
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
    return cell
