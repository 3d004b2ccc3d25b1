"""Data files of a checkpoint, in the safetensors format: a header in JSON, then the elements.

The first 8 bytes give the header's length; the header gives dtype, shape and place of each tensor.
Nothing in it can run, and a part of a tensor can be read without the rest. Notebook 14_checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
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
TRY_OLDER = "Try an older checkpoint."


def write_tensors(file: BinaryIO, tensors: Sequence[Tensor]) -> tuple[int, str]:
    """Write tensors under the keys "0", "1", ...; return the file's bytes and its SHA-256.

    Cost:    a copy of one tensor at a time, where it is not contiguous or on a GPU
    Raises:  OSError
    """
    header: dict[str, Any] = {}
    end = 0
    for number, tensor in enumerate(tensors):
        start, end = end, end + tensor.nbytes
        header[str(number)] = {
            "dtype": NAMES[str(tensor.dtype).removeprefix("torch.")],
            "shape": [*tensor.shape],
            "data_offsets": [start, end],
        }
    found, num_bytes = hashlib.sha256(), 0
    for content in chain((header_bytes(header),), map(bytes_of, tensors)):
        file.write(content)
        found.update(content)
        num_bytes += len(content)
    return num_bytes, found.hexdigest()


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Return what a safetensors file begins with: the length of the header, and the header."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> Any:
    """Return the elements of a tensor in row-major order; a copy where they do not lie so."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


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

    def read(self, key: str, dtype: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Return a box of a tensor, whose dtype and shape are those of the manifest.

        Cost:    the bytes of the rows that the box lies in
        Raises:  OSError; CourseError for another tensor, and where the file ends before
        """
        kind, sizes, start = self._places.get(key, (None, None, -1))
        is_place = isinstance(start, int) and 0 <= start < 2**60
        if (kind, sizes) != (NAMES[dtype], shape) or not is_place:
            raise self._damaged(f"tensor {key!r} is not the {dtype} of {list(shape)} in it")
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
