"""An emulated disk that remembers what was done to it, and what a cut at any moment leaves of it.

Killing a process leaves everything it has done, with a write cut short. A power cut takes more:
content that was not synced may be torn, and names (made, renamed, removed) that were not synced are
undone from some moment on, in each folder another one. Notebook 14_checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

    Raises:  CourseError for a file that is not there, or a folder without a name
    """

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.before: DiskFiles = dict(files or {})
        self.operations: list[Operation] = []
        self._now = _State.of(self.before)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, from its beginning. A cut leaves a part of it."""
        self._do(Operation("write", name, content=bytes(content)))

    def sync(self, name: str) -> None:
        """Wait until the content of a file is on the disk."""
        self._do(Operation("sync", name))

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, in place of the file that had it: wholly or not at all."""
        self._do(Operation("rename", name, to))

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._do(Operation("remove", name))

    def sync_names(self) -> None:
        """Wait until all names are on the disk: those made, changed and removed."""
        self._do(Operation("sync_names"))

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder, sorted, without the folder."""
        if not isinstance(folder, str):
            raise CourseError(f"names: need the name of a folder; got {folder!r}.")
        return sorted(
            name.removeprefix(f"{folder}/") for name in self._now.names if _inside(name, folder)
        )

    @property
    def files(self) -> DiskFiles:
        """Content by name."""
        return self._now.seen()

    def _do(self, operation: Operation) -> None:
        self._now.do(operation)
        self.operations.append(operation)


@dataclass
class _State:
    """Names point to contents, so that a rename moves what is on the disk, and what is not yet."""

    names: dict[str, int]
    contents: dict[int, bytes]
    synced_names: dict[str, int]
    unsynced: set[int] = field(default_factory=set)
    journal: list["_Change"] = field(default_factory=list)  # changes of names, not synced

    @classmethod
    def of(cls, files: DiskFiles) -> "_State":
        names = {name: number for number, name in enumerate(files)}
        return cls(names, dict(enumerate(files.values())), dict(names))

    def do(self, one: Operation) -> None:
        """Carry an operation out, and note how much of it would outlive a power cut."""
        known = one.kind == "sync_names" or one.name in self.names
        if not known and one.kind != "write":
            raise CourseError(f"{one.kind}: need a file that is there; got {one.name!r}.")
        if one.kind == "sync_names":
            self.synced_names, self.journal = dict(self.names), []
        elif one.kind == "sync":
            self.unsynced.discard(self.names[one.name])
        else:
            number = self.names[one.name] if known else len(self.contents)
            if one.kind == "write":
                self.contents[number] = one.content
                self.unsynced.add(number)
            self.journal.append(_Change(one, number))
            self.journal[-1].apply(self.names)

    def seen(self) -> DiskFiles:
        """Return the files as a process sees them."""
        return {name: self.contents[number] for name, number in self.names.items()}

    def after_power_cuts(self) -> Iterator[DiskFiles]:
        """Yield what a power cut may leave: of each folder, its names up to any change.

        Contents are torn if they were not synced.
        """
        folders = sorted({change.folder for change in self.journal})
        lengths = [sum(one.folder == folder for one in self.journal) for folder in folders]
        for counts in product(*(range(length + 1) for length in lengths)):
            left, names = dict(zip(folders, counts, strict=True)), dict(self.synced_names)
            for change in self.journal:
                left[change.folder] -= 1
                if left[change.folder] >= 0:
                    change.apply(names)
            yield {
                name: _torn(self.contents[number]) if number in self.unsynced else
                self.contents[number]
                for name, number in names.items()
            }  # fmt: skip


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
    state = _State.of(before)
    for done, operation in enumerate([*operations, None]):
        yield Cut(done, "killed", state.seen())
        for files in state.after_power_cuts():
            yield Cut(done, "power cut", files)
        if operation is None:
            return
        if operation.kind == "write":
            files = state.seen() | {operation.name: _torn(operation.content)}
            yield Cut(done, "killed in the middle", files)
        state.do(operation)


def _torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _inside(name: str, folder: str) -> bool:
    return name.startswith(f"{folder}/")
