"""Exercise 2 of 11_mesh: which collective on which axis, at the end of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import KEEPS, Lasting, Numbers, Untouched
from course_lib.checks.on_ranks import At, Observed, OnRanks, watch
from course_lib.checks.zero.parts import ALL_WAITED, NOT_WAITED, unwaited_calls
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh

ROUNDS = 2
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
TWICE = Cause("Divided twice: the mean over dp is taken once.")
ONE_CALL = Cause("Every call begins with these gradients again: keep nothing of an earlier one.")
LOSS_TWICE = Cause("The loss is averaged twice: divide it by the size of dp once.")
LOSS_SUMMED = Cause("The losses are summed: a mean over replicas is divided by the size of dp.")
NOT_TOLD = Cause("Only the last stage knows the loss: it has to tell the others, along pp.")
BY_STAGES = Cause("Divided by the stages, too: along pp one rank knows the loss, the others add 0.")
LAST_STAGE = Cause("That is another stage's 0: the last stage knows the loss.")
OWN_LOSS = Cause("That is one replica's loss: average along dp.")
ALL_CALL = Cause(
    "Every rank of a group makes the call, whatever its numbers are: a stage without the loss "
    "brings 0, in float64."
)
CALLERS_LOSS = Cause("The loss belongs to the caller: sum a clone of it.")
LOSS_DIGITS = Cause("The loss is in float64: keep it in float64.")
DIGITS = Cause("Multiply by the size of dp: the digits say which ranks are in it.")


@dataclass
class FinishedStep(Observed):
    """One call: the gradients afterwards."""

    grads: list[Tensor] = field(default_factory=list)
    unwaited: list[str] = field(default_factory=list)


def _mesh(at: At) -> Mesh:
    return Mesh(**at.options["sizes"])


def _grads(rank: int, number: int, mesh: Mesh) -> list[Tensor]:
    """Return a rank's gradients: other numbers in each call, times 10**rank; one can be all 0."""
    idle = mesh.coordinates(rank)["dp"] == 0
    sizes = (3, 2, 3)
    digits = [(1.0 + number + torch.arange(n).double()) * 10.0**rank for n in sizes]
    return [*digits[:2], digits[2] * (0.0 if idle else -1.0)]


def _loss(mesh: Mesh, rank: int, number: int) -> float | None:
    """Return the loss that a rank knows: 10**(index along dp); None before the last stage."""
    place = mesh.coordinates(rank)
    if place["pp"] < mesh.size("pp") - 1:
        return None
    return (1.0 + number) * 10.0 ** place["dp"] * TENTH_DIGIT


def _observe(rank: int, answer: Callable[..., Any], sizes: dict[str, int]) -> dict[str, Any]:
    mesh, found = RankMesh(Mesh(**sizes)), {}
    words = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    for number in range(ROUNDS):
        known, whole = _loss(mesh.mesh, rank, number), _grads(rank, number, mesh.mesh)
        flat = torch.cat(whole)  # a bucket: what is written into the gradients is seen in it
        kept, given = (list(flat.split([grad.numel() for grad in whole])) for _ in range(2))
        loss = None if known is None else torch.tensor(known, dtype=torch.float64)
        inputs = {} if loss is None else {"loss": loss}
        with unwaited_calls() as unwaited:
            seen = watch(partial(_as_number, answer), mesh, loss, given, **inputs)
        found[f"{words}, call {number + 1}"] = FinishedStep(
            **vars(seen), grads=kept, unwaited=list(unwaited.values())
        )
    return found


def _as_number(answer: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
    """Return a loss as a tensor; one that is in a tensor stays there."""
    value = answer(*arguments)
    if isinstance(value, Tensor):
        return value.view(()) if value.numel() == 1 else value
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, int | float) else value


def _over(*axes: str, by: Callable[[Mesh], int] | None = None) -> Callable[[At], list[Tensor]]:
    """Return the gradients summed along axes, divided by the ranks in it or by another number."""

    def mean(at: At) -> list[Tensor]:
        mesh = _mesh(at)
        ranks = mesh.group(at.rank, *axes)
        count = len(ranks) if by is None else by(mesh)
        both = zip(*(_grads(rank, at.number, mesh) for rank in ranks), strict=True)
        return [torch.stack(found).sum(0) / count for found in both]

    return mean


