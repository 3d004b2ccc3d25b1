"""The type of a gradient over each axis of a mesh: is it the same, a shard, or a part of a sum?

A rank uses a parameter that is replicated over an axis, and its gradient there is partial: the sum
over the axis is the gradient, and somebody has to sum it. If every rank computes the same with the
parameter, it is invariant, and so is its gradient: a sum would count it several times. Every bug of
parallelism that the loss does not show is a confusion of the two.

    type        each rank has                    to do
    Invariant   the gradient                     nothing
    Varying     the gradient of its own shard    nothing
    Partial     a term of the gradient           sum over the axis
    Mean        the gradient of its own data     average over the axis

Source:  meta-pytorch/spmd_types 2026, docs/local_spmd_types.md, "Types"; Mean is ours
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from os import PathLike
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.debugging.sketches import Sketch, added, distance
from course_lib.debugging.value_records import read_values
from course_lib.debugging.wholes import WholeValue, scales, wholes

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
INVARIANT, VARYING, PARTIAL, MEAN, UNKNOWN = "Invariant", "Varying", "Partial", "Mean", "differs"
OF_PARAM = {PARTIAL: "Replicate", MEAN: "Replicate", INVARIANT: "Invariant", VARYING: "Varying"}


@dataclass(frozen=True)
class GradientType:
    """What the ranks have of one parameter's gradient.

    over     by axis: Invariant, Varying, Partial, Mean, or that it differs in another way
    factor   the gradient divided by the right one; NaN where it is not a multiple of it
    hint     what such a factor may come from
    local    before any reduction: then Partial and Mean are no mistakes
    """

    step: int
    name: str
    over: dict[str, str]
    factor: float = 1.0
    hint: str = ""
    is_missing: bool = False
    local: bool = False

    @property
    def is_right(self) -> bool:
        """Whether every rank has the right gradient, of all or of its shard."""
        told = {*self.over.values()}
        return self.factor == 1.0 and not self.is_missing and told <= {INVARIANT, VARYING}

    def param_types(self) -> dict[str, str]:
        """Return the type of the parameter, where this is its gradient before any reduction."""
        return {axis: OF_PARAM.get(told, told) for axis, told in self.over.items()}

    def __str__(self) -> str:
        found = f"the gradient of {self.name}"
        if self.is_missing:
            return f"{found} is missing in part: no rank has recorded it"
        for told, verb in ((PARTIAL, "sum"), (MEAN, "average")):
            if axes := [axis for axis, one in self.over.items() if one == told]:
                over = " and ".join(axes)
                what = "partial" if told == PARTIAL else "of each rank's own data"
                so = f": {verb} it" if self.local else f", and nobody {verb}s it"
                return f"{found} is {what} over {over}{so}"
        if axes := [axis for axis, one in self.over.items() if one == UNKNOWN]:
            return f"{found} differs over {' and '.join(axes)}, whose ranks hold copies"
        if math.isnan(self.factor):
            return f"{found} is another one than the reference has"
        if self.factor not in (0.0, 1.0):
            return f"{found} is {self.factor:.6g} times the right one{self.hint}"
        return f"{found} is {'zero' if not self.factor else 'right'}"


def gradient_types(
    run: str | PathLike[str],
    reference: str | PathLike[str] | None = None,
    *,
    step: int | None = None,
    local: bool = False,
    tolerance: float | None = None,
) -> list[GradientType]:
    """Return the type of each parameter's gradient over the axes of a recorded run's mesh.

    reference   the same training recorded on one process, or on other ranks; without one, only
                copies that differ are found
    step        None: the first that has gradients
    local       the gradients before they were reduced, which tell the parameters' types
    tolerance   relative; None: by dtype

    Raises: CourseError for a folder without recorded values, and where there are no such gradients
    """
    phase = "local gradient" if local else "gradient"
    found = wholes(read_values(Path(run)), [phase])
    steps = {key[0] for key in found}
    step = min(steps, default=0) if step is None else step
    if step not in steps:
        have = f"those of steps {min(steps)} to {max(steps)}" if steps else "none"
        raise CourseError(f"{run}: need a recorded {phase} of step {step}; there are {have}.")
    right = wholes(read_values(Path(reference)), ["gradient"]) if reference else {}
    limits = scales(right or found)
    return [
        type_of_gradient(
            one,
            right.get((step, "gradient", name, 0)),
            limits.get((step, "gradient" if right else phase, name, 0), one.norm),
            tolerance,
        )
        for (number, _, name, _), one in found.items()
        if number == step and (not right or (step, "gradient", name, 0) in right)
    ]


def type_of_gradient(
    one: WholeValue, right: WholeValue | None, scale: float, tolerance: float | None = None
) -> GradientType:
    """Return the type of one gradient; `scale` is the norm that a difference is compared with."""
    limit = scale * (TOLERANCES.get(one.dtype, 1e-4) if tolerance is None else tolerance)
    copied, (step, phase, name, _) = one.copied_axes(), one.key
    local = phase == "local gradient"
    over = dict.fromkeys(one.sharded_axes(), VARYING) | dict.fromkeys(copied, INVARIANT)
    if not one.is_whole or (right is not None and not right.is_whole):
        return GradientType(step, name, over, is_missing=True, local=local)
    if right is None:
        apart = copied if one.disagreement() > limit else []
        return GradientType(step, name, over | dict.fromkeys(apart, UNKNOWN), local=local)
    truth = right.total()
    for told, total in _guesses(one, copied, limit):
        if distance(total, truth) <= limit:
            return GradientType(step, name, over | told, local=local)
    if one.disagreement() > limit:
        return GradientType(step, name, over | dict.fromkeys(copied, UNKNOWN), local=local)
    factor = _ratio(one.total(), truth)
    if distance(one.total(), added([truth], factor)) > limit * max(abs(factor), 1):
        factor = math.nan
    return GradientType(step, name, over, factor, _hint(one, factor))


def _hint(one: WholeValue, factor: float) -> str:
    """Return what may multiply a gradient by the number of ranks along an axis, or divide it."""
    for axis, (_, size) in one.axes[0].items():
        if size > 1 and math.isclose(factor, size, rel_tol=1e-3):
            return f": summed over {axis} ({size} ranks) where each has it whole, or not averaged"
        if size > 1 and math.isclose(factor * size, 1, rel_tol=1e-3):
            return f": divided once too often by {axis} ({size} ranks), or not summed"
    return ""


def _guesses(
    one: WholeValue, copied: Sequence[str], limit: float
) -> Iterator[tuple[dict[str, str], Sketch]]:
    """Yield the types over the axes where it may be partial, and the sketch of what it then is.

    Of axes with equal sizes, the one to average over is taken to be dp.
    """
    for axes in _subsets(copied):
        if one.disagreement(axes) > limit:
            continue
        total, partial = one.total(axes), dict.fromkeys(axes, PARTIAL)
        for averaged in sorted(_subsets(axes), key=lambda some: bool(some) and "dp" not in some):
            count = math.prod(one.size(axis) for axis in averaged)
            told = partial | dict.fromkeys(averaged, MEAN)
            yield told, added([total], 1 / count)


def _subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all choices of axes, small ones first."""
    return [some for number in range(len(axes) + 1) for some in combinations(axes, number)]


def _ratio(found: Sketch, right: Sketch) -> float:
    """Return the factor by which one sketch is closest to a multiple of another."""
    squares = sum(x * x for x in right)
    return sum(x * y for x, y in zip(found, right, strict=True)) / squares if squares else 0.0
