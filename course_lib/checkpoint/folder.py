"""The checkpoints in a folder: which are whole, which are broken, which is the newest.

Notebook 14_checkpoint.
"""

import hashlib
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checkpoint.data_file import DTYPES, TRY_OLDER, DataFile
from course_lib.checkpoint.manifest import DATA_FILE, MANIFEST, Manifest, parse_manifest
from course_lib.checkpoint.storage import Storage, storage_of
from course_lib.core.errors import CourseError
from course_lib.core.files import LARGEST_BYTES
from course_lib.core.shards import Box
from course_lib.core.units import format_bytes

STEP = re.compile(r"step-([0-9]{8,18})")
WRITTEN = re.compile(rf"{re.escape(MANIFEST)}|{DATA_FILE.pattern}|\..*\.tmp")
Folder = str | os.PathLike[str]
Reported = Callable[[int, int], object]  # bytes done, bytes in all


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its manifest can be read, and its files have the right size."""

    storage: Storage
    name: str
    manifest: Manifest

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {format_bytes(self.num_bytes)})"

    @property
    def path(self) -> str:
        """The path or URL of the checkpoint."""
        return f"{self.storage.path}/{self.name}"

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return self.manifest.step

    @property
    def values(self) -> dict[str, Any]:
        """The plain values of the state."""
        return self.manifest.values

    @property
    def run(self) -> dict[str, Any]:
        """Whose it is, as `save` was told."""
        return self.manifest.run

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.bytes for file in self.manifest.files.values())

    def verify(self, progress: Reported | None = None) -> None:
        """Read every data file and compare its SHA-256 with the manifest's.

        Cost:    reads all bytes
        Raises:  CourseError for the first file that is another
        """
        done = 0
        for name in sorted(self.manifest.files):
            if damage := self.damage_of(name):
                raise CourseError(damage)
            done += self.manifest.files[name].bytes
            if progress:
                progress(done, self.num_bytes)

    def damage_of(self, name: str) -> str | None:
        """Return in words how a data file is not the one that was saved, or None if it is.

        Cost:    reads its bytes
        Raises:  CourseError for one that cannot be read
        """
        try:
            with self.storage.open_read(f"{self.name}/{name}") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            why = "is not there"
        except OSError as problem:
            raise self.unreadable(name, problem) from None
        else:
            if found == self.manifest.files[name].sha256:
                return None
            why = "has another hash than the manifest says"
        return f"{self.path}: need the files that were saved; {name} {why}. {TRY_OLDER}"

    def unreadable(self, name: str, problem: OSError) -> CourseError:
        """Return the error for a file that may be as it was saved, but cannot be read now."""
        return CourseError(
            f"{self.path}: need to read {name}; got: {problem.strerror or problem}. Try again, or "
            "load an older step."
        )


@dataclass(frozen=True)
class Broken:
    """A checkpoint that is not whole, and why.

    unread   its manifest could not be read, so it may be whole
    """

    path: str
    step: int
    why: str
    unread: bool = False


def latest(folder: Folder) -> Checkpoint | None:
    """Return the newest checkpoint that is published and has all its files in the right size.

    Cost:    reads manifests only; `verify` looks at the files' content
    """
    found = all_checkpoints(folder)
    return next((one for one in found if isinstance(one, Checkpoint)), None)


def all_checkpoints(folder: Folder) -> list[Checkpoint | Broken]:
    """Return all checkpoints of a folder, the newest first.

    What has no manifest was never published, and is none.
    """
    storage = storage_of(folder)
    return [look(storage, name) for name in published(storage)]


def published(storage: Storage) -> list[str]:
    """Return the names of the checkpoints that have a manifest, the newest first.

    Raises:  CourseError for a folder that cannot be read
    """
    try:
        steps = [name for name in storage.list() if STEP.fullmatch(name)]
        steps.sort(key=step_of, reverse=True)
        return [name for name in steps if storage.size(f"{name}/{MANIFEST}") is not None]
    except OSError as problem:
        raise CourseError(
            f"checkpoint: need a folder that can be read; got {storage.path} "
            f"({problem.strerror or problem}). Try another folder."
        ) from None


def look(storage: Storage, name: str) -> Checkpoint | Broken:
    """Return one checkpoint, or why it is none."""
    path = f"{storage.path}/{name}"
    try:
        manifest = _read_manifest(storage, name)
        check_sizes(storage, name, manifest)
    except CourseError as problem:
        return Broken(path, step_of(name), str(problem))
    except OSError as problem:
        why = f"{path}: need to read its manifest; got: {problem.strerror or problem}. Try again."
        missing = isinstance(problem, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        return Broken(path, step_of(name), why, unread=not missing)
    return Checkpoint(storage, name, manifest)


def check_sizes(storage: Storage, name: str, manifest: Manifest) -> None:
    """Check that a checkpoint's data files are there, in their size. Raises: CourseError"""
    for file, saved in sorted(manifest.files.items()):
        size = storage.size(f"{name}/{file}")
        if size != saved.bytes:
            raise CourseError(
                f"{storage.path}/{name}: need {saved.bytes} bytes in {file}; got "
                f"{'no such file' if size is None else size}. {TRY_OLDER}"
            )


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(name.rpartition("-")[2])


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def _read_manifest(storage: Storage, name: str) -> Manifest:
    path = f"{storage.path}/{name}/{MANIFEST}"
    if (storage.size(f"{name}/{MANIFEST}") or 0) > LARGEST_BYTES:
        raise CourseError(f"{path}: need a manifest of at most {LARGEST_BYTES} bytes.")
    with storage.open_read(f"{name}/{MANIFEST}") as file:
        manifest = parse_manifest(file.read(LARGEST_BYTES), path)
    if manifest.step != step_of(name):
        raise CourseError(f"{path}: need the manifest of {name}; got that of step {manifest.step}.")
    return manifest