def _losses(by: Callable[[Mesh], float]) -> Callable[[At], Tensor]:
    """Return the sum of all replicas' losses, divided by a number."""

    def mean(at: At) -> Tensor:
        mesh = _mesh(at)
        total = sum((1.0 + at.number) * 10.0**n * TENTH_DIGIT for n in range(mesh.size("dp")))
        return torch.tensor(total / by(mesh), dtype=torch.float64)

    return mean


def _only_if_known(at: At) -> Tensor:
    """Return the mean where the last stage does not tell the others."""
    known = _loss(_mesh(at), at.rank, at.number) is not None
    return _losses(lambda mesh: mesh.size("dp"))(at) * known


def _of_replica(at: At) -> Tensor:
    place = _mesh(at).coordinates(at.rank)
    loss = (1.0 + at.number) * 10.0 ** place["dp"] * TENTH_DIGIT
    return torch.tensor(loss, dtype=torch.float64)


def _dp(mesh: Mesh) -> int:
    return mesh.size("dp")


def _wide(at: At) -> Any:
    value = at.seen.value
    return value.double() if isinstance(value, Tensor) else value


def _is_rounded(at: At, got: Tensor, _: Any) -> bool:
    """Return whether it is the right loss with the digits of float32."""
    return bool((got - _losses(_dp)(at)).abs() <= 1e-6 * _losses(_dp)(at))


def _finished(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor], total: Tensor) -> Tensor:
    """Finish the step rightly, with `total` as the loss's memory."""
    dist.all_reduce(total, group=mesh.group("pp"))
    for value in (total, *grads):
        dist.all_reduce(value, group=mesh.group("dp"))
        value /= mesh.size("dp")
    return total


def _zero(loss: Tensor | None) -> Tensor:
    return torch.zeros((), dtype=torch.float64) if loss is None else loss.clone()


def _replaces(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor]) -> Tensor:
    averaged = [grad.clone() for grad in grads]
    total = _finished(mesh, loss, averaged, _zero(loss))
    grads[:] = averaged
    return total


def _moves(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor]) -> Tensor:
    averaged = [grad.clone() for grad in grads]
    total = _finished(mesh, loss, averaged, _zero(loss))
    for grad, mean in zip(grads, averaged, strict=True):
        grad.data = mean
    return total


def _skips_zeros(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor]) -> Tensor:
    return _finished(mesh, loss, [grad for grad in grads if grad.any()], _zero(loss))


def _in_the_loss(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor]) -> Tensor:
    return _finished(mesh, loss, grads, _zero(None) if loss is None else loss)


_TOTAL = torch.zeros((), dtype=torch.float64)


def _always_the_same(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor]) -> Tensor:
    return _finished(mesh, loss, grads, _TOTAL.fill_(0.0 if loss is None else loss.item()))


def _narrow(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor]) -> Tensor:
    return _finished(mesh, loss, grads, _zero(loss).float())


def _from_stage_1(mesh: RankMesh, loss: Tensor | None, grads: list[Tensor]) -> Tensor:
    total, stages = _zero(loss), mesh.mesh.group(mesh.rank, "pp")
    dist.broadcast(total, stages[min(1, len(stages) - 1)], group=mesh.group("pp"))
    if mesh.index("pp"):
        total *= 0
    return _finished(mesh, loss, grads, total)


RIGHT = _over("dp")
AXES: Sequence[str] = ("pp", "dp", "tp")
TELLS = 'dist.all_reduce(total, group=mesh.group("pp"))'
AVERAGES = 'dist.all_reduce(value, group=mesh.group("dp"))'
DIVIDES = 'value /= mesh.size("dp")'

