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
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from course_lib.checks import CheckFailed
from course_lib.checks.exercise import Cause
from course_lib.core import CourseError
from course_lib.core.files import write_whole

HIDDEN = "hidden-"  # before the key, in the name of the file
MOST_BYTES = 256 * 2**20  # of one exercise; the largest right answer's have 20 MiB
VALUE_BYTES = 64  # what a value takes besides its content, about
DEEPEST = 50
SHOWN = 200
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
        content = [*value]
        if type(value) is list:
            return [to_plain(each, depth + 1) for each in content]
        if not _class_name(value).startswith("course_lib."):  # torch.Size is a tuple
            base = next(kind for kind in COLLECTIONS if isinstance(value, kind))
            return _kind(base.__name__, to_plain(content, depth))
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
    return _kind("other", [type(value).__name__, repr(value)[:SHOWN]])


def _kind(name: str, content: Any) -> dict[str, Any]:
    return {"kind": name, "of": content}


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


@dataclass
class _Reader:
    """Makes values of plain data; counts them, since a list may contain another one many times."""

    left: int = MOST_BYTES

    def count(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise CourseError(f"need at most {MOST_BYTES // 2**20} MiB of values; there are more.")

    def value(self, data: Any) -> Any:
        self.count(VALUE_BYTES)
        if isinstance(data, Tensor):
            return self.tensor(data)
        if isinstance(data, list):
            return [self.value(each) for each in data]
        if not isinstance(data, dict):
            return data
        name, content = data.get("kind"), data.get("of")
        try:
            return self.made(str(name), content)
        except CourseError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            what = f"{str(name)[:SHOWN]} cannot be read"
            raise CourseError(f"{what} ({type(error).__name__}: {str(error)[:SHOWN]}).") from None

    def tensor(self, data: Tensor) -> Tensor:
        """Return a plain tensor; a small file may name one of any size, whose numbers repeat."""
        self.count(data.numel() * data.element_size())
        if type(data) is not Tensor or data.layout != torch.strided or data.device.type != "cpu":
            raise CourseError("need plain tensors; there is another kind.")
        return data

    def made(self, name: str, content: Any) -> Any:
        if name in ("dict", "Counter"):
            pairs = {self.value(key): self.value(each) for key, each in content}
            return Counter(pairs) if name == "Counter" else pairs
        by_name = {kind.__name__: kind for kind in COLLECTIONS}
        if name in by_name:
            return by_name[name](map(self.value, content))
        if name == "dtype":
            return _dtype(content)
        if name == "device":
            return torch.device(content)
        if name == "CheckFailed":
            text, cause = self.value(content)
            return CheckFailed(str(text), cause and Cause(str(cause[0])))
        if name == "other":
            return Other(*map(str, content))
        return self.of_course(name, content)

    def of_course(self, name: str, content: Any) -> Any:
        """Return an object of a dataclass, a NamedTuple or an Enum of the course; else a text."""
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(module) if module.partition(".")[0] == "course_lib" else None
        for part in path.split("."):
            found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
        kind = found if isinstance(found, type) and found.__module__ == module else object
        if issubclass(kind, Enum):
            return kind[content]
        if issubclass(kind, tuple) and isinstance(content, list):
            return kind(*map(self.value, content))
        if not is_dataclass(kind) or issubclass(kind, Cause) or not isinstance(content, dict):
            return Other(path, f"{path}(...)")
        made = object.__new__(kind)
        for each in fields(kind):
            object.__setattr__(made, each.name, self.value(content[each.name]))
        return made


def from_plain(data: Any) -> Any:
    """Return the value that `to_plain` was given; course classes have to be imported already.

    A cause keeps its sentence and loses its values, since to fill these in could run their code.

    Raises: CourseError for data that `to_plain` does not make, or that are too many
    """
    return _Reader().value(data)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


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
