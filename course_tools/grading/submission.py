"""The submissions in a folder: whose they are, and the notebook in each."""

import hashlib
import re
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from course_lib.core import CourseError
from course_lib.workbooks.lessons import read_notebook

MOST_BYTES = 64 * 2**20  # of a zip's notebook
MOST_NOTEBOOKS = 20  # of a zip that are looked at, for the one that is meant
KINDS = (".ipynb", ".zip")
NO_WORK = ("thumbs.db", "desktop.ini")  # what systems leave
CANVAS = re.compile(r"([^_]+)_(?:LATE_)?\d+_\d+_.")
MOODLE = re.compile(r"(.+)_(\d+)_assignsubmission_(?:file|onlinetext)_?")
IsOwn = Callable[[NotebookNode], bool]


@dataclass(frozen=True)
class HandedIn:
    """One file that was handed in, and whose it is by its place: `ann/hw1.ipynb`, `hw1-ann.zip`.

    `besides` are the other files of the student, which are neither notebooks nor zips.
    """

    student: str
    path: Path
    besides: tuple[str, ...] = ()

    def digest(self, task: str) -> str:
        """Return a hash of the file and of what it is graded for."""
        about = "\0".join([task, self.student, *self.besides])
        content = hashlib.sha256(f"{about}\0".encode(errors="replace"))
        try:
            with self.path.open("rb") as file:
                while block := file.read(2**20):
                    content.update(block)
        except OSError as error:
            content.update(str(error).encode())
        return content.hexdigest()

    def notebook(self, is_own: IsOwn = lambda _: True) -> NotebookNode:
        """Return the notebook in it; of several in a zip the one that is the assignment's own.

        Raises: CourseError where it cannot be read, is a link, or a zip has none or several
        """
        if self.path.is_symlink():
            raise CourseError(f"{self.path}: need a file; this is a link, maybe to another's work.")
        if self.path.suffix.lower() == ".ipynb":
            return read_notebook(self.path)
        if self.path.suffix.lower() != ".zip":
            what = f"a file of another kind ({self.path.suffix or 'no ending'})"
            need = "a notebook (.ipynb) or a zip with one"
            raise CourseError(f"{self.path}: need {need}; got {what}.")
        with _opened_zip(self.path) as archive:
            names = [one for one in archive.infolist() if _is_notebook(one.filename)]
            if len(names) == 1:
                return self._read(archive, names[0])
            own = list[NotebookNode]()
            for name in names[:MOST_NOTEBOOKS]:
                with suppress(CourseError):
                    own += filter(is_own, [self._read(archive, name)])
        if len(own) == 1:
            return own[0]
        of_these = f", {len(own)} of them of this assignment" if names else ""
        raise CourseError(f"{self.path}: need a zip with one notebook; got {len(names)}{of_these}.")

    def _read(self, archive: zipfile.ZipFile, name: zipfile.ZipInfo) -> NotebookNode:
        """Return a notebook in a zip, without trust in what the zip says of its size."""
        with archive.open(name) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise CourseError(f"{self.path}: need a notebook of at most {MOST_BYTES // 2**20} MiB.")
        with tempfile.TemporaryDirectory(prefix="grading-") as scratch:
            copy = Path(scratch, "submission.ipynb")
            copy.write_bytes(content)
            try:
                return read_notebook(copy)
            except CourseError as error:
                raise CourseError(str(error).replace(str(copy), str(self.path))) from None


@contextmanager
def _opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip while the block reads from it. Raises: CourseError where it cannot be read"""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CourseError(f"{path}: need a zip with a notebook; got: {reason}.") from None


def _is_notebook(name: str) -> bool:
    parts = name.split("/")
    hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
    return name.lower().endswith(".ipynb") and not hidden


def find_submissions(folder: Path, assignment: str) -> list[HandedIn]:
    """Return what was handed in, sorted; never hidden files or solved ones.

    These are the notebooks and zips; for a student who has neither, the first of the other files.
    """
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _is_hidden(path, folder) and path.name.lower() not in NO_WORK
    ]
    whose = _students(paths, folder, assignment)
    graded, others = defaultdict[str, list[Path]](list), defaultdict[str, list[Path]](list)
    for path in paths:
        (graded if path.suffix.lower() in KINDS else others)[whose[path]].append(path)
    found = []
    for student in dict.fromkeys(whose.values()):
        first, *more = graded[student] or others[student]
        besides = others[student] if graded[student] else more
        some = [first, *more] if graded[student] else [first]
        found += [HandedIn(student, path, tuple(one.name for one in besides)) for path in some]
    return sorted(found, key=lambda one: one.path)


def _is_hidden(path: Path, folder: Path) -> bool:
    parts: Sequence[str] = path.relative_to(folder).parts
    return any(part.startswith((".", "__MACOSX")) or part == "solved" for part in parts)


def _students(paths: Sequence[Path], folder: Path, assignment: str) -> dict[Path, str]:
    """Return whose each file is; students of one name in Moodle keep the number behind it."""
    places = {path: path.relative_to(folder).parts[0] for path in paths}
    whose = {path: _student(path, folder, assignment) for path in paths}
    by_student = defaultdict[str, set[str]](set)
    for path, student in whose.items():
        by_student[student].add(places[path])
    for path, student in whose.items():
        moodle = MOODLE.fullmatch(places[path])
        if moodle and len(by_student[student]) > 1:
            whose[path] = f"{moodle[1]} {moodle[2]}"
    return whose


def _student(path: Path, folder: Path, assignment: str) -> str:
    """Return whose a file is: its first folder's name, else its own without what is no name.

    `hw1-ann.zip` and `ann.ipynb` are ann's, `hw1-ann (1).zip` too, and so are Canvas's
    `ann_LATE_12_345_hw1.ipynb` and Moodle's folder `ann_12_assignsubmission_file_`.
    """
    parts = path.relative_to(folder).parts
    if len(parts) > 1:
        moodle = MOODLE.fullmatch(parts[0])
        return moodle[1] if moodle else parts[0]
    stem = re.sub(r" \(\d+\)$", "", path.stem)
    if canvas := CANVAS.match(stem):
        return canvas[1]
    name = re.escape(assignment)
    return re.sub(rf"^{name}[-_ ]+|[-_ ]+{name}$", "", stem) or stem
