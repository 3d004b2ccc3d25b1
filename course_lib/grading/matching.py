"""Find exercise cells whose marks another editor has deleted, by what they define."""

import copy
import re
from collections.abc import Mapping

from nbformat import NotebookNode

from course_lib.notebooks.lessons import exercise_cells, key_of

DEFINED = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.MULTILINE)
FOUND = "Its cell had lost its mark, and was found by what it defines."


def with_marks(
    notebook: NotebookNode, stubs: Mapping[str, str], checks: Mapping[str, str]
) -> tuple[NotebookNode, dict[str, str]]:
    """Return a notebook in which lost marks are back, and by key a note on each such exercise.

    A cell without a mark is an exercise's if it is the only one that defines all that the stub
    does, and no cell has the mark of that exercise. A check is found by its text.
    """
    notebook, notes = copy.deepcopy(notebook), dict[str, str]()
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and not key_of(cell)]
    has_mark, has_check = exercise_cells(notebook), exercise_cells(notebook, "check")
    for key, text in stubs.items():
        names = set(DEFINED.findall(text))
        cells = [cell for cell in code if names and names <= set(DEFINED.findall(cell.source))]
        if key not in has_mark and len(cells) == 1:
            cells[0].metadata = NotebookNode(tags=["exercise"], exercise=key)
            notes[key] = FOUND
    for key, text in checks.items():
        cells = [cell for cell in code if cell.source.strip() == text.strip()]
        if key not in has_check and len(cells) == 1:
            cells[0].metadata = NotebookNode(tags=["check"], exercise=key)
    return notebook, notes
