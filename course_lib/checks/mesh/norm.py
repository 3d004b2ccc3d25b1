"""Exercise 3 of 11_mesh: clip by the norm of a gradient that is spread over the axes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, EVERY_RANK, NAN, NOT_WAITED, REDUCES
from course_lib.checks.watch import CHANGED, OVERWRITTEN, UNWAITED, Watch
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh

NORM, GRADIENTS = "the norm", "gradients"
MESHES = {
    4: ({"pp": 2, "dp": 1, "tp": 2}, {"dp": 2, "pp": 1, "tp": 2}, {"dp": 2, "tp": 1, "pp": 2}),
    6: ({"tp": 3, "pp": 2, "dp": 1}, {"pp": 3, "dp": 1, "tp": 2}),
}
# limit, scale and dtype of the gradient: far above the limit, far below it, in float16, and so tiny
# that 1e-6 shows in the norm; in no factor does it show, as clip_grad_norm_ divides by norm + 1e-6;
# last, one that is nan, which may become anything
CALLS = (
    (2.0, 1.0, torch.float64),
    (1e6, 1.0, torch.float64),
    (2.0, 100.0, torch.float16),
    (1.0, 1e-8, torch.float64),
    (2.0, math.nan, torch.float64),
)
Part = tuple[Tensor, bool, bool]  # gradient, is it a shard along tp, is this the first stage of it

OWN = Cause("That is the norm of this rank's part: squares have to be added over tp and pp.")
ONE_AXIS = Cause("Added along one axis only: matrices are split over tp, layers over pp.")
ALONG_DP = Cause("Ranks along dp have the same gradient: its squares count once.")
REPLICATED = Cause("What is whole along tp counts on one of these ranks, not on each.")
NOT_WHOLE = Cause("What is whole along tp is missing: it counts on one of the ranks along tp.")
TIED = Cause("A tied parameter is on two stages: it counts on the first one that holds it.")
ROOTS = Cause("Norms do not add up, squares do: take the root at the end.")
NO_ROOT = Cause("Those are the squares: the norm is the root of their sum.")
OVERFLOWS = Cause("In float16, a square above 65,504 is inf: square in float32 or float64.")
EPSILON = Cause("Return the norm itself: what is added against a division by 0 is not part of it.")
BEFORE = Cause("Return the norm before clipping, as clip_grad_norm_ does.")
ENLARGED = Cause("A norm below the limit leaves the gradient alone: the factor is at most 1.")
NOT_ALL = Cause("Every gradient is scaled, also those that another rank has counted.")
NOT_SCALED = Cause(
    "The gradients are as they were: scale each as it is, in place. (A reshape of one that is not "
    "contiguous is a copy.)"
)
ALIKE = Cause(
    "All ranks have to make the same calls, each with one number of the same dtype, also a rank "
    "that adds no square to it."
)
EMPTY = Cause("A rank may have no gradients: begin the sum of its squares with a tensor of 0.")
LOOK = Cause(
    "Who holds which number? Add each square once, over all ranks of a replica; the norm is the "
    "root of that sum."
)
ONE_FACTOR = Cause("One factor for all ranks and gradients: max_norm / norm, at most 1.")


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


def _clip(rank: int, answer: Callable[..., Any], sizes: dict[str, int]) -> dict[str, Any]:
    mesh, watch = RankMesh(Mesh(**sizes)), Watch()
    words = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    for number, (limit, scale, dtype) in enumerate(CALLS):
        parts = _parts(mesh.mesh, rank, number)
        grads = [grad.detach() for grad, *_ in parts]  # the same memory
        name = str(dtype).removeprefix("torch.")
        label = f"{words}, {name} gradients times {scale:g}, limit {limit:g}"
        with watch.step(label) as step:
            norm = answer(mesh, parts, limit)
        step.show(**{NORM: _number(norm, dtype)})
        if not math.isnan(scale):
            step.show(**{GRADIENTS: [_near(grad) for grad in grads]})
    return watch.seen


def _number(norm: Any, dtype: torch.dtype) -> Any:
    """Return a norm as a tensor; what is no number as a text."""
    is_number = norm.numel() == 1 if isinstance(norm, Tensor) else isinstance(norm, int | float)
    if is_number:
        return _near(torch.tensor(float(norm), dtype=torch.float64).to(dtype))
    return norm if norm is None else f"a {type(norm).__name__}"


def _near(x: Tensor) -> Tensor:
    """Return float64 as float32: the norm may be computed in that."""
    return x.float() if x.dtype == torch.float64 else x


COUNTS = 'first and (split or mesh.index("tp") == 0)'
ALONG = 'for axis in ("tp", "pp"):'
ADDS = "dist.all_reduce(squares, group=mesh.group(axis))"
SCALES, FACTOR = "grad *= min(1.0, max_norm / norm)", "min(1.0, max_norm / norm)"
ZERO, ROOT = "torch.zeros((), dtype=torch.float64)", "norm = squares.sqrt()"

CLIP = Exercise(
    key="mesh-3",
    title="clip across axes",
    check=ByExample(
        observe_on_rank=_clip,
        worlds=(4, 6),
        runs=lambda p: [{"sizes": sizes} for sizes in MESHES[p]],
        facets=(UNWAITED, OVERWRITTEN, NORM, GRADIENTS, CHANGED),
        looks=(("mismatch", ALIKE), (NORM, LOOK), (GRADIENTS, ONE_FACTOR)),
        success="Every number counts once, on five meshes; all ranks scale alike.",
    ),
    wrong=(
        Edit(ALONG, 'for axis in ("tp",):', ONE_AXIS),
        Edit(ALONG, 'for axis in ("pp",):', ONE_AXIS),
        Edit(ALONG, 'for axis in ("tp", "pp", "dp"):', ALONG_DP),
        Edit(ADDS, "pass", OWN),
        Edit(COUNTS, "first", REPLICATED),
        Edit(COUNTS, "True", REPLICATED),
        Edit(COUNTS, "first and split", NOT_WHOLE),
        Edit(COUNTS, 'split or mesh.index("tp") == 0', TIED),
        Edit(ZERO, "torch.zeros(())", ALIKE, also=(("squares += ", "squares = squares + "),)),
        Edit(ZERO, "0.0", EMPTY),
        Edit(ALONG, f"squares = squares.sqrt()\n{ALONG}", ROOTS, also=((ROOT, "norm = squares"),)),
        Edit(ROOT, "norm = squares", NO_ROOT),
        Edit("(grad.double() ** 2)", "(grad**2)", OVERFLOWS),
        Edit(ROOT, f"{ROOT} + 1e-6", EPSILON),
        Edit("return norm", "return norm.clamp(max=max_norm)", BEFORE),
        Edit(FACTOR, "max_norm / norm", ENLARGED),
        Edit("grad *= ", "grad = grad * ", NOT_SCALED),
        Edit(SCALES, f"grad.reshape(-1).mul_({FACTOR})", NOT_SCALED),
        Edit(
            SCALES,
            f"if {COUNTS}:\n    {SCALES}",
            NOT_ALL,
            also=(("for grad, *_ in parts", "for grad, split, first in parts"),),
        ),
        Edit(ALONG, f"if not parts:\n    return squares\n{ALONG}", EVERY_RANK),
        *(one for one in REDUCES if one.cause in (NOT_WAITED, NAN, CALLERS)),
    ),
)
