"""An emulated disk that remembers what was done to it, and what a cut at any moment leaves of it.

Killing a process leaves everything it has done, with a write cut short. A power cut takes more:
content that was not synced may be torn, and names (made, renamed, removed) that were not synced are
undone from some moment on, in each folder another one. Notebook 14_checkpoint.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from course_lib.core.errors import CourseError

DiskFiles = dict[str, bytes]


@dataclass(frozen=True)
class Operation:
    """One call: `write`, `sync`, `rename`, `remove` or `sync_names`; `to` is rename's new name."""

    kind: str
    name: str = ""
    to: str = ""
    content: bytes = b""

    def __str__(self) -> str:
        return " ".join(word for word in (self.kind, self.name, self.to) if word)


@dataclass(frozen=True)
class Cut:
    """A cut: `files` by name, after `done` operations; `how`: killed or power cut."""

    done: int
    how: str
    files: DiskFiles


class EmulatedDisk:
    """A disk with `files` by name, such as `step-1/manifest.json`.

    Names point to contents, so that a rename moves what is on the disk, and what is not yet.

    Raises:  CourseError for a file that is not there, or a folder without a name
    """

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.before: DiskFiles = dict(files or {})
        self.operations: list[Operation] = []
        self._contents = dict(enumerate(self.before.values()))
        self._names = {name: number for number, name in enumerate(self.before)}
        self._synced_names = dict(self._names)
        self._unsynced = set[int]()
        self._journal = list[_Change]()  # of names, since they were synced

    def write(self, name: str, content: bytes) -> None:
        """Write a file, from its beginning. A cut leaves a part of it."""
        self.do(Operation("write", name, content=bytes(content)))

    def sync(self, name: str) -> None:
        """Wait until the content of a file is on the disk."""
        self.do(Operation("sync", name))

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, in place of the file that had it: wholly or not at all."""
        self.do(Operation("rename", name, to))

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.do(Operation("remove", name))

    def sync_names(self) -> None:
        """Wait until all names are on the disk: those made, changed and removed."""
        self.do(Operation("sync_names"))

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, sorted, without the folder."""
        if not isinstance(folder, str):
            raise CourseError(f"names: need the name of a folder; got {folder!r}.")
        start = f"{folder}/"
        return sorted(one.removeprefix(start) for one in self._names if one.startswith(start))

    @property
    def files(self) -> DiskFiles:
        """Content by name, as a process sees it."""
        return {name: self._contents[number] for name, number in self._names.items()}

    def do(self, one: Operation) -> None:
        """Carry an operation out, and note how much of it would outlive a power cut."""
        known = one.kind == "sync_names" or one.name in self._names
        if not known and one.kind != "write":
            raise CourseError(f"{one.kind}: need a file that is there; got {one.name!r}.")
        self.operations.append(one)
        if one.kind == "sync_names":
            self._synced_names, self._journal = dict(self._names), []
        elif one.kind == "sync":
            self._unsynced.discard(self._names[one.name])
        else:
            number = self._names[one.name] if known else len(self._contents)
            if one.kind == "write":
                self._contents[number] = one.content
                self._unsynced.add(number)
            self._journal.append(_Change(one, number))
            self._journal[-1].apply(self._names)

    def after_power_cuts(self) -> Iterator[DiskFiles]:
        """Yield what a power cut may leave: of each folder, its names up to any change.

        Contents are torn if they were not synced.
        """
        lengths = Counter(change.folder for change in self._journal)
        contents = {
            number: _torn(content) if number in self._unsynced else content
            for number, content in self._contents.items()
        }
        for counts in product(*(range(length + 1) for length in lengths.values())):
            left, names = dict(zip(lengths, counts, strict=True)), dict(self._synced_names)
            for change in self._journal:
                left[change.folder] -= 1
                if left[change.folder] >= 0:
                    change.apply(names)
            yield {name: contents[number] for name, number in names.items()}


@dataclass(frozen=True)
class _Change:
    """A change of names: of the file with this number, in one folder."""

    operation: Operation
    number: int

    @property
    def folder(self) -> str:
        return (self.operation.to or self.operation.name).rpartition("/")[0]

    def apply(self, names: dict[str, int]) -> None:
        if self.operation.kind != "write":
            names.pop(self.operation.name, None)
        if self.operation.kind != "remove":
            names[self.operation.to or self.operation.name] = self.number


def cuts(before: DiskFiles, operations: Sequence[Operation]) -> Iterator[Cut]:
    """Yield what every cut may leave: before, between, within and after the operations."""
    disk = EmulatedDisk(before)
    for done, operation in enumerate([*operations, None]):
        yield Cut(done, "killed", disk.files)
        for files in disk.after_power_cuts():
            yield Cut(done, "power cut", files)
        if operation is None:
            return
        if operation.kind == "write":
            files = disk.files | {operation.name: _torn(operation.content)}
            yield Cut(done, "killed in the middle", files)
        disk.do(operation)


def _torn(content: bytes) -> bytes:
    return content[: len(content) // 2]
