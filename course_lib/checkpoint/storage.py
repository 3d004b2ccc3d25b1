"""The store of checkpoints: a folder of files that are read in parts and published as a whole.

The folder is on a disk that all ranks see, or in a store that fsspec reaches by URL, such as
`s3://bucket/run`. A name is a path inside the folder, with `/`. Notebook 14_checkpoint.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from course_lib.core.errors import CourseError
from course_lib.core.files import whole_file

T = TypeVar("T")


class Storage:
    """A folder of checkpoints in a store that fsspec reaches: `memory://run`, `s3://bucket/run`.

    path   where it is, the same text for the same folder

    A store of objects knows neither renaming nor locks. It puts an object in its place whole, when
    all of it has arrived, so a manifest that is written last publishes a checkpoint there, too.
    Failures of any library below are raised as OSError.
    """

    def __init__(self, path: str, store: Any, root: str) -> None:
        self.path, self._store, self._root = path, store, root

    def list(self, inside: str = "") -> list[str]:
        """Return the names in the folder, or in one inside it; none where there is no folder."""
        with self._reached(inside), suppress(FileNotFoundError, NotADirectoryError):
            self._store.invalidate_cache()  # other ranks write, too
            found = self._store.ls(self._place(inside), detail=False)
            return sorted({one.rstrip("/").rpartition("/")[2] for one in found})
        return []

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, or None where there is none."""
        with self._reached(name), suppress(FileNotFoundError, NotADirectoryError):
            self._store.invalidate_cache()
            return self._store.info(self._place(name))["size"]
        return None

    def open_read(self, name: str) -> BufferedReader:
        """Open a file to read parts of it. Raises: OSError"""
        with self._reached(name):
            return self._store.open(self._place(name), "rb")

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file; it is in the store when the block ends. Raises: OSError"""

        def opened(place: str) -> Any:
            return self._store.open(place, "wb")

        with self._reached(name), self._in_folder(name, opened) as file:
            yield file

    def publish(self, name: str, content: bytes) -> None:
        """Put a file in its place in one request. Raises: OSError"""
        with self._reached(name):
            self._in_folder(name, lambda place: self._store.pipe_file(place, content))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that it holds. Raises: OSError"""
        with self._reached(name), suppress(FileNotFoundError):
            self._store.rm(self._place(name), recursive=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block: there are no locks, and files of two savers have different names."""
        yield

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _in_folder(self, name: str, write: Callable[[str], T]) -> T:
        """Write a file; where the store has folders and asks for them, make them first.

        The first one is a bucket, or where the store begins: it is never made.
        """
        place = self._place(name)
        try:
            return write(place)
        except FileNotFoundError:
            parts = place.split("/")
            for end in range(2, len(parts)):
                with suppress(FileExistsError, FileNotFoundError):
                    self._store.mkdir("/".join(parts[:end]), create_parents=False)
            return write(place)

    @contextmanager
    def _reached(self, name: str) -> Iterator[None]:
        """Raise an OSError for what any library of a store raises; it names the file."""
        try:
            yield
        except (OSError, CourseError):
            raise
        except Exception as problem:
            place = f"{self.path}/{name}"
            raise OSError(None, f"{type(problem).__name__}: {problem}", place) from problem


class LocalStorage(Storage):
    """A folder of checkpoints on a disk that all ranks see: what is written is synced."""

    def __init__(self, folder: str) -> None:
        place = os.path.realpath(folder)
        super().__init__(place, LocalFileSystem(), place)

    @contextmanager
    def open_write(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file; it is on the disk when the block ends. Raises: OSError"""
        path = Path(self.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self, name: str, content: bytes) -> None:
        """Put a file in its place at once, on the disk; what was written before it is there, too.

        Raises: OSError
        """
        path = Path(self.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)
        with whole_file(path, sync=True) as file:
            file.write(content)
        for folder in (path.parent, Path(self.path)):
            sync_folder(folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes out of such a block of theirs. Raises: OSError"""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        with Path(self.path, ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, or we are dead
            yield


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage_of(folder: str | os.PathLike[str]) -> Storage:
    """Return the storage of a folder, or of a URL.

    Raises: CourseError for a URL whose library is not installed, or that fsspec does not know
    """
    place = os.fspath(folder)
    if "://" not in place:
        return LocalStorage(place)
    try:
        store, root = url_to_fs(place)
    except ImportError as missing:  # its text says what to install
        raise CourseError(
            f"{place}: need a library that is not installed. {_first_line(missing)}."
        ) from None
    except ValueError as unknown:
        raise CourseError(
            f"{place}: need a folder, or a URL that fsspec knows; got: {_first_line(unknown)}. "
            "Try file://, memory:// or s3://."
        ) from None
    if "file" in store.protocol:
        return LocalStorage(root)
    return Storage(place.rstrip("/"), store, root.rstrip("/"))


def _first_line(problem: Exception) -> str:
    return f"{problem}\n".splitlines()[0].rstrip(".")
