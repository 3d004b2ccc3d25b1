"""Find a lesson's files; read notebooks, and write them whole or not at all."""

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4.rwbase import rejoin_lines

from course_lib.core import CourseError
from course_lib.core.course_files import course_folder, is_installed
from course_lib.core.files import (
    HALF_A_PAIR,
    LARGEST_BYTES,
    OLDER,
    not_one,
    parse_json,
    read_text,
    whole_file,
)

NOTEBOOK = "a notebook"
CLEAR = "Try Edit, Clear Outputs of All Cells, or an older copy of it."  # where they may be why
CELL_TYPES = ("code", "markdown", "raw")
CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Lesson:
    """One lesson, `04_collectives`, in a folder of notebooks."""

    name: str
    folder: Path

    @property
    def word(self) -> str:
        """The idea, which is also the library module: `collectives`."""
        return self.name.partition("_")[2]

    @property
    def source(self) -> Path:
        return _beside(self.folder, f"source/{self.name}.py")

    @property
    def student(self) -> Path:
        return self.folder / f"{self.name}.ipynb"

    @property
    def solved(self) -> Path:
        return _beside(self.folder, f"solved/{self.name}.ipynb")


def _beside(folder: Path, name: str) -> Path:
    """Return a file beside the notebooks; where they have none, the one that a wheel brought."""
    own, brought = folder / name, course_folder() / "notebooks" / name
    return brought if is_installed() and brought.exists() and not own.exists() else own


def find_folder() -> Path:
    """Return the course's folder `notebooks`: below the current folder, else beside course_lib.

    Raises: CourseError where a wheel was installed and there are no notebooks of a learner
    """
    here = Path.cwd()
    for parent in (here, *here.parents):
        folder = parent / "notebooks"
        if (folder / "source").is_dir() or (is_installed() and _has_lessons(folder)):
            return folder
    if is_installed():
        raise CourseError(
            "Expected the folder of your notebooks, here or above; got none. Try `course start`, "
            "which makes one, and go there."
        )
    return course_folder() / "notebooks"


def _has_lessons(folder: Path) -> bool:
    return any(lesson.student.is_file() for lesson in all_lessons(folder))


def all_lessons(folder: Path) -> list[Lesson]:
    """Return every lesson that has a source, in the order of their numbers."""
    sources = folder / "source"
    if is_installed() and not sources.is_dir():
        sources = course_folder() / "notebooks" / "source"
    return [Lesson(path.stem, folder) for path in sorted(sources.glob("[0-9]*_*.py"))]


def find_lesson(name: str, folder: Path) -> Lesson:
    """Return the lesson that `04`, `4`, `collectives` or `04_collectives` means.

    Raises: CourseError that lists the lessons there are.
    """
    lessons = all_lessons(folder)
    for lesson in lessons:
        number, _, word = lesson.name.partition("_")
        if name in (lesson.name, number, number.lstrip("0") or "0", word):
            return lesson
    known = ", ".join(lesson.name for lesson in lessons) or "none yet"
    raise CourseError(f"need a lesson of this course; got {name!r}. There are: {known}.")


def read_notebook(path: Path) -> NotebookNode:
    """Return the notebook in a file, as format 4.5: every cell has an id that no other cell has.

    Outputs that Jupyter could not show are left out; nobody wrote them.

    Raises: CourseError where the file is missing, too large, empty or no notebook.
    """
    is_large = path.is_file() and path.stat().st_size > LARGEST_BYTES
    text = read_text(path, NOTEBOOK, hint=CLEAR if is_large else OLDER)
    if not text.strip():
        raise CourseError(f"{path}: the file is empty. Save the notebook in JupyterLab (Ctrl+S).")
    plain = parse_json(text, path, NOTEBOOK, hint=CLEAR if HALF_A_PAIR.search(text) else OLDER)
    if why := _is_no_notebook(plain):
        raise not_one(path, NOTEBOOK, why)
    notebook = nbformat.from_dict(plain)
    for cell in notebook.cells:
        cell.source = "".join(cell.source)  # a text, or a list of its lines
        cell.setdefault("metadata", NotebookNode())
        if cell.cell_type == "code":
            found = cell.get("outputs")
            cell.outputs = list(filter(_is_output, found)) if isinstance(found, list) else []
            count = cell.get("execution_count")
            cell.execution_count = count if isinstance(count, int) else None
        attached = cell.pop("attachments", {})
        if (
            attached
            and isinstance(attached, dict)
            and all(isinstance(one, dict) for one in attached.values())
        ):
            cell.attachments = attached
    return _with_ids(rejoin_lines(notebook))


