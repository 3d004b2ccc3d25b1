"""Exercise 5 of 09_zero: clip by the norm of the whole gradient."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import NO_RESULT, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, Trouble, calls_of, copied
from course_lib.checks.zero.parts import (
    ALL_WAITED,
    NOT_A_NAN,
    NOT_WAITED,
    lost_nan,
    nearly,
    unwaited_calls,
)
from course_lib.core import Event
from course_lib.ranks import record

# of the norm and of the shards: the norm may be in float32, and PyTorch divides by norm + 1e-6
NEAR = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 0.02}


@dataclass(frozen=True)
class Case:
    """Gradients, `scale[rank]` times the same numbers, and a limit for their norm."""

    name: str
    max_norm: float
    scale: tuple[float, ...] = (1, 10, 100, 1000)
    dtype: torch.dtype = torch.float64
    small: int = 0  # so many small shards beside a large one, in place of the others
    empty: bool = False  # rank 0 has no shards

    def shards(self, rank: int) -> list[Tensor]:
        """Return the shards of a rank: one is transposed, one a single number, one padding."""
        matrix = torch.tensor([[2.0, -1.0], [2.0, 3.0]]).t()
        parts = [torch.tensor([3.0, -4.0, 0.0]), matrix, torch.tensor(2.0), torch.zeros(2)]
        if self.small:
            parts = [torch.full((16,), 4.0), *[torch.full((16,), 0.2371)] * self.small]
        if self.empty and rank == 0:
            parts = []
        return [(part.double() * self.scale[rank]).to(self.dtype) for part in parts]


CASES = (
    Case("max_norm 6", 6.0, (10, 100, 1000, 1)),
    Case("a smaller gradient, max_norm 6", 6.0, (0.01, 2, 3, 20)),  # rank 0's own norm is below
    Case("max_norm 1e6", 1e6),
    Case("nothing but padding on rank 0, max_norm 6", 6.0, (0, 10, 100, 1000)),
    Case("bfloat16, max_norm 6", 6.0, dtype=torch.bfloat16),
    Case("30 small shards in bfloat16, max_norm 6", 6.0, (1,) * 4, torch.bfloat16, 30),
    Case("float16, max_norm 6", 6.0, dtype=torch.float16),
    Case("a tiny gradient, max_norm 1e-6", 1e-6, (1e-9, 1e-8, 2e-8, 3e-8)),
    Case("all gradients 0, max_norm 6", 6.0, (0, 0, 0, 0)),
    Case("all gradients 0, max_norm 0", 0.0, (0, 0, 0, 0)),
    Case("nan on rank 0, max_norm 6", 6.0, (math.nan, 10, 100, 1000)),
)

NO_SHARDS = Case("no shards on rank 0, max_norm 6", 6.0, dtype=torch.float32, empty=True)

EVERY_RANK = Cause(
    "A rank that sees a small norm of its own, or 0, or has no shards, must take part, too: call "
    "all_reduce on every rank, before you decide."
)
EMPTY = Cause("A rank may have no gradients: begin the sum of its squares with a tensor of 0.")
ALIKE = Cause(
    "The sums have to be alike: one number, in the same dtype on every rank, also on one that adds "
    "no square to it."
)
FEW_DIGITS = Cause(
    "Nearly right: compute the norm and the factor in float32 or float64, and add nothing to them."
)
EPSILON = Cause("Return the norm itself: what is added against a division by 0 is not part of it.")
OVERFLOWS = Cause("In float16, a square above 65,504 is inf: square in float32 or float64.")
ENLARGED = Cause(
    "The norm is below max_norm, and the shards have changed: what you add to the norm, against a "
    "division by 0, is not small beside this one. Compare norm and max_norm first."
)
STALLS = Cause(
    "Added up one by one in bfloat16, small squares are lost beside a large sum: sum them in one "
    "go, or in float32."
)
NORM_0 = Cause("Divided by a norm of 0: divide only where the norm is above max_norm.")
NOT_A_NUMBER = Cause("Return the norm: one number, or a tensor of one.")
NORMS_SUMMED = Cause("Norms do not add up, their squares do: take the root after the all_reduce.")
MEAN_OF_NORMS = Cause("That is a mean of norms: the squares add up, and then comes the root.")
MEAN_OF_SQUARES = Cause("A mean of the squares: they are parts of one sum. Do not divide by {p}.")
NO_ROOT = Cause("The root is missing.")
OWN_NORM = Cause("That is this rank's own norm: each rank would scale by another factor.")
LARGEST = Cause("That is the largest norm of a rank: the squares add up.")
AFTER = Cause("That is the norm after clipping: return what it was before.")
SQUARES = Cause(
    "The squares of all numbers of all shards add up, on every rank; then comes the root."
)
ONE_NUMBER = Cause(
    "One all_reduce of one number will do: the squares of the shards add up, so sum them first."
)
NOT_CHANGED = Cause(
    "Nothing has changed: scale each shard in place, with mul_, also where a rank's own norm is "
    "small. (A reshape of a transposed tensor is a copy.)"
)
SCALED_UP = Cause("A small gradient is scaled up: the factor is 1 at most.")
OWN_FACTOR = Cause("Scaled by this rank's own norm: take that of all shards of all ranks.")
INVERTED = Cause("The wrong way round: the factor is max_norm / norm.")
BY_SQUARE = Cause("Divided by the square of the norm: take the root first.")
TO_ONE = Cause("Scaled to a norm of 1, not of max_norm.")
VALUES = Cause("Each number is clipped by itself, which turns the gradient: scale all of them.")
OF_BEFORE = Cause("Scaled by the norm of an earlier call: each call has its own norm.")
ONE_FACTOR = Cause("One factor for all shards on all ranks: max_norm / norm, if norm > max_norm.")


@dataclass
class Clipped:
    """One call on one rank."""

    case: Case
    norm: Any
    grads: list[Tensor]
    calls: list[Event]
    unwaited: list[str]


def _clip(rank: int, answer: Callable[..., Any], empty: bool) -> dict[str, Clipped]:
    """Clip one gradient after the other, in one process."""
    seen = dict[str, Clipped]()
    for case in (NO_SHARDS,) if empty else CASES:
        grads = case.shards(rank)
        given = [*grads]  # a list of its own: who rebinds in it scales nothing
        with record() as log, unwaited_calls() as unwaited:
            norm = answer(given, case.max_norm)
        calls = calls_of(log.events)
        seen[case.name] = Clipped(case, copied(norm), grads, calls, list(unwaited.values()))
    return seen


def _told(at: At) -> Tensor | None:
    """Return the norm that the answer returned as a tensor, or None where it is no number."""
    norm = at.seen.norm
    is_number = norm.numel() == 1 if isinstance(norm, Tensor) else isinstance(norm, float | int)
    return torch.tensor(float(norm), dtype=torch.float64) if is_number else None


def _norms(at: At) -> Tensor:
    """Return every rank's own norm."""
    shards = [at.seen.case.shards(rank) for rank in range(at.world_size)]
    zero = torch.zeros(1, dtype=torch.float64)
    numbers = [torch.cat([zero, *(x.double().flatten() for x in each)]) for each in shards]
    return torch.stack([each.norm() for each in numbers])


