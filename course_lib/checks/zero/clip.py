"""Exercise 5 of 09_zero: clip by the norm of the whole gradient."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.cases import NO_RESULT
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, EVERY_RANK, NAN, NOT_WAITED, REDUCES
from course_lib.checks.watch import CHANGED, OVERWRITTEN, UNWAITED, Watch
from course_lib.checks.zero.parts import CALLS, calls_of

NORM, SHARDS = "the norm of the whole gradient", "shards"  # facets
ONE = {f"all_reduce of {size} bytes": "all_reduce of one number" for size in (2, 4, 8)}


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
NORMS_SUMMED = Cause("Norms do not add up, their squares do: take the root after the all_reduce.")
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
VALUES = Cause("Each number is clipped by itself, which turns the gradient: scale all of them.")
ONE_FACTOR = Cause("One factor for all shards on all ranks: max_norm / norm, if norm > max_norm.")


def clip(rank: int, answer: Callable[..., Any], empty: bool) -> dict[str, Any]:
    """Clip one gradient after the other; the shards of a norm of nan may become anything."""
    watch = Watch()
    for case in (NO_SHARDS,) if empty else CASES:
        grads = case.shards(rank)
        given = [*grads]  # a list of its own: who rebinds in it scales nothing
        is_nan = any(math.isnan(scale) for scale in case.scale)
        with watch.step(case.name, **{} if is_nan else {"grads": grads}) as step:
            norm = answer(given, case.max_norm)
        calls = [ONE.get(call, call) for call in calls_of(step)]
        step.show(**{NORM: _number(norm, case.dtype), CALLS: calls})
        if not is_nan:
            step.show(shards={f"shard {k}": _near(one, case.dtype) for k, one in enumerate(grads)})
    return watch.seen


def _number(norm: Any, dtype: torch.dtype) -> Any:
    """Return a norm as a tensor; what is no number as a text."""
    is_tensor = isinstance(norm, Tensor)
    if norm is None or not (norm.numel() == 1 if is_tensor else isinstance(norm, float | int)):
        return norm if norm is None else f"a {type(norm).__name__}"
    return _near(torch.tensor(float(norm), dtype=torch.float64).to(dtype), dtype)


def _near(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 as float32: the norm may be computed in that."""
    return x.float() if x.dtype == dtype == torch.float64 else x


SQUARE, SENDS, ROOT = "grad.double().square().sum()", "dist.all_reduce(squares)", "squares.sqrt()"
ZERO, SENDS_ROOT = "torch.zeros((), dtype=torch.float64)", f"{SENDS}\n    norm = {ROOT}"
SCALES = "grad.mul_(max_norm / norm)"
IF_ABOVE = f"if norm > max_norm:\n        for grad in grads:\n            {SCALES}"
EACH = "for grad in grads:\n        "

CLIP = Exercise(
    key="zero-5",
    title="clip by the whole norm",
    library=("course_lib.zero.clip:clip_shards",),
    check=ByExample(
        observe_on_rank=clip,
        runs=lambda _p: ({"empty": False}, {"empty": True}),
        facets=(UNWAITED, OVERWRITTEN, NORM, CALLS, SHARDS, CHANGED),
        looks=(*(("mismatch", ALIKE), (NORM, SQUARES), (CALLS, ONE_NUMBER), (SHARDS, ONE_FACTOR)),),
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
        Edit(ROOT, "(squares / dist.get_world_size()).sqrt()", MEAN_OF_SQUARES),
        Edit(
            ZERO,
            "torch.zeros((), dtype=grads[0].dtype)",
            STALLS,
            also=((SQUARE, "grad.square().sum()"),),
        ),
        Edit(SQUARE, "grad.square().sum()", OVERFLOWS),
        Edit(SENDS, f"if not grads:\n    return squares\n{SENDS}", EVERY_RANK),
        Edit(SENDS, f"if {ROOT} <= max_norm:\n    return {ROOT}\n{SENDS}", EVERY_RANK),
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
        Edit(SCALES, "grad.reshape(-1).mul_(max_norm / norm)", NOT_CHANGED),
        Edit(SCALES, "grad.clamp_(-max_norm, max_norm)", VALUES),
        Edit(IF_ABOVE, f"{EACH}grad.mul_(norm.clamp(max=max_norm) / norm)", NORM_0),
        Edit(IF_ABOVE, f"{EACH}grad.mul_(min(1.0, max_norm / norm.item()))", NORM_0),
        Edit("return norm", "return norm.clamp(max=max_norm)", AFTER),
        Edit("return norm", "return norm + 1e-6", EPSILON),
        Edit("return norm", "pass", NO_RESULT),
        Edit(ZERO, "torch.zeros(())", ALIKE, also=(("squares += ", "squares = squares + "),)),
        Edit(
            f"squares += {SQUARE}",
            f"part = {SQUARE}\ndist.all_reduce(part)\nsquares += part",
            ONE_NUMBER,
            also=((f"{SENDS}\n    norm", "norm"),),
        ),
        Edit(SENDS, f"squares = squares.bfloat16().float()\n{SENDS}", FEW_DIGITS),
        *(one for one in REDUCES if one.cause in (EVERY_RANK, NAN, CALLERS)),
    ),
)
