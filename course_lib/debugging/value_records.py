"""The record of the values of a run: one file of JSON lines per rank, `rank0.values`.

The first line describes the rank; each other one is a `Value`: what a tensor was in a phase of a
step, as a hash and a sketch. The order of the lines is the order of computation. A run that goes on
at step 25 writes a file of its own, `rank0-from25.values`; reading joins them by step.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from course_lib.core.errors import CourseError
from course_lib.core.files import read_text
from course_lib.core.shards import Box
from course_lib.core.units import GIB

# in the order of a step; "start" is the model before its first step
PHASES = ("start", "input", "forward", "backward", "local gradient", "gradient", "parameter")
AGAIN = "Try to record the run again."
Axes = dict[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor in one phase of one step on one rank.

    name     of the parameter in the whole model, or of the module whose output it is
    call     how many times the module was called before in this step: micro-batches
    shape    of the whole tensor
    boxes    the part of it that is here; empty: all of it
    bits     the hash of this part, `sketch` its sketch, `norm` its norm
    """

    step: int
    phase: str
    name: str
    call: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    bits: str
    sketch: tuple[float, ...]
    norm: float
    dtype: str

    @property
    def key(self) -> tuple[int, str, str, int]:
        """Step, phase, name and call, by which the same tensor is found in another run."""
        return self.step, self.phase, self.name, self.call

    def line(self) -> dict[str, Any]:
        """Return the value as a line of the file."""
        boxes = [[box.offsets, box.sizes] for box in self.boxes]
        return {**vars(self), "boxes": boxes}


@dataclass(frozen=True)
class RankValues:
    """What one rank has recorded; `axes` has its index and the size of each axis of the mesh.

    first_step   where this part of a run began
    """

    rank: int
    world_size: int
    axes: Axes = field(default_factory=dict)
    values: dict[tuple[int, str, str, int], Value] = field(default_factory=dict)
    first_step: int = 0


def values_path(folder: Path, rank: int, first_step: int = 0) -> Path:
    """Return the path of a rank's file; a run that resumed has one for each part."""
    return folder / (f"rank{rank}" + (f"-from{first_step}" if first_step else "") + ".values")


def _first_step(path: Path) -> int:
    begins = path.stem.partition("-from")[2]
    return int(begins) if begins.isdigit() else 0


def forget_values(folder: Path, rank: int, step: int) -> None:
    """Delete a rank's files of the parts that a run beginning at `step` will repeat."""
    for path in [values_path(folder, rank), *folder.glob(f"rank{rank}-from*.values")]:
        if _first_step(path) >= step:
            path.unlink(missing_ok=True)


def write_head(file: TextIO, rank: int, world_size: int, axes: Axes) -> None:
    """Write the first line."""
    head = {"line": "values", "rank": rank, "world_size": world_size, "axes": axes}
    file.write(json.dumps(head) + "\n")


def read_values(folder: Path) -> list[RankValues]:
    """Return what all ranks of a run have recorded, by rank; parts after a resume are joined.

    Raises: CourseError for a folder without a whole record, for parts on other meshes, and for a
    line that cannot be read
    """
    paths = sorted(folder.glob("rank*.values"))
    if not paths:
        raise CourseError(
            f"{folder}: need a folder with the recorded values of a run, rank0.values and so on; "
            "there are none. Try python -m course_lib.train --record-values FOLDER."
        )
    parts = sorted((_read(path) for path in paths), key=lambda one: (one.rank, one.first_step))
    found = [_joined(list(own)) for _, own in groupby(parts, key=lambda one: one.rank)]
    ranks, size = [one.rank for one in found], found[0].world_size
    if ranks != list(range(size)):
        raise CourseError(
            f"{folder}: need the files of ranks 0 to {size - 1}; got those of ranks "
            f"{', '.join(map(str, ranks))}. Copy the missing ones, or record into an empty folder."
        )
    return found


def _joined(parts: Sequence[RankValues]) -> RankValues:
    """Return the record of a rank from its parts; what a later part repeats is the later one's."""
    values: dict[tuple[int, str, str, int], Value] = {}
    for number, part in enumerate(parts):
        before = parts[number - 1] if number else part
        if (before.world_size, before.axes) != (part.world_size, part.axes):
            raise CourseError(
                f"rank {part.rank}: need a record on one mesh; got {before.axes} up to step "
                f"{part.first_step}, and {part.axes} after it. Try to move the files of one part "
                "to a folder of their own."
            )
        kept = {key: value for key, value in values.items() if key[0] < part.first_step}
        values = kept | part.values
    return replace(parts[0], values=values)


def _read(path: Path) -> RankValues:
    lines = read_text(path, "recorded values", hint=AGAIN, most_bytes=4 * GIB).splitlines()
    record: RankValues | None = None
    number = 0
    try:
        while number < len(lines):
            number += 1
            plain = json.loads(lines[number - 1])
            if record is None:
                record = replace(_head(plain), first_step=_first_step(path))
            else:
                value = _value(plain)
                record.values[value.key] = value
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        is_cut = number == len(lines) and record is not None and not lines[-1].endswith("}")
        if not is_cut:  # a crash may cut the last line short
            raise CourseError(
                f"{path.name}, line {number}: need a line of recorded values; got "
                f"{lines[number - 1][:60]!r}. {AGAIN}"
            ) from problem
    if record is None:
        raise CourseError(f"{path.name}: need recorded values; the file is empty. {AGAIN}")
    return record


def _head(plain: Any) -> RankValues:
    if plain["line"] != "values":
        raise ValueError(plain["line"])
    axes = {str(name): (int(index), int(size)) for name, (index, size) in plain["axes"].items()}
    return RankValues(int(plain["rank"]), int(plain["world_size"]), axes)


def _value(plain: Any) -> Value:
    boxes = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in plain.pop("boxes"))
    shape, numbers = tuple(plain.pop("shape")), tuple(map(float, plain.pop("sketch")))
    value = Value(**plain, shape=shape, boxes=boxes, sketch=numbers)
    if value.phase not in PHASES:
        raise ValueError(value.phase)
    return value


def norm_of(values: Sequence[Value]) -> float:
    """Return the norm of the tensor that these parts make up."""
    return math.sqrt(math.fsum(value.norm**2 for value in values))
