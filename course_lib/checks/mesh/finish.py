"""Exercise 2 of 11_mesh: which collective on which axis, at the end of a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expect import KEEPS
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import (
    CALLERS,
    DIGITS,
    KEEPS_DTYPE,
    NAN,
    NOT_WAITED,
    REDUCES,
)
from course_lib.checks.watch import CHANGED, OVERWRITTEN, UNWAITED, Watch
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh

GRADIENTS, LOSS, AT_THE_END = "gradients", "the mean loss", "the losses of all calls at the end"
LAST_RANKS = (1.0, 1.0, torch.nan)  # times what the last rank's first gradient is, call by call
TENTH_DIGIT = 1 + 2**-31  # which float32 does not keep
MESHES = {
    4: ({"pp": 2, "dp": 2, "tp": 1}, {"dp": 2, "pp": 1, "tp": 2}, {"tp": 2, "dp": 1, "pp": 2}),
    6: ({"pp": 2, "dp": 3, "tp": 1}, {"tp": 2, "pp": 1, "dp": 3}, {"pp": 3, "dp": 2, "tp": 1}),
}

WORLD = Cause("Averaged over all ranks: those of other stages and shards have other parameters.")
ALONG_TP = Cause("Averaged along tp: each rank there has the gradient of its own shard.")
ALONG_PP = Cause("Averaged along pp: each rank there has the gradients of its own layers.")
NOT_AVERAGED = Cause(
    "Still this replica's gradients: average along dp, in place, in the memory that they have."
)
SUMMED = Cause("Summed, not averaged: divide by the size of dp.")
BY_WORLD = Cause("Divided by the number of all ranks: the sum is over dp only.")
LOSS_TWICE = Cause("The loss is averaged twice: divide it by the size of dp once.")
LOSS_SUMMED = Cause("The losses are summed: a mean over replicas is divided by the size of dp.")
NOT_TOLD = Cause("Only the last stage knows the loss: it has to tell the others, along pp.")
BY_STAGES = Cause("Divided by the stages, too: along pp one rank knows the loss, the others add 0.")
OWN_LOSS = Cause("That is one replica's loss: average along dp.")
ALL_CALL = Cause(
    "Every rank of a group makes the call, whatever its numbers are: a stage without the loss "
    "brings 0, in float64."
)
OF_DP = Cause("Multiply by the size of dp: the digits say which ranks are in it.")


def _grads(mesh: Mesh, rank: int, number: int) -> list[Tensor]:
    """Return a rank's gradients: other numbers in each call, times 10**rank; one can be all 0."""
    idle = mesh.coordinates(rank)["dp"] == 0
    last = LAST_RANKS[number] if rank == mesh.world_size - 1 else 1.0
    digits = [(1.0 + number + torch.arange(n).double()) * 10.0**rank for n in (3, 2, 3)]
    return [digits[0] * last, digits[1], digits[2] * (0.0 if idle else -1.0)]


def _loss(mesh: Mesh, rank: int, number: int) -> Tensor | None:
    """Return the loss that a rank knows: 10**(index along dp); None before the last stage."""
    place = mesh.coordinates(rank)
    loss = (1.0 + number) * 10.0 ** place["dp"] * TENTH_DIGIT
    is_last = place["pp"] == mesh.size("pp") - 1
    return torch.tensor(loss, dtype=torch.float64) if is_last else None


def _finish(rank: int, answer: Callable[..., Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Finish several steps; the gradients lie in a bucket, as those of DDP do."""
    mesh, watch, losses = RankMesh(Mesh(**sizes)), Watch(), list[Any]()
    words = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    for number in range(len(LAST_RANKS)):
        whole = _grads(mesh.mesh, rank, number)
        bucket = torch.cat(whole)
        given = list(bucket.split([grad.numel() for grad in whole]))
        loss = _loss(mesh.mesh, rank, number)
        with watch.step(f"{words}, call {number + 1}", loss=loss) as step:
            losses.append(answer(mesh, loss, given))
        parts = bucket.split([grad.numel() for grad in whole])
        step.show(**{GRADIENTS: list(parts), LOSS: _number(losses[-1])})
    step.show(**{AT_THE_END: list(map(_number, losses))})
    return watch.seen


def _number(loss: Any) -> Any:
    """Return a loss as a tensor of float64; what is no number as a text."""
    is_number = loss.numel() == 1 if isinstance(loss, Tensor) else isinstance(loss, int | float)
    if is_number:
        return torch.tensor(float(loss), dtype=torch.float64)
    return loss if loss is None else f"a {type(loss).__name__}"


TOTAL = "torch.zeros((), dtype=torch.float64) if loss is None else loss.clone()"
TELLS = 'dist.all_reduce(total, group=mesh.group("pp"))'
AVERAGES = 'dist.all_reduce(value, group=mesh.group("dp"))'
DIVIDES = 'value /= mesh.size("dp")'
KEPT = "def finish_step(mesh, loss, grads"

FINISH = Exercise(
    key="mesh-2",
    title="which collective on which axis",
    check=ByExample(
        observe_on_rank=_finish,
        worlds=(6, 4),  # dp = 3 first: its square is not the world size
        runs=lambda p: [{"sizes": sizes} for sizes in MESHES[p]],
        facets=(UNWAITED, OVERWRITTEN, GRADIENTS, LOSS, CHANGED, AT_THE_END),
        looks=(
            *(("hang", ALL_CALL), ("mismatch", ALL_CALL)),
            *((GRADIENTS, OF_DP), (LOSS, OF_DP), (AT_THE_END, KEEPS)),
        ),
        success="Right on six meshes: gradients along dp, the loss along pp and dp.",
    ),
    wrong=(
        Edit(AVERAGES, "dist.all_reduce(value)", WORLD),
        Edit(AVERAGES, 'dist.all_reduce(value, group=mesh.group("tp"))', ALONG_TP),
        Edit(AVERAGES, 'dist.all_reduce(value, group=mesh.group("pp"))', ALONG_PP),
        Edit(DIVIDES, "pass", SUMMED),
        Edit(DIVIDES, "value /= dist.get_world_size()", BY_WORLD),
        Edit("(total, *grads)", "(total,)", NOT_AVERAGED),
        Edit("(total, *grads)", "grads", OWN_LOSS),
        Edit("return total", 'return total / mesh.size("dp")', LOSS_TWICE),
        Edit("return total", 'return total * mesh.size("dp")', LOSS_SUMMED),
        Edit("return total", 'return total / mesh.size("pp")', BY_STAGES),
        Edit(TELLS, "pass", NOT_TOLD),
        Edit(TELLS, f"if loss is not None:\n    {TELLS}", ALL_CALL),
        Edit("loss.clone()", "loss", CALLERS),
        Edit("loss.clone()", "loss.float()", DIGITS, also=(("float64", "float32"),)),
        Edit(
            TOTAL,
            "kept.fill_(0.0 if loss is None else loss)",
            KEEPS,
            also=((KEPT, f"{KEPT}, kept=torch.zeros((), dtype=torch.float64)"),),
        ),
        *(one for one in REDUCES if one.cause in (NOT_WAITED, NAN, CALLERS)),
        *KEEPS_DTYPE,
    ),
)