def _first_norm(at: At) -> Tensor:
    """Return the norm of the call before, which was larger."""
    return _norm(replace(at, label=CASES[0].name))


def _norm(at: At) -> Tensor:
    return _norms(at).norm()


def _stalled(at: At) -> Tensor:
    """Return the norm where each rank adds up its squares one by one, in their dtype."""
    squares = [sum(shard.square().sum() for shard in _shards(at, r)) for r in range(at.world_size)]
    return torch.as_tensor(sum(squares)).double().sqrt()


def _shards(at: At, rank: int) -> list[Tensor]:
    shards: list[Tensor] = at.seen.case.shards(rank)
    return shards


def _limit(at: At) -> float:
    return at.seen.case.max_norm


def _times(factor: Callable[[At], Any]) -> Callable[[At], list[Tensor]]:
    def scaled(at: At) -> list[Tensor]:
        case: Case = at.seen.case
        return [(x.double() * factor(at)).to(case.dtype) for x in case.shards(at.rank)]

    return scaled


def _at_most_1(norm: Callable[[At], Tensor]) -> Callable[[At], list[Tensor]]:
    """Return the shards, scaled where this norm is above the limit."""
    return _times(lambda at: _limit(at) / norm(at) if norm(at) > _limit(at) else 1.0)


def _clamped(at: At) -> list[Tensor]:
    return [shard.clamp(-_limit(at), _limit(at)) for shard in at.seen.case.shards(at.rank)]


def _scaled(at: At) -> Any:
    """Return the shards; those of a norm of nan may be anything."""
    return _right(at) if _norm(at).isnan() else at.seen.grads


_right = _at_most_1(_norm)


def other_kinds(trouble: Trouble) -> bool:
    """Return whether ranks made calls of different kinds at once: one of them left a call out."""
    return len(set(trouble.mismatched)) > 1


def _is_one_number(at: At) -> bool:
    kinds = [call.kind for call in at.seen.calls]
    return kinds == ["all_reduce"] and at.seen.calls[0].num_bytes <= 8


