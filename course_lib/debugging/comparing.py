"""Compare two recorded runs: the first step, operation, parameter and rank where they differ.

Runs with the same mesh are compared rank by rank and to the last bit, activations too. Between
other meshes, or with a tolerance, whole parameters and gradients are compared by their sketches.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import TypeVar

from course_lib.core.errors import CourseError
from course_lib.debugging.activations import where_activations_part
from course_lib.debugging.gradient_types import TOLERANCES, GradientType, type_of_gradient
from course_lib.debugging.kept_values import kept_path, largest_difference
from course_lib.debugging.sketches import distance
from course_lib.debugging.value_records import PHASES, RankValues, Value, read_values
from course_lib.debugging.wholes import FLOOR, ValueKey, WholeValue, axes_of, scales, wholes

T = TypeVar("T")
OF_WHOLE = ("start", "gradient", "parameter")  # phases that do not depend on the mesh
ORDER = {phase: max(number, 2) if number else 0 for number, phase in enumerate(PHASES)}
WORDS = {
    "start": "the weights at the start",
    "input": "the input of the model",
    "forward": "the output of",
    "backward": "the gradient of the output of",
    "local gradient": "the gradient, before it is reduced, of",
    "gradient": "the gradient of",
    "parameter": "the parameter",
}
MEANS = {
    "start": "the runs start from other weights: seed, checkpoint, or how they are split",
    "input": "the model reads other data: sampler, order, or the share of a rank",
    "forward": "what this module takes is equal, and what it returns is not",
    "backward": "the forward pass is equal: look at the loss, and at what follows this module",
    "local gradient": "activations and their gradients are equal: the parameter's own backward",
    "gradient": "up to the reduction all is equal: who sums it, over which ranks, how often",
    "parameter": "the gradients are equal: clipping, learning rate, moments, weight decay",
}
OF_WHOLES = "the weights are equal: data, forward, backward, or who sums this gradient"
OF_COPIES = {
    "start": "the ranks start from other weights: seed, checkpoint, or a broadcast that is missing",
    "gradient": "it is not reduced, or over other ranks: these copies will drift apart",
    "parameter": "the gradients were equal: the ranks' optimizers do not do the same",
}


@dataclass(frozen=True)
class ValueDifference:
    """A tensor in which two runs differ.

    ranks     where it differs; of a tensor over all ranks, those that hold it
    relative  the norm of the difference by the norm of the tensor, about; inf where only one run
              has it, or where its shape differs
    kind      of a gradient: what the ranks have of it
    """

    key: ValueKey
    ranks: tuple[int, ...]
    relative: float
    kind: GradientType | None = None

    def __str__(self) -> str:
        _, phase, name, call = self.key
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        micro_batch = f", micro-batch {call}" if call else ""
        of_name = "" if phase == "input" else f" {name}"
        by = (
            "missing, or of another shape or dtype"
            if math.isinf(self.relative)
            else f"{self.relative:.1e}"
        )
        return f"{WORDS[phase]}{of_name}{micro_batch}, on {ranks} ({by})"


@dataclass(frozen=True)
class RunComparison:
    """How two runs differ; `str()` is the report.

    differences   all of them, in the order of computation
    num_compared  by step and phase: the tensors that both runs have
    is_by_rank    rank by rank; False: whole tensors
    where         of whole gradients: where before them activations part
    """

    names: tuple[str, ...]  # of the runs; of one: its copies of the same tensors were compared
    differences: Sequence[ValueDifference]
    num_compared: dict[tuple[int, str], int]
    is_by_rank: bool
    where: str = ""

    @property
    def first(self) -> ValueDifference | None:
        """The first difference, or None."""
        return self.differences[0] if self.differences else None

    def of_first_step(self) -> list[ValueDifference]:
        """Return the differences of the first step that has one."""
        return [one for one in self.differences if self.first and one.key[0] == self.first.key[0]]

    def table(self) -> list[tuple[str, int, int, str]]:
        """Return for each phase of the first step that differs: name, tensors, different ones, and
        the first of them.
        """
        if self.first is None:
            return []
        step, found = self.first.key[0], self.of_first_step()
        rows = []
        for phase in PHASES:
            count = self.num_compared.get((step, phase), 0)
            here = [one for one in found if one.key[1] == phase]
            if count or here:
                rows.append((phase, count, len(here), str(here[0]) if here else ""))
        return rows

    def __str__(self) -> str:
        how = "rank by rank" if self.is_by_rank else "as whole tensors"
        total = sum(self.num_compared.values())
        is_one = len(self.names) == 1
        if self.first is None:
            whose = f"{total} tensors that several ranks of" if is_one else f"{total} tensors of"
            agree = "hold are the same on all of them" if is_one else f"agree, {how}"
            return f"No difference: {whose} {' and '.join(self.names)} {agree}."
        step, phase = self.first.key[:2]
        subject = f"Copies on ranks of {self.names[0]}" if is_one else "The runs"
        lines = [
            f"{subject} differ from step {step} on ({total} tensors compared).",
            f"first difference: {self.first}",
            f"  {self.where or (OF_COPIES if is_one else MEANS)[phase]}",
        ]
        lines += [f"  {said}" for said in self._values_said()]
        kinds = [one.kind for one in self.of_first_step() if one.kind and not one.kind.is_right]
        lines += [f"  {kind}" for kind in kinds[:10]]
        lines += [f"  and {len(kinds) - 10} gradients more"] * (len(kinds) > 10)
        lines.append(f"{'phase':<16}{'compared':>9}{'differ':>8}  first")
        lines += [f"{one:<16}{n:>9}{bad:>8}  {said}" for one, n, bad, said in self.table()]
        return "\n".join(lines)

    def _values_said(self) -> Iterator[str]:
        """Yield where in the tensor the first difference is, if the runs kept its values."""
        if self.first and self.is_by_rank:
            (step, phase, tensor, call), rank = self.first.key, self.first.ranks[0]
            a, b = (kept_path(Path(name), rank, step) for name in self.names)
            said = largest_difference(a, b, (phase, tensor, call))
            yield from [said] if said else []


def compare_runs(
    a: str | PathLike[str], b: str | PathLike[str], *, tolerance: float | None = None
) -> RunComparison:
    """Compare two runs that `record_run` or `course_lib.train --record-values` has recorded.

    tolerance   the largest difference of two tensors relative to their norm; None: none for runs
                on the same mesh, else by dtype (`TOLERANCES`)

    The steps that both have are compared; a tensor that only one of them has is a difference where
    the mesh is the same. Between meshes, rounding grows with the steps: float64 is the dtype that
    tells an error from it.

    Raises: CourseError for a folder without recorded values, and for runs without a common step
    """
    runs = [read_values(Path(folder)) for folder in (a, b)]
    names = (str(a), str(b))
    both = _steps(runs[0]) & _steps(runs[1])
    if not both:
        raise CourseError(
            f"{a}, {b}: need two runs with a step in common; they have none. Try the same --steps."
        )
    if _is_same_mesh(*runs):
        found, counts = _by_rank(runs[0], runs[1], both, tolerance)
        return RunComparison(names, found, counts, is_by_rank=True)
    found, counts = _as_wholes(runs[0], runs[1], both, tolerance)
    where = ""
    if found and found[0].key[1] == "gradient":
        run, reference = sorted(runs, key=len, reverse=True)
        where = where_activations_part(run, reference, found[0].key[0]) or OF_WHOLES
    return RunComparison(names, found, counts, is_by_rank=False, where=where)


def compare_copies(folder: str | PathLike[str], *, tolerance: float = 0.0) -> RunComparison:
    """Compare what several ranks of one run hold of the same tensor, which must stay the same.

    It needs no other run. The default tolerance is none: an all-reduce gives all ranks the same.

    Raises: CourseError for a folder without recorded values, or with those of one rank
    """
    run = read_values(Path(folder))
    found, counts = list[ValueDifference](), dict[tuple[int, str], int]()
    every = wholes(run, OF_WHOLE)
    limits = scales(every)
    for key, one in every.items():
        if not one.copied_axes():
            continue
        counts[key[:2]] = counts.get(key[:2], 0) + 1
        if relative := _beyond(one.disagreement(), limits[key], tolerance):
            found.append(ValueDifference(key, one.ranks, relative))
    if not counts:
        raise CourseError(
            f"{folder}: need a run in which several ranks hold the same tensors; this one has none."
            " Try course diff with a second run."
        )
    return RunComparison((str(folder),), _in_order(found), counts, is_by_rank=False)


def _in_order(found: Sequence[ValueDifference]) -> list[ValueDifference]:
    order = {phase: number for number, phase in enumerate(PHASES)}
    return sorted(found, key=lambda one: (one.key[0], order[one.key[1]]))


def _steps(run: Sequence[RankValues]) -> set[int]:
    return {key[0] for one in run for key in one.values}


def _is_same_mesh(a: Sequence[RankValues], b: Sequence[RankValues]) -> bool:
    return axes_of(a) == axes_of(b)


def _by_rank(
    a: Sequence[RankValues], b: Sequence[RankValues], steps: set[int], tolerance: float | None
) -> tuple[list[ValueDifference], dict[tuple[int, str], int]]:
    """Return the differences rank by rank, each tensor once, and how many were compared."""
    found: list[tuple[tuple[int, ...], ValueDifference]] = []
    counts: dict[tuple[int, str], int] = {}
    for one, other in zip(a, b, strict=True):
        stage = one.axes.get("pp", (0, 1))[0]
        largest = _largest(one)
        for number, key in enumerate(dict.fromkeys([*one.values, *other.values])):
            step, phase, _, call = key
            pair = (_found(one.values, key), _found(other.values, key))
            if step not in steps or (phase == "start" and None in pair):
                continue
            counts[step, phase] = counts.get((step, phase), 0) + 1
            relative = _apart(*pair, largest, tolerance)
            if relative:
                flow = -stage if phase == "backward" else stage
                place = (step, ORDER[phase], call, flow, number, one.rank)
                found.append((place, ValueDifference(key, (one.rank,), relative)))
    ordered = [difference for _, difference in sorted(found, key=lambda pair: pair[0])]
    return list(_same_tensors(ordered)), counts


def _found(values: Mapping[ValueKey, T], key: ValueKey) -> T | None:
    """Return what was recorded; for the start of a run that resumed, the other run's weights."""
    step, phase, name, call = key
    before = (step - 1, "parameter", name, call)
    return values.get(key) or (values.get(before) if phase == "start" else None)