def remove_files(storage: Storage, name: str, besides: Collection[str] = ()) -> None:
    """Remove what saves have written to a checkpoint's folder, and the folder if that is all.

    The manifest goes first: half a checkpoint is none.

    Raises: OSError
    """
    inside = storage.list(name)
    gone = [file for file in inside if WRITTEN.fullmatch(file) and file not in besides]
    for file in sorted(gone, key=lambda file: file != MANIFEST):
        storage.remove(f"{name}/{file}")
    if len(gone) == len(inside):
        storage.remove(name)


class Reader:
    """The open data files of a checkpoint; use it in a `with` block.

    Raises:  CourseError for a file that is not the one that was saved
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, DataFile] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._files.values():
            one.file.close()

    def fill(self, name: str, box: Box, out: Tensor) -> None:
        """Copy a box of a saved tensor into `out`, of the box's sizes.

        Cost:    reads the rows of the saved pieces that the box lies in
        """
        saved = self.checkpoint.manifest.tensors[name]
        for piece in saved.pieces:
            if (both := piece.box.intersect(box)) is not None:
                file = self._open(piece.file)
                part = file.read(piece.key, saved.dtype, piece.sizes, both.within(piece.box))
                out[both.within(box).slices()].copy_(part)

    def _open(self, name: str) -> DataFile:
        if name not in self._files:
            checkpoint = self.checkpoint
            try:
                file = checkpoint.storage.open_read(f"{checkpoint.name}/{name}")
            except OSError as problem:
                raise checkpoint.unreadable(name, problem) from None
            try:
                self._files[name] = DataFile(file, f"{checkpoint.path}/{name}")
            except CourseError:
                file.close()
                raise
        return self._files[name]


def read_tensor(checkpoint: Checkpoint, name: str, box: Box | None = None) -> Tensor:
    """Return a saved tensor, or a box of it.

    Cost:    reads the rows that the box lies in
    Raises:  CourseError for a name or a box that is not there
    """
    saved = checkpoint.manifest.tensors.get(name)
    whole = Box.whole(saved.shape) if saved else None
    box = box or whole
    if saved is None or box is None or whole is None or box.intersect(whole) != box:
        raise CourseError(
            f"{checkpoint.path}: need the name of a saved tensor, and a box inside it; got "
            f"{name!r}. Try one out of checkpoint.manifest.tensors."
        )
    out = torch.empty(box.sizes, dtype=DTYPES[saved.dtype])
    with Reader(checkpoint) as reader:
        reader.fill(name, box, out)
    return out
