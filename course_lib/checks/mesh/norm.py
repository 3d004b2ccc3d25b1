"""Exercise 3 of 11_mesh: clip by the norm of a gradient that is spread over the axes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Numbers
from course_lib.checks.on_ranks import At, Observed, OnRanks, Trouble, watch
from course_lib.checks.zero.clip import (
    ALIKE,
    EMPTY,
    EPSILON,
    FEW_DIGITS,
    OVERFLOWS,
)
from course_lib.checks.zero.parts import named, nearly
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh

# of the norm and of the gradients: the norm may be in float32
NEAR = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2e-3}
MESHES = {
    4: ({"pp": 2, "dp": 1, "tp": 2}, {"dp": 2, "pp": 1, "tp": 2}, {"dp": 2, "tp": 1, "pp": 2}),
    6: ({"tp": 3, "pp": 2, "dp": 1}, {"pp": 3, "dp": 1, "tp": 2}),
}
# limit, scale and dtype of the gradient: far above the limit, far below it, in float16, and so tiny
# that 1e-6 shows in the norm; in no factor does it show, as clip_grad_norm_ divides by norm + 1e-6
CALLS = (
    (2.0, 1.0, torch.float64),
    (1e6, 1.0, torch.float64),
    (2.0, 100.0, torch.float16),
    (1.0, 1e-8, torch.float64),
)
Part = tuple[Tensor, bool, bool]  # gradient, is it a shard along tp, is this the first stage of it

OWN = Cause("That is the norm of this rank's part: squares have to be added over tp and pp.")
ONE_AXIS = Cause("Added along one axis only: matrices are split over tp, layers over pp.")
ALONG_DP = Cause("Ranks along dp have the same gradient: its squares count once.")
REPLICATED = Cause("What is whole along tp counts on one of these ranks, not on each.")
NOT_WHOLE = Cause("What is whole along tp is missing: it counts on one of the ranks along tp.")
SHARDS = Cause("Shards along tp differ: each counts, not only that of the first rank along tp.")
STAGE_0 = Cause("Only stage 0 counts: `first` says of each gradient whether this stage counts it.")
TIED = Cause("A tied parameter is on two stages: it counts on the first one that holds it.")
ROOTS = Cause("Norms do not add up, squares do: take the root at the end.")
LARGEST = Cause("That is the largest norm of a rank: add up the squares of all ranks instead.")
NO_ROOT = Cause("Those are the squares: the norm is the root of their sum.")
BEFORE = Cause("Return the norm before clipping, as clip_grad_norm_ does.")
ENLARGED = Cause("A norm below the limit leaves the gradient alone: the factor is at most 1.")
NOT_ALL = Cause("Every gradient is scaled, also those that another rank has counted.")
NOT_SCALED = Cause("The gradients are as they were: scale them in place, by max_norm / norm.")
PART = Cause("A gradient need not be contiguous: multiply it as it is, in place.")
SIGNS = Cause("Clipping keeps the signs: multiply the gradients, nothing else.")
ALL_CALL = Cause("Every rank of a group makes the call, also one that adds no squares.")
LOOK = Cause(
    "Who holds which number? Add each square once, over all ranks of a replica; the norm is the "
    "root of that sum."
)


@dataclass
class ClippedStep(Observed):
    """One call: the gradients afterwards."""

    grads: list[Tensor] = field(default_factory=list)


def _parts(mesh: Mesh, rank: int, number: int) -> list[Part]:
    """Return a rank's gradients in a call: a shard, one that is whole along tp, and a tied one.

    Where there are three stages, the one in the middle trains nothing, and the last has no shard.
    """
    place = mesh.coordinates(rank)
    stage, shard, (_, scale, dtype) = place["pp"], place["tp"], CALLS[number]
    split = scale * torch.tensor([1.0 + stage, -3.0 - shard, 5.0], dtype=dtype)
    whole = scale * torch.tensor([[7.0 + stage, -2.0], [1.0, 3.0]], dtype=dtype).T  # in columns
    tied = scale * torch.tensor([[4.0, -6.0 - shard]], dtype=dtype)
    parts = [(split, True, True), (whole, False, True), (tied, True, stage == 0)]
    if mesh.size("pp") == 3:
        return {0: parts, 1: [], 2: [(whole, False, True)]}[stage]
    return parts


def _observe(rank: int, answer: Callable[..., Any], sizes: dict[str, int]) -> dict[str, Any]:
    mesh, found = RankMesh(Mesh(**sizes)), {}
    words = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    for number, (limit, scale, dtype) in enumerate(CALLS):
        parts = _parts(mesh.mesh, rank, number)
        kept = [part[0].detach() for part in parts]  # the same memory
        seen = watch(answer, mesh, parts, limit)
        value = seen.value
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            value = torch.tensor(float(value), dtype=torch.float64)
        of_call = f"{named(dtype)} gradients times {scale:g}, limit {limit:g}"
        found[f"{words}, {of_call}"] = ClippedStep(**{**vars(seen), "value": value}, grads=kept)
    return found


def _other_kinds(trouble: Trouble) -> bool:
    """Return whether ranks made calls of different kinds at once: one of them left a call out."""
    return len(set(trouble.mismatched)) > 1


def _mesh(at: At) -> Mesh:
    return Mesh(**at.options["sizes"])


def _limit(at: At) -> float:
    return CALLS[at.number][0]


def _rtol(at: At) -> float:
    return NEAR[CALLS[at.number][2]]


def _squares(at: At, rank: int, counts: Callable[[bool, bool, bool], bool]) -> float:
    """Return the sum of a rank's squares; `counts(split, first, is tp index 0)` says of which."""
    zero, parts = _mesh(at).coordinates(rank)["tp"] == 0, _parts(_mesh(at), rank, at.number)
    counted = [grad.double() for grad, split, first in parts if counts(split, first, zero)]
    return sum(float((grad**2).sum()) for grad in counted)