def _is_no_notebook(plain: Any) -> str:
    """Return why a JSON value is no notebook; empty for a notebook."""
    if not isinstance(plain, dict) or plain.get("nbformat") != 4:
        return "there is no nbformat 4 in it"
    if not isinstance(plain.get("metadata"), dict) or not isinstance(plain.get("cells"), list):
        return "there are no cells or no metadata in it"
    for number, cell in enumerate(plain["cells"], start=1):
        if not isinstance(cell, dict) or cell.get("cell_type") not in CELL_TYPES:
            return f"cell {number} is no {', '.join(CELL_TYPES)} cell"
        source = cell.get("source")
        lines = source if isinstance(source, list) else [source]
        if not all(isinstance(line, str) for line in lines):
            return f"cell {number} has no text"
        if not isinstance(cell.get("metadata", {}), dict):
            return f"cell {number} has no metadata"
    return ""


def _is_output(output: Any) -> bool:
    try:
        nbformat.validate(output, ref="output", version=4, relax_add_props=True)
    except (nbformat.ValidationError, ValueError, TypeError, AttributeError):
        return False
    return True


def _with_ids(notebook: NotebookNode) -> NotebookNode:
    """Give every cell an id of its own; other tools leave them out, or copy them with the cell."""
    seen = set[str]()
    for number, cell in enumerate(notebook.cells):
        if "id" not in cell:
            cell.id = f"lesson-{short_hash(cell.source)}-{number}"
        if not isinstance(cell.id, str) or not CELL_ID.fullmatch(cell.id) or cell.id in seen:
            cell.id = f"own-{short_hash(cell.source)}-{number}"
        while cell.id in seen:
            cell.id = f"own-{short_hash(cell.id)}-{number}"
        seen.add(cell.id)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook whole or not at all."""
    with whole_file(path, sync=True) as file:
        file.write((nbformat.v4.writes(notebook) + "\n").encode())


def back_up(path: Path) -> Path:
    """Copy a notebook into `.backup` beside it, under a name with the time; return the copy."""
    folder = path.parent / ".backup"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    copy, count = folder / f"{path.stem}-{stamp}{path.suffix}", 1
    while copy.exists():
        count += 1
        copy = folder / f"{path.stem}-{stamp}-{count}{path.suffix}"
    with whole_file(copy, sync=True) as file:
        file.write(path.read_bytes())
    return copy


def short_hash(text: str) -> str:
    """Return eight characters that stand for a text; blanks around it do not matter."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:8]


def key_of(cell: NotebookNode) -> str:
    """Return the exercise a code cell belongs to, by its metadata; empty for all other cells."""
    key = cell.metadata.get("exercise", "") if cell.cell_type == "code" else ""
    return key if isinstance(key, str) else ""


def tags_of(cell: NotebookNode) -> list[str]:
    """Return the tags of a cell."""
    tags = cell.metadata.get("tags", [])
    return tags if isinstance(tags, list) else []


def exercise_cells(notebook: NotebookNode, tag: str = "exercise") -> dict[str, list[NotebookNode]]:
    """The cells of each exercise key, in order; with tag `check` its check cells."""
    cells: dict[str, list[NotebookNode]] = {}
    for cell in notebook.cells:
        if key_of(cell) and tag in tags_of(cell):
            cells.setdefault(key_of(cell), []).append(cell)
    return cells
