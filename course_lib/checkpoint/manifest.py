"""The manifest of a checkpoint: which boxes of which tensor lie in which file, in readable JSON.

It is written last, so a checkpoint exists if its manifest does. Whoever reads it trusts nothing:
names of files, shapes and boxes are looked at before any of them is used. Notebook 14_checkpoint.
"""

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from course_lib.checkpoint.data_file import DTYPES
from course_lib.checkpoint.local_state import WholeTensor
from course_lib.core.errors import CourseError
from course_lib.core.files import parse_json
from course_lib.core.plain_values import build
from course_lib.core.shards import Box, Shape, covers_once

FORMAT = 1
MANIFEST = "manifest.json"
DATA_FILE = re.compile(r"data-[0-9a-f]{1,64}-r[0-9]{1,8}\.safetensors")


@dataclass(frozen=True)
class SavedFile:
    """A data file's size and the SHA-256 of its content."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SavedPiece:
    """A box of a tensor, and the file and key under which its elements lie."""

    file: str
    key: str
    offsets: Shape
    sizes: Shape

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: its dtype, shape and pieces, which cover it once."""

    dtype: str
    shape: Shape
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    save_id     random, of this save: it is in the names of the data files
    world_size  ranks that have saved it
    run         whose it is; values: the plain values of the state

    Raises:  CourseError for what no checkpoint can hold
    """

    format: int
    step: int
    save_id: str
    world_size: int
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]
    run: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise CourseError(f"manifest: need format {FORMAT}; got {self.format}.")
        if self.step < 0 or self.world_size < 1:
            raise CourseError("manifest: need a step from 0 on and ranks from 1 on.")
        for name, file in self.files.items():
            if not DATA_FILE.fullmatch(name) or file.bytes < 0:
                raise CourseError(f"manifest: need data files in this folder; got {name[:80]!r}.")
        self._check_tensors()

    def _check_tensors(self) -> None:
        used: Counter[str] = Counter()
        seen: set[tuple[str, str]] = set()
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES or any(size < 0 for size in tensor.shape):
                raise CourseError(f"manifest: need a dtype and sizes of tensors for {name[:80]!r}.")
            if not covers_once(tensor.shape, [piece.box for piece in tensor.pieces]):
                raise CourseError(
                    f"manifest: need pieces that cover {name[:80]!r} exactly once; got others."
                )
            for piece in tensor.pieces:
                if (piece.file, piece.key) not in seen:  # tied names share their pieces
                    seen.add((piece.file, piece.key))
                    used[piece.file] += piece.box.numel * DTYPES[tensor.dtype].itemsize
        for name, num_bytes in used.items():
            if name not in self.files or num_bytes > self.files[name].bytes:
                raise CourseError(f"manifest: need room for its tensors in {name[:80]!r}.")

    def text(self) -> bytes:
        """Return the manifest as JSON, sorted, with a line for each file, value and tensor."""
        lines = [f"{json.dumps(key)}: {_in_lines(x)}" for key, x in sorted(asdict(self).items())]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    def metas(self) -> dict[str, WholeTensor]:
        """Return dtype and shape of every tensor."""
        return {name: WholeTensor(one.dtype, one.shape) for name, one in self.tensors.items()}


def _in_lines(value: Any) -> str:
    if not (isinstance(value, dict) and value):
        return json.dumps(value)
    lines = [f" {json.dumps(key)}: {json.dumps(x, sort_keys=True)}" for key, x in value.items()]
    return "{\n" + ",\n".join(sorted(lines)) + "\n}"


def parse_manifest(content: bytes, path: str) -> Manifest:
    """Return the manifest in a file's content.

    Raises:  CourseError for anything else
    """
    try:
        found = parse_json(content.decode(), path, "a manifest")
    except UnicodeDecodeError:
        raise CourseError(f"{path}: need a manifest; got no text in UTF-8.") from None
    try:
        manifest: Manifest = build(Manifest, found, "manifest")
    except CourseError as problem:
        raise CourseError(f"{path}: {problem}") from None
    return manifest