def _once(split: bool, first: bool, zero: bool) -> bool:
    return first and (split or zero)


def _everything(split: bool, first: bool, zero: bool) -> bool:
    return True


def _of(
    *axes: str,
    counts: Callable[[bool, bool, bool], bool] = _once,
    total: Callable[[list[float]], float] = lambda squares: sum(squares) ** 0.5,
) -> Callable[[At], Tensor]:
    """Return what comes of the squares of the ranks along some axes."""

    def norm(at: At) -> Tensor:
        squares = [_squares(at, rank, counts) for rank in _mesh(at).group(at.rank, *axes)]
        return torch.tensor(total(squares), dtype=torch.float64)

    return norm


RIGHT = _of("tp", "pp")


def _of_stage_0(at: At) -> Tensor:
    """Return the norm of what the first stage counts."""
    mesh = _mesh(at)
    ranks = [r for r in mesh.group(at.rank, "tp", "pp") if mesh.coordinates(r)["pp"] == 0]
    return torch.tensor(sum(_squares(at, r, _once) for r in ranks), dtype=torch.float64).sqrt()


def _scaled(
    factor: Callable[[float, float], float],
    which: Callable[[bool, bool, bool], bool] = _everything,
) -> Callable[[At], list[Tensor]]:
    """Return the gradients times factor(limit, norm), those that `which` says."""

    def scaled(at: At) -> list[Tensor]:
        mesh, times = _mesh(at), factor(_limit(at), float(RIGHT(at)))
        zero = mesh.coordinates(at.rank)["tp"] == 0
        return [
            (grad.double() * (times if which(split, first, zero) else 1.0)).to(grad.dtype)
            for grad, split, first in _parts(mesh, at.rank, at.number)
        ]

    return scaled


def _left_as_it_is(at: At, got: Tensor, item: int) -> bool:
    """Return whether every rank left this gradient alone, and it is not contiguous."""
    for other in at.everyone:
        parts = _parts(_mesh(other), other.rank, other.number)
        if item < len(parts) and not torch.equal(other.seen.grads[item], parts[item][0]):
            return False
    return not got.is_contiguous() and _clip(_limit(at), float(RIGHT(at))) < 1


def _clip(limit: float, norm: float) -> float:
    return min(1.0, limit / norm)


