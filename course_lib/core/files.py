"""Read a file that may be damaged; write one whole or not at all.

A reader of a file that is written here finds the old content or the new one, never a part of it.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from course_lib.core.errors import CourseError
from course_lib.core.units import MIB, format_bytes

LARGEST_BYTES = 64 * MIB
DEEPEST = 100  # lists in lists; no file of the course needs more
HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # alone it is no character
OLDER = "Try an older copy of it."
SPARE_BYTES = 4096


def read_text(
    path: str | os.PathLike[str],
    need: str,
    *,
    hint: str = OLDER,
    most_bytes: int = LARGEST_BYTES,
) -> str:
    """Return the text of a file, with its line ends as they are.

    `need` says what the file has to be, such as "a notebook"; `hint` what to try if it is not.

    Raises: CourseError for what is no file (a folder, a pipe), is too large, or is not UTF-8
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would block
            raise _unreadable(path, need, "a folder, a pipe or a device", "Try another path.")
        if found.st_size > most_bytes:
            raise CourseError(
                f"{os.fspath(path)}: need {need} of at most {format_bytes(most_bytes)}; got "
                f"{format_bytes(found.st_size)}. {hint}"
            )
        return Path(path).read_bytes().decode()
    except OSError as problem:
        raise _unreadable(path, need, problem.strerror, "Try another path.") from None
    except UnicodeDecodeError:
        raise _unreadable(path, need, "not a text file in UTF-8", hint) from None
    except ValueError:
        raise _unreadable(path, need, "a zero byte in its name", "Try another path.") from None


def read_json(path: str | os.PathLike[str], need: str, *, hint: str = OLDER) -> Any:
    """Return the value in a JSON file.

    Raises: CourseError for a file that cannot be read, is no JSON, or nests too deep
    """
    return parse_json(read_text(path, need, hint=hint), path, need, hint=hint)


def parse_json(text: str, path: str | os.PathLike[str], need: str, *, hint: str = OLDER) -> Any:
    """Return the value of a JSON text that stands in the file `path`.

    Raises: CourseError for a text that is not JSON, nests too deep, or has half a surrogate pair
    """
    try:
        value = json.loads(text)
        if HALF_A_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        is_too_deep = _is_deeper(value, DEEPEST)
    except UnicodeEncodeError:
        raise not_one(path, need, "half a character, \\ud800 to \\udfff", hint) from None
    except ValueError as problem:
        raise not_one(path, need, str(problem), hint) from None
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise not_one(path, need, f"lists in lists, more than {DEEPEST} deep", hint)
    return value


def not_one(path: str | os.PathLike[str], need: str, why: str, hint: str = OLDER) -> CourseError:
    """Return the error for a file that can be read but is not what is needed."""
    first = f"{why}\n".splitlines()[0][:80]
    return CourseError(f"{os.fspath(path)}: need {need}; this is none ({first}). {hint}")


def _unreadable(path: str | os.PathLike[str], need: str, why: str | None, hint: str) -> CourseError:
    return CourseError(f"{os.fspath(path)}: need {need}; it cannot be read ({why}). {hint}")


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inside
            for one in level
            if isinstance(one, dict | list)
            for inside in (one.values() if isinstance(one, dict) else one)
            if isinstance(inside, dict | list)
        ]
    return bool(level)


def write_result(path: Path, content: bytes | str) -> None:
    """Write bytes, or text as UTF-8, to a path that the user gave, whole or not at all.

    Links are followed; a pipe or a device, such as /dev/stdout, is written to and stays what it is.

    Raises: CourseError where it cannot be written
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_bytes(data)
        else:
            write_whole(os.path.realpath(path), data)
    except (OSError, ValueError) as problem:
        raise _unwritable(path, problem) from None


def check_result_path(path: Path | None) -> None:
    """Check that `write_result` can write there; called before the work that the result is of.

    Raises: CourseError for a folder, a notebook, and a place without permission or room
    """
    if path is None:
        return
    if path.suffix == ".ipynb":
        raise CourseError(f"{path}: need a path to write to; got a notebook's. Try another name.")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not path.exists() or path.is_file():
            place = Path(os.path.realpath(path))
            write_whole(place.with_name(f".{place.name}.room"), bytes(SPARE_BYTES)).unlink()
    except (OSError, ValueError) as problem:
        raise _unwritable(path, problem) from None


def _unwritable(path: Path, problem: OSError | ValueError) -> CourseError:
    why = getattr(problem, "strerror", None) or problem
    return CourseError(
        f"{path}: need a file that can be written; got: {why}. Try a path in a folder of yours."
    )


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
                next writer overwrites what a killed process has left

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
