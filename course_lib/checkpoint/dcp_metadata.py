"""The file `.metadata` of a DCP checkpoint: a pickle, read without running what stands in it.

Unpickling calls whatever the file names. This unpickler knows the classes of DCP's own metadata,
and refuses every other name; what they hold is looked at before it is used. Notebook 14_checkpoint.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from course_lib.checkpoint.local_state import WholeTensor, dtype_name
from course_lib.core.errors import CourseError
from course_lib.core.shards import Box, covers_once

METADATA, ABOUT = ".metadata", "about.json"
StorageInfo = filesystem._StorageInfo  # where an item lies: file, offset, length


def _member(enum: Any, name: str) -> Any:
    """Return a member of DCP's one enum: Python before 3.11.4 pickles it as getattr(enum, name)."""
    if enum is not metadata._MEM_FORMAT_ENCODING or name not in enum.__members__:
        raise _Refused("builtins.getattr")
    return enum[name]


ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    (StorageInfo.__module__, "_StorageInfo"): StorageInfo,
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{
        (module, name): PurePath  # of the checkpoint's id, which nobody reads
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _Refused(Exception):
    """A pickle names what DCP's metadata has no use for."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in ALLOWED:
            raise _Refused(f"{module}.{name}")
        return ALLOWED[module, name]


@contextmanager
def _put_back() -> Iterator[None]:
    """Undo what the block sets on the classes themselves: a pickle can do that, too."""
    before = [(one, dict(vars(one))) for one in ALLOWED.values() if isinstance(one, type)]
    try:
        yield
    finally:
        for one, attributes in before:
            for name, value in dict(vars(one)).items():
                if name not in attributes:
                    delattr(one, name)
                elif value is not attributes[name]:
                    setattr(one, name, attributes[name])


def read_metadata(path: Path) -> Metadata:
    """Return the metadata of the checkpoint at `path`, without running code of the file.

    Raises:  CourseError for a file that names anything but DCP's metadata, or is damaged
    """
    try:
        with (path / METADATA).open("rb") as file, _put_back():
            found = _MetadataUnpickler(file).load()
    except _Refused as name:
        raise CourseError(
            f"{path / METADATA}: need DCP's metadata; got a pickle that names {str(name)[:80]}, "
            "which could run any code. It was not run. Do not use this checkpoint."
        ) from None
    except OSError as problem:
        raise _damaged(path, f"it cannot be read ({problem.strerror})") from None
    except Exception as problem:  # unpickling what is damaged can raise anything
        raise _damaged(path, f"it is no pickle of it ({type(problem).__name__})") from None
    _check(path, found)
    return found


def metas(found: Metadata) -> dict[str, WholeTensor]:
    """Return dtype and shape of every tensor."""
    return {
        name: WholeTensor(dtype_name(one.properties.dtype), tuple(one.size))
        for name, one in found.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }


def num_bytes_of(path: Path, found: Metadata) -> int:
    """Return the bytes of the data files, which are all there and long enough.

    Raises:  CourseError for one that is not
    """
    ends = dict[str, int]()
    for info in found.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        file = path / name
        size = file.stat().st_size if file.is_file() else -1
        if size < end:
            got = f"{size} bytes" if size >= 0 else "no such file"
            raise CourseError(f"{path}: need {end} bytes in {name}; got {got}.")
    return sum((path / name).stat().st_size for name in ends)


def _check(path: Path, found: Any) -> None:
    """Check types, names of files, and that the chunks cover each tensor once."""
    try:
        for index, info in found.storage_data.items():
            inside = isinstance(info, StorageInfo) and PurePath(info.relative_path).name
            if not isinstance(index, MetadataIndex) or inside != info.relative_path:
                raise _damaged(path, "it has data files that are not in this folder")
            if min(info.offset, info.length) < 0:
                raise _damaged(path, "it has items before the beginning of a file")
        for name, one in found.state_dict_metadata.items():
            if isinstance(one, BytesStorageMetadata):
                continue
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in one.chunks]
            if not isinstance(one.properties.dtype, torch.dtype) or not covers_once(
                one.size, boxes
            ):
                raise _damaged(path, f"chunks do not cover {str(name)[:80]!r} exactly once")
    except (AttributeError, TypeError, ValueError, KeyError) as problem:
        raise _damaged(path, f"it holds something else ({type(problem).__name__})") from None


def _damaged(path: Path, why: str) -> CourseError:
    return CourseError(f"{path / METADATA}: need DCP's metadata; {why}. Try an older checkpoint.")
