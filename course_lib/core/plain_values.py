"""Build a dataclass from plain values, as JSON gives them, with the type of each looked at."""

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from course_lib.core.errors import CourseError

MOST = 2**63  # of a whole number: beyond it, there are no bytes, steps or tokens to count
PLAIN = (int, float, str, bool)
SHOWN = 60


def build(kind: Any, value: Any, where: str) -> Any:
    """Return the value as `kind`: a dataclass, a number, a text, or tuples and mappings of those.

    Numbers are finite and below 2**63 in size, and True is no number. A dataclass is built from a
    mapping with its fields, and checks the values itself, too.

    where   begins the sentence of an error; the names of fields are added to it

    Raises: CourseError for a value of another type, a field that is missing or not known
    """
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any or (kind not in PLAIN and isinstance(kind, type) and isinstance(value, kind)):
        return value
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        return kind(**_fields(kind, value, where))
    if origin in (Union, types.UnionType):
        *others, kind = (one for one in inside if one is not types.NoneType)
        if (value is None and types.NoneType in inside) or any(_is_plain(x, value) for x in others):
            return value
        return build(kind, value, where)
    each = inside if origin is tuple and ... not in inside else inside[:1] * _length(value)
    if origin in (tuple, list, Sequence) and len(each) == _length(value):
        pairs = enumerate(zip(each, value, strict=True))
        found = [build(one_kind, one, f"{where}[{n}]") for n, (one_kind, one) in pairs]
        return found if origin is list else tuple(found)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: build(inside[1], one, f"{where}.{key}") for key, one in value.items()}
    if not _is_plain(kind, value):
        raise CourseError(f"{where}: need {_in_words(kind)}; got {_short(value)}.")
    return value


def as_read_back(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values as a JSON file gives them back: tuples are lists then."""
    return dict(json.loads(json.dumps(dict(values))))


def _fields(kind: Any, value: Mapping[str, Any], where: str) -> dict[str, Any]:
    known, hints = _known(kind)
    for name in value:
        if name not in known:
            raise CourseError(f"{where}: need {', '.join(known)}; got {_short(name)}.")
    for name, one in known.items():
        if name not in value and one.default is MISSING and one.default_factory is MISSING:
            raise CourseError(f"{where}: need {name}; it is not there.")
    return {name: build(hints[name], one, f"{where}.{name}") for name, one in value.items()}


@cache
def _known(kind: Any) -> tuple[dict[str, Field[Any]], dict[str, Any]]:
    """Return the fields of a dataclass by name, and their types."""
    return {one.name: one for one in fields(kind)}, get_type_hints(kind)


def _length(value: Any) -> int:
    """Return the number of items of a list or tuple, which other values are not."""
    return len(value) if isinstance(value, list | tuple) else -1


def _is_plain(kind: Any, value: Any) -> bool:
    if isinstance(value, bool) or kind in (bool, str):
        return kind is type(value)
    if isinstance(value, int):
        return kind in (int, float) and abs(value) < MOST
    return kind is float and isinstance(value, float) and math.isfinite(value)


def _in_words(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if is_dataclass(kind) or get_origin(kind) in (dict, Mapping):
        return "names with values"
    return words.get(kind, "a list")


def _short(value: Any) -> str:
    """Return the value as text, cut short: its repr may be as large as the file."""
    if isinstance(value, int) and abs(value) >= MOST:
        return "a number beyond 2**63"
    if isinstance(value, str):
        return repr(value[:SHOWN])
    return repr(value)[:SHOWN] if not isinstance(value, list | dict) else type(value).__name__