def _same_tensors(differences: Sequence[ValueDifference]) -> Iterator[ValueDifference]:
    """Put neighbours together that are one tensor on several ranks."""
    for _, group in groupby(differences, key=lambda one: one.key):
        same = list(group)
        ranks = tuple(sorted(rank for one in same for rank in one.ranks))
        yield replace(same[0], ranks=ranks, relative=max(one.relative for one in same))


def _largest(one: RankValues) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], float] = {}
    for key, value in one.values.items():
        found[key[:2]] = max(found.get(key[:2], 0.0), value.norm)
    return found


def _apart(
    a: Value | None,
    b: Value | None,
    largest: dict[tuple[int, str], float],
    tolerance: float | None,
) -> float:
    """Return the relative difference of two tensors; 0.0 if they count as equal."""
    if a is None or b is None or (a.shape, a.boxes, a.dtype) != (b.shape, b.boxes, b.dtype):
        return math.inf
    if a.bits == b.bits:
        return 0.0
    scale = max(a.norm, FLOOR * largest[a.key[:2]] if tolerance else 0.0)
    return _beyond(distance(a.sketch, b.sketch), scale, tolerance or 0.0) or (
        0.0 if tolerance else 1e-300  # bits differ where values do not: -0.0 and 0.0
    )


def _beyond(apart: float, scale: float, tolerance: float) -> float:
    """Return the relative difference if it is more than the tolerance, else 0.0."""
    if math.isnan(apart) or math.isnan(scale):
        return math.inf
    relative = apart / scale if scale else math.inf * bool(apart) if apart else 0.0
    return relative if relative > tolerance else 0.0


