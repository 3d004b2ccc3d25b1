"""Data files of a checkpoint, in the safetensors format: a header in JSON, then the elements.

The first 8 bytes give the header's length; the header gives dtype, shape and place of each tensor.
Nothing in it can run, and a part of a tensor can be read without the rest. Notebook 14_checkpoint.
"""

import hashlib
import json
from collections.abc import Sequence
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from course_lib.core.errors import CourseError
from course_lib.core.shards import Box

NAMES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}  # dtypes: PyTorch's name and that of safetensors
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES}
LONGEST_HEADER = 100 * 2**20
READ_BYTES = 2**20
TRY_OLDER = "Try an older checkpoint."


class _Hashed:
    """A file that is written, with the SHA-256 and the number of its bytes so far."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, content: Any) -> None:
        self.file.write(content)
        self.hash.update(content)
        self.num_bytes += len(content)


def write_tensors(file: BinaryIO, tensors: Sequence[Tensor]) -> tuple[int, str]:
    """Write tensors under the keys "0", "1", ...; return the file's bytes and its SHA-256.

    Cost:    a copy of one tensor at a time, where it is not contiguous or on a GPU
    Raises:  OSError; CourseError for a dtype that the format does not know
    """
    header: dict[str, Any] = {}
    end = 0
    for number, tensor in enumerate(tensors):
        start, end = end, end + tensor.nbytes
        kind = NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if kind is None:
            raise CourseError(
                f"checkpoint: need a dtype out of {', '.join(NAMES)}; got {tensor.dtype}."
            )
        offsets = [start, end]
        header[str(number)] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out = _Hashed(file)
    out.write(len(text).to_bytes(8, "little"))
    out.write(text)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        out.write(flat.view(torch.uint8).numpy().data)
    return out.num_bytes, out.hash.hexdigest()


def hash_of(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file's content."""
    found = hashlib.sha256()
    while part := file.read(READ_BYTES):
        found.update(part)
    return found.hexdigest()


class DataFile:
    """An open data file, to read boxes of its tensors.

    Raises:  CourseError for a file with another header
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.file, self.path = file, path
        length = int.from_bytes(file.read(8), "little")
        try:
            text = file.read(length) if length <= LONGEST_HEADER else b""
            header = json.loads(text)
            self._places = {
                key: (one["dtype"], tuple(one["shape"]), one["data_offsets"][0])
                for key, one in header.items()
                if key != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            raise self._damaged("its header cannot be read") from None
        self._start = 8 + length

    def check(self, key: str, dtype: str, sizes: tuple[int, ...]) -> None:
        """Check that a tensor is there as the manifest has it. Raises: CourseError"""
        kind, shape, start = self._places.get(key, (None, None, None))
        if (kind, shape) != (NAMES[dtype], sizes) or not _is_place(start):
            raise self._damaged(f"tensor {key!r} is not the {dtype} of {list(sizes)} in it")

    def read(self, key: str, dtype: str, box: Box) -> Tensor:
        """Return a box of a tensor that `check` has found there.

        Cost:    the bytes of the rows that the box lies in
        Raises:  OSError; CourseError where the file ends before
        """
        _, shape, start = self._places[key]
        first, num_rows = (box.offsets[0], box.sizes[0]) if shape else (0, 1)
        row_bytes = prod(shape[1:]) * DTYPES[dtype].itemsize
        self.file.seek(self._start + start + first * row_bytes)
        content = bytearray(self.file.read(num_rows * row_bytes))
        if len(content) != num_rows * row_bytes:
            raise self._damaged("it ends too early")
        rows = torch.frombuffer(content, dtype=DTYPES[dtype])
        if not shape:
            return rows.view(())
        return rows.view(num_rows, *shape[1:])[(slice(None), *box.slices()[1:])]

    def _damaged(self, why: str) -> CourseError:
        return CourseError(f"{self.path}: need the file that was saved; {why}. {TRY_OLDER}")


def _is_place(start: Any) -> bool:
    return isinstance(start, int) and 0 <= start < 2**60
