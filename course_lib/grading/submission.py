"""The submissions in a folder: whose they are, and the notebook in each."""

import hashlib
import re
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from course_lib.core import CourseError
from course_lib.notebooks.lessons import read_notebook

MOST_BYTES = 64 * 2**20  # of a zip's notebook
KINDS = (".ipynb", ".zip")


@dataclass(frozen=True)
class HandedIn:
    """One file that was handed in, and whose it is by its place: `ann/hw1.ipynb`, `hw1-ann.zip`."""

    student: str
    path: Path

    def digest(self, task: str) -> str:
        """Return a hash of the file and of what it is graded for."""
        content = hashlib.sha256(f"{task}\0{self.student}\0".encode(errors="replace"))
        try:
            with self.path.open("rb") as file:
                while block := file.read(2**20):
                    content.update(block)
        except OSError as error:
            content.update(str(error).encode())
        return content.hexdigest()

    def notebook(self) -> NotebookNode:
        """Return the notebook in it.

        Raises: CourseError where it cannot be read, is a link, or a zip has none or several
        """
        if self.path.is_symlink():
            raise CourseError(f"{self.path}: need a file; this is a link, maybe to another's work.")
        if self.path.suffix.lower() != ".zip":
            return read_notebook(self.path)
        with tempfile.TemporaryDirectory(prefix="grading-") as scratch:
            copy = Path(scratch, "submission.ipynb")
            copy.write_bytes(_from_zip(self.path))
            try:
                return read_notebook(copy)
            except CourseError as error:
                raise CourseError(str(error).replace(str(copy), str(self.path))) from None


def _from_zip(path: Path) -> bytes:
    """Return the one notebook in a zip, without trust in what the zip says of its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [one for one in archive.infolist() if _is_notebook(one.filename)]
            if len(names) != 1:
                raise CourseError(f"{path}: need a zip with one notebook; got {len(names)}.")
            with archive.open(names[0]) as file:
                content = file.read(MOST_BYTES + 1)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CourseError(f"{path}: need a zip with a notebook; got: {reason}.") from None
    if len(content) > MOST_BYTES:
        raise CourseError(f"{path}: need a notebook of at most {MOST_BYTES // 2**20} MiB.")
    return content


def _is_notebook(name: str) -> bool:
    parts = name.split("/")
    hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
    return name.lower().endswith(".ipynb") and not hidden


def find_submissions(folder: Path, assignment: str) -> list[HandedIn]:
    """Return every notebook and zip in a folder, sorted; never hidden ones or solved ones."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in KINDS and path.is_file() and not _is_hidden(path, folder)
    ]
    return [HandedIn(_student(path, folder, assignment), path) for path in found]


def _is_hidden(path: Path, folder: Path) -> bool:
    parts: Sequence[str] = path.relative_to(folder).parts
    return any(part.startswith((".", "__MACOSX")) or part == "solved" for part in parts)


def _student(path: Path, folder: Path, assignment: str) -> str:
    """Return whose a file is: its first folder's name, else its own without what is no name.

    `hw1-ann.zip` and `ann.ipynb` are ann's, `hw1-ann (1).zip` too, and so is Canvas's
    `ann_LATE_12_345_hw1.ipynb`.
    """
    parts = path.relative_to(folder).parts
    if len(parts) > 1:
        return parts[0]
    stem = re.sub(r" \(\d+\)$", "", path.stem)
    if canvas := re.match(r"([^_]+)_(?:LATE_)?\d+_\d+_.", stem):
        return canvas[1]
    name = re.escape(assignment)
    return re.sub(rf"^{name}[-_ ]+|[-_ ]+{name}$", "", stem) or stem