def _as_wholes(
    a: Sequence[RankValues], b: Sequence[RankValues], steps: set[int], tolerance: float | None
) -> tuple[list[ValueDifference], dict[tuple[int, str], int]]:
    """Return the differences of whole tensors; the run on fewer ranks is the reference."""
    run, reference = (b, a) if len(b) > len(a) else (a, b)
    own, right = wholes(run, OF_WHOLE), wholes(reference, OF_WHOLE)
    limits, counts = scales(right), dict[tuple[int, str], int]()
    found = []
    for key in dict.fromkeys([*right, *own]):
        step, phase, _, _ = key
        one, truth = _found(own, key), _found(right, key)
        if step in steps and phase == "gradient" and (one is None) != (truth is None):
            only = one or truth
            found += [ValueDifference(key, only.ranks, math.inf)] if only else []
        if step not in steps or one is None or truth is None:
            continue
        counts[step, phase] = counts.get((step, phase), 0) + 1
        relative, kind = _of_whole(one, truth, limits[truth.key], tolerance)
        if relative:
            found.append(ValueDifference(key, one.ranks, relative, kind))
    return _in_order(found), counts


def _of_whole(
    own: WholeValue, truth: WholeValue, scale: float, tolerance: float | None
) -> tuple[float, GradientType | None]:
    """Return the relative difference, 0.0 if they count as equal, and the type of a gradient."""
    if own.shape != truth.shape or not (own.is_whole and truth.is_whole):
        kind = type_of_gradient(own, truth, scale) if own.key[1] == "gradient" else None
        return math.inf, kind if own.shape == truth.shape else None
    limit = TOLERANCES.get(own.dtype, 1e-4) if tolerance is None else tolerance
    apart = max(distance(own.total(), truth.total()), own.disagreement())
    relative = _beyond(apart, scale, limit)
    is_told = relative and own.key[1] == "gradient"
    return relative, type_of_gradient(own, truth, scale, limit) if is_told else None
