"""Write a file whole or not at all: a reader finds the old content or the new one, never a half."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write bytes, or text as UTF-8, whole or not at all; return the path.

    Raises: OSError where the file cannot be written
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


@contextmanager
def whole_file(
    path: str | os.PathLike[str], *, sync: bool = False, one_writer: bool = False
) -> Iterator[BinaryIO]:
    """Open a new file beside `path` for writing; move it to `path` when the block has ended well.

    The folders above it are made. Where the block raises, the old content stays.

    sync        wait until the content is on disk, so that a power failure leaves no half either
    one_writer  no other process writes this file: the new file always has the same name, so the
                next writer overwrites the remains that a killed process has left

    Raises: OSError where the file cannot be written
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = "" if one_writer else f".{os.getpid()}"
    beside = path.with_name(f".{path.name}{unique}.tmp")
    try:
        with beside.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
