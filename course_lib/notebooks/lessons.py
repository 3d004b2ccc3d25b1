"""Find a lesson's files; read notebooks, and write them whole or not at all."""

import hashlib
import warnings
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.core import CourseError
from course_lib.core.files import whole_file


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
        return self.folder / "source" / f"{self.name}.py"

    @property
    def student(self) -> Path:
        return self.folder / f"{self.name}.ipynb"

    @property
    def solved(self) -> Path:
        return self.folder / "solved" / f"{self.name}.ipynb"


def find_folder() -> Path:
    """Return the course's folder `notebooks`: below the current folder, else beside course_lib."""
    here = Path.cwd()
    for parent in (here, *here.parents):
        if (parent / "notebooks" / "source").is_dir():
            return parent / "notebooks"
    return Path(__file__).parents[2] / "notebooks"


def all_lessons(folder: Path) -> list[Lesson]:
    """Return every lesson that has a source, in the order of their numbers."""
    return [Lesson(path.stem, folder) for path in sorted((folder / "source").glob("[0-9]*_*.py"))]


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
    """Return the notebook in a file, as format 4.5.

    Raises: CourseError where the file is missing, empty or no notebook.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise CourseError(f"{path}: need a notebook; it cannot be read ({reason}).") from None
    if not text.strip():
        raise CourseError(f"{path}: the file is empty. Save the notebook in JupyterLab (Ctrl+S).")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without an id
            return _with_ids(nbformat.reads(text, as_version=4))
    except (ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        first = f"{error}\n".splitlines()[0][:80] or type(error).__name__
        raise CourseError(f"{path}: need a notebook; this is none ({first}).") from None


def _with_ids(notebook: NotebookNode) -> NotebookNode:
    """Give every cell an id; other tools leave them out."""
    for number, cell in enumerate(notebook.cells):
        cell.setdefault("id", f"lesson-{short_hash(cell.source)}-{number}")
    notebook.nbformat_minor = 5
    return notebook


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook whole or not at all."""
    with whole_file(path, sync=True) as file:
        file.write((nbformat.writes(notebook) + "\n").encode())


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