FINISH = Exercise(
    key="mesh-2",
    title="which collective on which axis",
    check=OnRanks(
        observe_on_rank=_observe,
        worlds=(6, 4),  # dp = 3 first: its square is not the world size
        runs=lambda p: [{"sizes": sizes} for sizes in MESHES[p]],
        trouble=tuple((kind, "", ALL_CALL) for kind in ("hang", "mismatch")),
        expect=(
            ALL_WAITED,
            Untouched(CALLERS_LOSS),
            Numbers(
                lambda at: at.seen.grads,
                RIGHT,
                rtol=1e-12,
                what="the gradient",
                causes=(
                    (NOT_AVERAGED, _over()),
                    (SUMMED, _over("dp", by=lambda mesh: 1)),
                    (TWICE, _over("dp", by=lambda mesh: _dp(mesh) ** 2)),
                    (BY_WORLD, _over("dp", by=lambda mesh: mesh.world_size)),
                    *((ALONG_TP, _over("dp", "tp", by=by)) for by in (None, _dp)),
                    *((WORLD, _over(*AXES, by=by)) for by in (None, _dp, lambda mesh: 1)),
                    *((ALONG_TP, _over("tp", by=by)) for by in (None, _dp, lambda mesh: 1)),
                    *((ALONG_PP, _over("pp", by=by)) for by in (None, _dp, lambda mesh: 1)),
                    *((ALONG_PP, _over("dp", "pp", by=by)) for by in (None, _dp)),
                ),
                look=DIGITS,
            ),
            Numbers(
                _wide,
                _losses(_dp),
                rtol=1e-12,
                what="the loss",
                predicates=((_is_rounded, LOSS_DIGITS),),
                causes=(
                    (LOSS_SUMMED, _losses(lambda mesh: 1)),
                    (LOSS_TWICE, _losses(lambda mesh: _dp(mesh) ** 2)),
                    (BY_STAGES, _losses(lambda mesh: _dp(mesh) * mesh.size("pp"))),
                    (NOT_TOLD, _only_if_known),
                    (LAST_STAGE, lambda at: torch.zeros((), dtype=torch.float64)),
                    (OWN_LOSS, _of_replica),
                    (NOT_TOLD, lambda at: _of_replica(at) * (_only_if_known(at) != 0)),
                ),
                look=DIGITS,
            ),
            Lasting(),
        ),
        success="Right on six meshes: gradients along dp, the loss along pp and dp.",
    ),
    wrong=(
        Edit(AVERAGES, "dist.all_reduce(value)", WORLD),
        Edit(AVERAGES, 'dist.all_reduce(value, group=mesh.group("tp"))', ALONG_TP),
        Edit(AVERAGES, 'dist.all_reduce(value, group=mesh.group("pp"))', ALONG_PP),
        Edit(
            AVERAGES,
            AVERAGES + '\ndist.all_reduce(value, group=mesh.group("tp"))',
            ALONG_TP,
            also=((DIVIDES, 'value /= mesh.size("dp") * mesh.size("tp")'),),
        ),
        Edit(DIVIDES, "pass", SUMMED),
        Edit(DIVIDES, "value /= dist.get_world_size()", BY_WORLD),
        Edit(DIVIDES, 'value /= mesh.size("dp") ** 2', TWICE),
        Edit(DIVIDES, 'value = value / mesh.size("dp")', SUMMED),
        Edit("(total, *grads)", "(total,)", NOT_AVERAGED),
        Edit("(total, *grads)", "grads", OWN_LOSS),
        Edit("return total", 'return total / mesh.size("dp")', LOSS_TWICE),
        Edit("return total", 'return total * mesh.size("dp")', LOSS_SUMMED),
        Edit("return total", 'return total / mesh.size("pp")', BY_STAGES),
        Edit(TELLS, "pass", NOT_TOLD),
        Edit(TELLS, f"if loss is not None:\n    {TELLS}", ALL_CALL),
        Edit(
            AVERAGES,
            'work = dist.all_reduce(value, group=mesh.group("dp"), async_op=True)',
            NOT_WAITED,
        ),
        Own(_replaces, NOT_AVERAGED),
        Own(_moves, NOT_AVERAGED),
        Own(_skips_zeros, ALL_CALL),
        Own(_in_the_loss, CALLERS_LOSS),
        Own(_always_the_same, KEEPS),
        Own(_narrow, LOSS_DIGITS),
        Own(_from_stage_1, LAST_STAGE),
    ),
)
