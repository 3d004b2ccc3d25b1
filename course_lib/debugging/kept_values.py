"""The values of chosen steps, beside their fingerprints: where in a tensor two runs differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from course_lib.core.errors import CourseError

OfStep = tuple[str, str, int]  # phase, name, call


def kept_path(folder: Path, rank: int, step: int) -> Path:
    """Return the path of the values of one step on one rank."""
    return folder / f"rank{rank}-step{step}.pt"


def keep_values(path: Path, values: Mapping[OfStep, Sequence[Tensor]]) -> None:
    """Write the values of a step."""
    torch.save({repr(key): list(parts) for key, parts in values.items()}, path)


def largest_difference(a: Path, b: Path, of_step: OfStep) -> str:
    """Return where the values in two files differ most, or nothing if one of them is not there.

    Raises: CourseError for a file of something else
    """
    if not (a.is_file() and b.is_file()):
        return ""
    found = [_load(path).get(repr(of_step), []) for path in (a, b)]
    for number, (one, other) in enumerate(zip(*found, strict=False)):
        if one.shape != other.shape or torch.equal(one, other):
            continue
        apart = (one.double() - other.double()).abs().nan_to_num(nan=torch.inf).reshape(-1)
        place = torch.unravel_index(apart.argmax(), one.shape) if one.dim() else ()
        index = [int(number) for number in place]
        values = [x.reshape(-1)[apart.argmax()].item() for x in (one, other)]
        part = f" of part {number}" * (len(found[0]) > 1)
        count = int((one != other).sum())
        return (
            f"{count} of {one.numel()} values differ, most at {index}{part}: "
            f"{values[0]:.6g} and {values[1]:.6g}"
        )
    return ""


def _load(path: Path) -> dict[str, list[Tensor]]:
    try:
        found = torch.load(path, weights_only=True)
        if isinstance(found, dict) and all(isinstance(one, list) for one in found.values()):
            return found
    except Exception as problem:  # PyTorch raises many kinds for a spoilt file
        raise CourseError(f"{path.name}: need kept values; got a file that is spoilt.") from problem
    raise CourseError(f"{path.name}: need kept values; got another file of PyTorch.")