SQUARE = "grad.double().square().sum()"
ZERO = "torch.zeros((), dtype=torch.float64)"
SENDS = "dist.all_reduce(squares)"
ROOT = "squares.sqrt()"
SENDS_ROOT = f"{SENDS}\n    norm = {ROOT}"
SCALES = "grad.mul_(max_norm / norm)"
IF_ABOVE = f"if norm > max_norm:\n        for grad in grads:\n            {SCALES}"
EACH = "for grad in grads:\n        "

CLIP = Exercise(
    key="zero-5",
    title="clip by the whole norm",
    library=("course_lib.zero.clip:clip_shards",),
    check=OnRanks(
        observe_on_rank=_clip,
        runs=lambda _p: ({"empty": False}, {"empty": True}),
        trouble=(
            ("hang", "", EVERY_RANK),
            ("mismatch", other_kinds, EVERY_RANK),
            ("mismatch", "", ALIKE),
            ("raised", "ZeroDivisionError", NORM_0),
            ("raised", "non-empty|Expected parameter|list index", EMPTY),
        ),
        expect=(
            ALL_WAITED,
            Demand(
                lambda at: at.seen.norm is None or _told(at) is not None,
                lambda at: f"returns a {type(at.seen.norm).__name__}",
                NOT_A_NUMBER,
            ),
            Numbers(
                _told,
                _norm,
                rtol=lambda at: NEAR[at.seen.case.dtype],
                what="the norm of the whole gradient",
                predicates=((lambda at, got, _i: lost_nan(got, _norm(at)), NOT_A_NAN),),
                causes=(
                    (OVERFLOWS, lambda _at: torch.tensor(math.inf).double()),
                    (NORMS_SUMMED, lambda at: _norms(at).sum()),
                    (MEAN_OF_NORMS, lambda at: _norms(at).mean()),
                    (MEAN_OF_SQUARES, lambda at: _norm(at) / at.world_size**0.5),
                    (NO_ROOT, lambda at: _norm(at) ** 2),
                    (OWN_NORM, lambda at: _norms(at)[at.rank]),
                    (STALLS, _stalled),
                    (LARGEST, lambda at: _norms(at).max()),
                    (AFTER, lambda at: _norm(at).clamp(max=_limit(at))),
                ),
                otherwise=(
                    (lambda at, got, _i: nearly(got, _norm(at)), FEW_DIGITS),
                    (lambda at, got, _i: bool(_norm(at) < 1e-6 and got > _norm(at)), EPSILON),
                ),
                look=SQUARES,
            ),
            Demand(
                lambda at: _is_one_number(at) or (at.world_size == 1 and not at.seen.calls),
                lambda at: (
                    f"calls {', '.join(call.kind for call in at.seen.calls) or 'nothing'}, of "
                    f"{sum(call.num_bytes for call in at.seen.calls)} bytes together"
                ),
                ONE_NUMBER,
            ),
            Numbers(
                _scaled,
                _right,
                rtol=lambda at: NEAR[at.seen.case.dtype],
                what="the shard",
                names=lambda at: [f"shard {k}" for k in range(len(at.seen.grads))],
                predicates=((lambda _at, got, _i: got.isnan().any(), NORM_0),),
                causes=(
                    (NOT_CHANGED, _times(lambda _at: 1.0)),
                    (VALUES, _clamped),
                    (SCALED_UP, _times(lambda at: _limit(at) / _norm(at))),
                    (OWN_FACTOR, _at_most_1(lambda at: _norms(at)[at.rank])),
                    (INVERTED, _times(lambda at: _norm(at) / _limit(at))),
                    (BY_SQUARE, _at_most_1(lambda at: _norm(at) ** 2)),
                    (OF_BEFORE, _times(lambda at: _limit(at) / _first_norm(at))),
                    (TO_ONE, _times(lambda at: 1 / _norm(at))),
                    (ENLARGED, _times(lambda at: min(1, _limit(at) / (_norm(at) + 1e-6)))),
                ),
                otherwise=((lambda at, got, i: nearly(got, _right(at)[i]), FEW_DIGITS),),
                look=ONE_FACTOR,
            ),
        ),
        success="One norm for all shards, one number sent, and nothing is scaled up.",
    ),
    wrong=(
        Edit(SENDS, "pass", OWN_NORM),
        Edit(
            SENDS,
            f"own = {ROOT}\n{SENDS}",
            OWN_FACTOR,
            also=((SCALES, "grad.mul_((max_norm / own).clamp(max=1))"),),
        ),
        Edit(SENDS_ROOT, f"norm = {ROOT}\n    dist.all_reduce(norm)", NORMS_SUMMED),
        Edit(SENDS_ROOT, f"norm = {ROOT}\n    dist.all_reduce(norm, dist.ReduceOp.MAX)", LARGEST),
        Edit(
            SENDS_ROOT,
            f"norm = {ROOT} / dist.get_world_size()\n    dist.all_reduce(norm)",
            MEAN_OF_NORMS,
        ),
        Edit(ROOT, "(squares / dist.get_world_size()).sqrt()", MEAN_OF_SQUARES),
        Edit(
            ZERO,
            "torch.zeros((), dtype=grads[0].dtype)",
            STALLS,
            also=((SQUARE, "grad.square().sum()"),),
        ),
        Edit(SQUARE, "grad.square().sum()", OVERFLOWS),
        Edit(SENDS, f"if not grads:\n    return squares\n{SENDS}", EVERY_RANK),
        Edit(
            ZERO,
            "torch.stack([(grad.double() ** 2).sum() for grad in grads]).sum()",
            EMPTY,
            also=((f"for grad in grads:\n        squares += {SQUARE}\n    ", ""),),
        ),
        Edit(IF_ABOVE, f"{EACH}grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1))", ENLARGED),
        Edit(ROOT, "squares", NO_ROOT),
        Edit("dist.all_reduce(squares)", "dist.all_reduce(squares, async_op=True)", NOT_WAITED),
        Edit("if norm > max_norm:", "if norm > 0:", SCALED_UP),
        Edit(SCALES, "grad = grad * (max_norm / norm)", NOT_CHANGED),
        Edit(
            IF_ABOVE,
            "grads[:] = [grad * (max_norm / norm).clamp(max=1) for grad in grads]",
            NOT_CHANGED,
        ),
        Edit(SCALES, "grad.mul_(max_norm / squares)", BY_SQUARE),
        Edit(SCALES, "grad.mul_(norm / max_norm)", INVERTED),
        Edit(SCALES, "grad.div_(norm)", TO_ONE),
        Edit(SCALES, "grad.clamp_(-max_norm, max_norm)", VALUES),
        Edit(SCALES, "grad.mul_(max_norm / grad.norm())", ONE_FACTOR),
        Edit(IF_ABOVE, f"{EACH}grad.mul_(norm.clamp(max=max_norm) / norm)", NORM_0),
        Edit(IF_ABOVE, f"{EACH}grad.mul_(min(1.0, max_norm / norm.item()))", NORM_0),
        Edit("return norm", "return norm.clamp(max=max_norm)", AFTER),
        Edit("return norm", "return norm + 1e-6", EPSILON),
        Edit("return norm", "return norm.clamp(min=1e-6)", EPSILON),
        Edit(ZERO, "torch.zeros(())", ALIKE, also=(("squares += ", "squares = squares + "),)),
        Edit("return norm", "pass", NO_RESULT),
        Edit("return norm", "return grads", NOT_A_NUMBER),
        Edit(SENDS, f"if {ROOT} <= max_norm:\n    return {ROOT}\n{SENDS}", EVERY_RANK),
        Edit(SENDS, f"if squares == 0:\n    return squares\n{SENDS}", EVERY_RANK),
        Edit(
            SENDS,
            "flat = torch.cat([grad.flatten() for grad in grads])\n"
            "every = flat.new_empty(dist.get_world_size() * flat.numel())\n"
            "dist.all_gather_single(every, flat)\nsquares = (every**2).sum()",
            ONE_NUMBER,
        ),
        Edit(
            f"squares += {SQUARE}",
            f"part = {SQUARE}\ndist.all_reduce(part)\nsquares += part",
            ONE_NUMBER,
            also=((f"{SENDS}\n    norm", "norm"),),
        ),
        Edit(".square().sum()", ".sum() ** 2", SQUARES),
        Edit(
            SQUARE,
            "torch.linalg.norm(grad.double(), 2 "
            "if grad.dim() == 2 and grad.isfinite().all() else None) ** 2",
            SQUARES,
        ),
        Edit(".square().sum()", ".square().nansum()", NOT_A_NAN),
        Edit(SENDS, f"squares = squares.bfloat16().float()\n{SENDS}", FEW_DIGITS),
        Edit(
            "if norm > max_norm:",
            "clip_shards.most = max(norm, getattr(clip_shards, 'most', norm))\n"
            "if clip_shards.most > max_norm:",
            OF_BEFORE,
            also=((SCALES, "grad.mul_(max_norm / clip_shards.most)"),),
        ),
        Edit(SCALES, "grad.reshape(-1).mul_(max_norm / norm)", NOT_CHANGED),
        Edit(SCALES, f"if grad.numel() > 1:\n    {SCALES}", NOT_CHANGED),
        Edit(
            SENDS,
            f"own = {ROOT}\n{SENDS}",
            NOT_CHANGED,
            also=(("if norm > max_norm:", "if norm > max_norm and own > max_norm:"),),
        ),
        Edit(
            "for grad in grads:\n        squares",
            "for grad in grads[:1]:\n        squares",
            SQUARES,
        ),
    ),
)
