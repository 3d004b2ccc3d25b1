"""An assignment as nbgrader takes it: the solved notebook, with nbgrader's marks on its cells."""

from pathlib import Path
from typing import Any

import nbformat
from rich.console import Console

from course_lib.core.files import write_result
from course_lib.workbooks.assignment import read_assignment
from course_lib.workbooks.lessons import read_notebook
from course_tools.authoring.build import build
from course_tools.grading.compose import buildable

CONFIG = """\
c = get_config()
c.CourseDirectory.course_id = "course"
c.ExecutePreprocessor.kernel_name = "python3"
c.ExecutePreprocessor.timeout = 120
"""


def write_for_nbgrader(folder: Path, out: Path) -> list[Path]:
    """Write source/NAME/NAME.ipynb and nbgrader_config.py into a folder; return their paths.

    Raises: CourseError where the assignment cannot be built
    """
    assignment, lesson = read_assignment(folder), buildable(folder)
    build(lesson, Console(highlight=False))
    notebook = read_notebook(lesson.solved)
    for cell in notebook.cells:
        if key := cell.metadata.get("exercise"):
            is_answer = "exercise" in cell.metadata.tags
            mark: dict[str, Any] = {"schema_version": 3, "task": False, "solution": is_answer}
            mark |= {"grade": not is_answer, "locked": not is_answer}
            mark |= {"grade_id": f"{'answer' if is_answer else 'check'}-{key}"}
            mark |= {} if is_answer else {"points": assignment.points[key]}
            cell.metadata.nbgrader = mark
    path = out / "source" / assignment.name / f"{assignment.name}.ipynb"
    config = out / "nbgrader_config.py"
    write_result(path, nbformat.writes(notebook) + "\n")
    if not config.exists():
        write_result(config, CONFIG)
    return [path, config]
