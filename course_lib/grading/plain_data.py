"""Turn what a check observed into plain data and back, so that it can cross to another process.

Plain data are None, numbers, texts, tensors, and lists and dicts of them: to read them runs
nobody's code. A dataclass of the course crosses as its name and its fields; an object that is none
of these crosses as its text.
"""

import io
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_lib.checks import CheckFailed
from course_lib.checks.exercise import Cause
from course_lib.core import CourseError
from course_lib.core.files import write_whole

MOST_BYTES = 256 * 2**20  # of one exercise; the largest right answer's have 20 MiB
DEEPEST = 50
COLLECTIONS = (list, tuple, set, frozenset, deque)
PLAIN = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Other:
    """An object that does not cross: the name of its class, and its text."""

    name: str
    text: str

    def __repr__(self) -> str:
        return self.text


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return a value as plain data. Raises: CourseError where it is nested too deeply"""
    if depth > DEEPEST:
        raise CourseError(f"need values nested at most {DEEPEST} deep; these are deeper.")
    if value is None or type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, CheckFailed):
        cause = value.cause and [value.cause.sentence, dict(value.cause.values)]
        return _kind("CheckFailed", to_plain([str(value), cause], depth + 1))
    if is_dataclass(value) and not isinstance(value, type):
        content: Any = {each.name: getattr(value, each.name) for each in fields(value)}
    elif isinstance(value, Enum):
        return _kind(_class_name(value), value.name)
    elif isinstance(value, Mapping):
        content = [list(pair) for pair in value.items()]
        return _kind("Counter" if isinstance(value, Counter) else "dict", to_plain(content, depth))
    elif isinstance(value, COLLECTIONS):
        content = list(value)
        if type(value) is list:
            return [to_plain(each, depth + 1) for each in content]
        if type(value) in COLLECTIONS:
            return _kind(type(value).__name__, to_plain(content, depth))
    else:
        return _scalar(value)
    if isinstance(content, dict):
        content = {name: to_plain(each, depth + 1) for name, each in content.items()}
    else:
        content = to_plain(content, depth)
    return _kind(_class_name(value), content)


def _scalar(value: Any) -> Any:
    """Return a number of another kind (NumPy's) as Python's; anything else as its text."""
    if isinstance(value, torch.dtype | torch.device):
        return _kind(type(value).__name__, str(value).removeprefix("torch."))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return _kind("other", [type(value).__name__, repr(value)[:200]])


def _kind(name: str, content: Any) -> dict[str, Any]:
    return {"kind": name, "of": content}


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def from_plain(data: Any) -> Any:
    """Return the value that `to_plain` was given; course classes have to be imported already.

    Raises: CourseError for data that `to_plain` does not make
    """
    if isinstance(data, list):
        return [from_plain(each) for each in data]
    if not isinstance(data, dict):
        return data
    name, content = data.get("kind"), data.get("of")
    try:
        return _made(str(name), content)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CourseError(f"{name} cannot be read ({type(error).__name__}: {error}).") from None


def _made(name: str, content: Any) -> Any:
    if name in ("dict", "Counter"):
        pairs = {from_plain(key): from_plain(each) for key, each in content}
        return Counter(pairs) if name == "Counter" else pairs
    by_name = {kind.__name__: kind for kind in COLLECTIONS}
    if name in by_name:
        return by_name[name](map(from_plain, content))
    if name == "dtype":
        return _dtype(content)
    if name == "device":
        return torch.device(content)
    if name == "CheckFailed":
        text, cause = from_plain(content)
        return CheckFailed(text, cause and Cause(*cause))
    if name == "other":
        return Other(*content)
    return _of_course(name, content)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _of_course(name: str, content: Any) -> Any:
    """Return an object of a dataclass, a NamedTuple or an Enum of the course; others as a text."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module) if module.partition(".")[0] == "course_lib" else None
    for part in path.split("."):
        kind = getattr(kind, part, None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[content]
    if isinstance(kind, type) and issubclass(kind, tuple) and isinstance(content, list):
        return kind(*map(from_plain, content))
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(content, dict):
        made = object.__new__(kind)
        for each in fields(kind):
            object.__setattr__(made, each.name, from_plain(content[each.name]))
        return made
    return Other(path, f"{path}(...)")


def write_data(value: Any, path: Path) -> None:
    """Write a value as plain data, whole or not at all."""
    file = io.BytesIO()
    torch.save(to_plain(value), file)
    write_whole(path, file.getvalue())


def read_data(path: Path) -> Any:
    """Return the value in a file; nothing in it is run.

    Raises: CourseError for a file that is too large, or holds anything but plain data
    """
    if path.stat().st_size > MOST_BYTES:
        raise CourseError(f"need at most {MOST_BYTES // 2**20} MiB of values; there are more.")
    try:
        data = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CourseError(f"its values cannot be read ({type(error).__name__}).") from None
    return from_plain(data)