def _clipped(mesh: RankMesh, parts: list[Part], max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and the factor."""
    squares = torch.zeros((), dtype=torch.float64)
    for grad, split, first in parts:
        if first and (split or mesh.index("tp") == 0):
            squares += (grad.double() ** 2).sum()
    for axis in ("tp", "pp"):
        dist.all_reduce(squares, group=mesh.group(axis))
    return squares.sqrt(), (max_norm / squares.sqrt()).clamp(max=1.0)


def _replaces(mesh: RankMesh, parts: list[Part], max_norm: float) -> Tensor:
    norm, factor = _clipped(mesh, parts, max_norm)
    parts[:] = [(grad * factor, split, first) for grad, split, first in parts]
    return norm


def _drops_signs(mesh: RankMesh, parts: list[Part], max_norm: float) -> Tensor:
    norm, factor = _clipped(mesh, parts, max_norm)
    for grad, *_ in parts:
        grad.pow_(2).sqrt_().mul_(factor)
    return norm


def _flattens(mesh: RankMesh, parts: list[Part], max_norm: float) -> Tensor:
    norm, factor = _clipped(mesh, parts, max_norm)
    for grad, *_ in parts:
        grad.reshape(-1).mul_(factor)
    return norm


def _nothing_to_do(mesh: RankMesh, parts: list[Part], max_norm: float) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    norm, factor = _clipped(mesh, parts, max_norm)
    for grad, *_ in parts:
        grad *= factor
    return norm


def _tp_for_shards(mesh: RankMesh, parts: list[Part], max_norm: float) -> Tensor:
    squares = torch.zeros((), dtype=torch.float64)
    for grad, split, first in parts:
        if first and (split or mesh.index("tp") == 0):
            squares += (grad.double() ** 2).sum()
    if any(split for _, split, _ in parts):
        dist.all_reduce(squares, group=mesh.group("tp"))
    dist.all_reduce(squares, group=mesh.group("pp"))
    for grad, *_ in parts:
        grad *= (max_norm / squares.sqrt()).clamp(max=1.0)
    return squares.sqrt()


COUNTS = 'first and (split or mesh.index("tp") == 0)'
ALONG = 'for axis in ("tp", "pp"):'
ADDS = "dist.all_reduce(squares, group=mesh.group(axis))"
FACTOR = "min(1.0, max_norm / norm)"

NORM = Exercise(
    key="mesh-3",
    title="clip across axes",
    check=OnRanks(
        observe_on_rank=_observe,
        worlds=(4, 6),
        runs=lambda p: [{"sizes": sizes} for sizes in MESHES[p]],
        trouble=(
            ("hang", "", ALL_CALL),
            ("mismatch", _other_kinds, ALL_CALL),
            ("mismatch", "", ALIKE),
            ("raised", "non-empty|Expected parameter|list index", EMPTY),
        ),
        expect=(
            Numbers(
                "value",
                RIGHT,
                rtol=_rtol,
                what="the norm",
                causes=(
                    (OVERFLOWS, lambda _at: torch.tensor(math.inf, dtype=torch.float64)),
                    (REPLICATED, _of("tp", "pp", counts=lambda s, first, z: first)),
                    (TIED, _of("tp", "pp", counts=lambda split, f, zero: split or zero)),
                    (TIED, _of("tp", "pp", counts=lambda split, f, zero: (f and split) or zero)),
                    (NOT_WHOLE, _of("tp", "pp", counts=lambda split, first, z: first and split)),
                    (SHARDS, _of("tp", "pp", counts=lambda s, first, zero: first and zero)),
                    (REPLICATED, _of("tp", "pp", counts=_everything)),
                    (ALONG_DP, _of("tp", "pp", "dp")),
                    (ONE_AXIS, _of("tp")),
                    (ONE_AXIS, _of("pp")),
                    (STAGE_0, _of_stage_0),
                    (OWN, _of(counts=_everything)),
                    (OWN, _of()),
                    (ROOTS, _of("tp", "pp", total=lambda many: sum(s**0.5 for s in many))),
                    (LARGEST, _of("tp", "pp", total=lambda many: max(many) ** 0.5)),
                    (NO_ROOT, _of("tp", "pp", total=sum)),
                    (BEFORE, lambda at: RIGHT(at).clamp(max=_limit(at))),
                    (BEFORE, lambda at: torch.tensor(_limit(at), dtype=torch.float64)),
                ),
                otherwise=(
                    (lambda at, got, _: nearly(got, RIGHT(at)), FEW_DIGITS),
                    (lambda at, got, _: bool(RIGHT(at) < 1e-6 and got > RIGHT(at)), EPSILON),
                ),
                look=LOOK,
            ),
            Numbers(
                lambda at: at.seen.grads,
                _scaled(_clip),
                rtol=_rtol,
                what="the gradient",
                causes=(
                    (NOT_SCALED, _scaled(lambda limit, norm: 1.0)),
                    (ENLARGED, _scaled(lambda limit, norm: limit / norm)),
                    (SIGNS, lambda at: [grad.abs() for grad in _scaled(_clip)(at)]),
                    (NOT_ALL, _scaled(_clip, which=_once)),
                    (NOT_ALL, _scaled(_clip, which=lambda split, f, z: split)),
                    (NOT_ALL, _scaled(_clip, which=lambda split, first, z: first)),
                ),
                predicates=((_left_as_it_is, PART),),
                look=Cause("One factor for all ranks and gradients: max_norm / norm, at most 1."),
            ),
        ),
        success="Every number counts once, on five meshes; all ranks scale alike.",
    ),
    wrong=(
        Edit(ALONG, 'for axis in ("tp",):', ONE_AXIS),
        Edit(ALONG, 'for axis in ("pp",):', ONE_AXIS),
        Edit(ALONG, 'for axis in ("tp", "pp", "dp"):', ALONG_DP),
        Edit(ADDS, "pass", OWN),
        Edit(COUNTS, "first", REPLICATED),
        Edit(COUNTS, 'split or mesh.index("tp") == 0', TIED),
        Edit(COUNTS, "True", REPLICATED),
        Edit(COUNTS, 'first and split or mesh.index("tp") == 0', TIED),
        Edit("if first and", 'if mesh.index("pp") == 0 and', STAGE_0),
        Edit(COUNTS, "first and split", NOT_WHOLE),
        Edit(COUNTS, 'first and mesh.index("tp") == 0', SHARDS),
        Edit("torch.zeros((), dtype=torch.float64)", "torch.zeros(())", ALIKE,
             also=(("squares += ", "squares = squares + "),)),
        Edit("torch.zeros((), dtype=torch.float64)", "0.0", EMPTY),
        Edit(ALONG, f"squares = squares.sqrt()\n{ALONG}", ROOTS,
             also=(("norm = squares.sqrt()", "norm = squares"),)),
        Edit(ADDS, "dist.all_reduce(squares, dist.ReduceOp.MAX, group=mesh.group(axis))", LARGEST),
        Edit("norm = squares.sqrt()", "norm = squares", NO_ROOT),
        Edit("return norm", "return norm.clamp(max=max_norm)", BEFORE),
        Edit(FACTOR, "max_norm / norm", ENLARGED),
        Edit("norm = squares.sqrt()", "norm = squares.sqrt() + 1e-8", EPSILON),
        Edit("(grad.double() ** 2)", "(grad**2)", OVERFLOWS),
        Edit("(grad.double() ** 2)", "(grad.bfloat16() ** 2)", FEW_DIGITS),
        Edit("grad *= ", "grad = grad * ", NOT_SCALED),
        Edit(f"grad *= {FACTOR}", f"if {COUNTS}:\n    grad *= {FACTOR}", NOT_ALL,
             also=(("for grad, *_ in parts", "for grad, split, first in parts"),)),
        Edit(ALONG, f"if squares == 0:\n    return squares\n{ALONG}", ALL_CALL,
             also=(("if first and", "if mesh.rank == 0 and first and"),)),
        Own(_replaces, NOT_SCALED),
        Own(_drops_signs, SIGNS),
        Own(_flattens, PART),
        Own(_nothing_to_do, ALL_CALL),
        Own(_tp_for_shards, ONE_AXIS),
    ),
)  # fmt: skip
