"""Exercise 4 of 10_fsdp: bf16 for messages and computation, fp32 for storage and sums.

The planted mistakes are in `mixed_answers.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import run
from course_lib.checks.fsdp import mixed_answers as planted
from course_lib.checks.fsdp.parts import (
    WORLD_SIZES,
    calls_in,
    expect_calls,
    expect_near,
    not_followed,
)
from course_lib.checks.zero.parts import alive_bytes, only_new, shard_numel, shard_of
from course_lib.ranks import Ranks, record
from course_lib.zero.flat_layout import FlatLayout

SHAPES = ((2, 3), (1,), (2, 2))  # 11 numbers
NUMEL = 11
SMALL_STEP = 2.0**-12  # an update that bf16 cannot show: it keeps 8 bits
NUM_STEPS = 3  # in the second one another unit is used, too; in the third one there is a nan
APART = 100.0  # of the other unit's numbers
BEFORE = 1.0  # what shard.grad is before the second reduce()
MOST_ROUNDING = 0.02  # of a gradient: more than bf16 can be the cause of
KEEPS = {
    "gather()": "2 bytes a number: who keeps an fp32 copy, a list, a buffer, a view of one?",
    "reduce()": "Only shard.grad is left: who keeps the flat gradient, or a view of it?",
}
SHARED = (
    "That belongs to another unit, alive at the same time: what a unit keeps or returns is its "
    "own, in self, not in the class and not in a buffer that units share."
)
RAISED = (
    "A flat tensor is as long as layout.padded_numel, and layout.flatten makes it; shard.grad is "
    "as long as the shard, and in fp32."
)


@dataclass
class Used:
    """The results of one rank: at first, and after each small step of the shard."""

    params: list[Any]
    shards: list[Tensor]
    grads: list[Any]
    gathers: list[list[tuple[str, int]]]
    reduces: list[list[tuple[str, int]]]
    gathered_bytes: list[int]
    left_bytes: list[int]

    @property
    def tensors(self) -> list[Tensor]:
        """Return the copies that are kept here."""
        params = [one for each in self.params if isinstance(each, list) for one in each]
        return [one for one in (*params, *self.shards, *self.grads) if isinstance(one, Tensor)]


def _row(step: int = 0) -> Tensor:
    """Return the master's numbers, none of which bf16 has; after some steps."""
    return torch.arange(1, NUMEL + 1) * 1.003 + step * (SMALL_STEP + 0.5)


def _grads(rank: int, number: int) -> list[Tensor]:
    """Return gradients in bf16 whose sum bf16 does not have."""
    flat = (torch.arange(1, NUMEL + 1) * 1.7 + number) * (1.0 if rank == 0 else 0.0071 * rank)
    if number == NUM_STEPS - 1 and rank == 0:
        flat[0] = math.nan
    parts = flat.bfloat16().split([torch.Size(shape).numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def _flat_grads(rank: int, number: int) -> Tensor:
    return torch.cat([grad.flatten() for grad in _grads(rank, number)]).float()


def _use(rank: int, answer: Callable[..., Any], p: int) -> Used:
    layout = FlatLayout(SHAPES, p)
    shard = nn.Parameter(shard_of(_row(), rank, p))
    used = Used([], [], [], [], [], [], [])
    with only_new():
        unit = answer(shard, layout)
        for number in range(NUM_STEPS):
            with_other = number == 1
            beside = nn.Parameter(shard.detach() + APART) if with_other else None
            other = answer(beside, layout) if with_other else None
            _step(rank, number, (unit, shard), (other, beside), used)
            unit.gather()  # nobody computes with it before the shard changes
            shard.data.add_(SMALL_STEP + 0.5)
    return used


def _step(
    rank: int, number: int, mine: tuple[Any, Tensor], others: tuple[Any, Any], used: Used
) -> None:
    """Gather and reduce; then do it with the other unit, if there is one, and look at the first."""
    (unit, shard), (other, beside) = mine, others
    known = [shard, *used.tensors, *([] if beside is None else [beside])]
    p, n = dist.get_world_size(), shard.numel()
    with record() as gather, not_followed(f"rank {rank} of {p}"):
        params = unit.gather()
    used.gathered_bytes.append(alive_bytes(*known, enough=2 * n * p))
    gathered = other and other.gather()
    copies = isinstance(params, list | tuple)
    used.params.append([one.detach().clone() for one in params] if copies else params)
    del params, gathered
    if other:
        shard.grad = torch.full_like(shard, BEFORE)
    with record() as reduce:
        unit.reduce(_grads(rank, number))
    used.left_bytes.append(alive_bytes(*known, *used.tensors, enough=4 * n))
    if other:
        other.reduce(_grads(rank, number + 1))
        beside.grad = None
    used.gathers.append(calls_in(gather.events))
    used.reduces.append(calls_in(reduce.events))
    used.shards.append(shard.detach().clone())
    grad = shard.grad
    used.grads.append(grad.clone() if isinstance(grad, Tensor) else grad)
    shard.grad = None


def check_mixed(answer: Callable[..., Any]) -> str:
    """Check 1 to 3 ranks, before and after small steps: values, dtypes, bytes of both messages."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            for rank, used in enumerate(run(ranks, _use, answer, p, on={"raised": RAISED})):
                for number in range(NUM_STEPS):
                    _judge(used, number, rank, p)
                _expect_alive(used, rank, p)
    return "Half the bytes to gather; fp32 to add up, and a master that keeps its small steps."


def _judge(used: Used, number: int, rank: int, p: int) -> None:
    where = f"rank {rank} of {p}{', after a step' * (number > 0)}"
    n = shard_numel(NUMEL, p) * p
    _expect_params(used, number, where)
    says = "Convert first, then send: 2 bytes a number."
    expect_calls(f"{where}, gather()", used.gathers[number], [("all_gather", 2 * n)], says)
    master = shard_of(_row(), rank, p) + number * (SMALL_STEP + 0.5)
    says = "The master stays as it was, in fp32: rounded to bf16, small steps are lost."
    expect_near(used.shards[number], master, f"{where}, the shard", says)
    grad, rows = used.grads[number], [_flat_grads(one, number) for one in range(p)]
    mean = shard_of(torch.stack(rows).sum(0) / p, rank, p)
    if not _near(grad, mean):
        raise CheckFailed(
            f"{where}, the gradient of the shard: {_off(grad, mean)} "
            f"{_why_here(grad, mean, number, rank, p) or _why(grad, mean, rows, rank, p)}"
        )
    says = "Convert to fp32 before it is sent, then one reduce_scatter leaves a shard of the sum."
    expect_calls(f"{where}, reduce()", used.reduces[number], [("reduce_scatter", 4 * n)], says)


def _expect_alive(used: Used, rank: int, p: int) -> None:
    """Demand that only the gathered parameters are alive, and later the gradient of the shard."""
    n = shard_numel(NUMEL, p)
    budgets = ("gather()", 2 * n * p, used.gathered_bytes), ("reduce()", 4 * n, used.left_bytes)
    for call, most, found in budgets:
        if max(found) > most:
            raise CheckFailed(
                f"rank {rank} of {p}, {call}: besides the shard, {max(found)} bytes are alive "
                f"afterwards; need {most}. {KEEPS[call]}"
            )


def _expect_params(used: Used, number: int, where: str) -> None:
    params = used.params[number]
    if not isinstance(params, list) or len(params) != len(SHAPES):
        raise CheckFailed(
            f"{where}: need a list of {len(SHAPES)} tensors from gather(); got "
            f"{type(params).__name__}. Does it return layout.views(flat)?"
        )
    rows = [(_row() + step * (SMALL_STEP + 0.5)).bfloat16() for step in range(number + 1)]
    flat = torch.cat([param.flatten() for param in params])
    if number == 1 and torch.equal(flat, (_row(1) + APART).bfloat16()):
        raise CheckFailed(f"{where}, the parameters of gather(): {SHARED}")
    if flat.dtype != torch.bfloat16:
        raise CheckFailed(f"{where}: gather() gives {flat.dtype}; the unit computes in bfloat16.")
    if any(torch.equal(flat, row) for row in rows[:-1]):
        raise CheckFailed(f"{where}: gather() gives what the shard was; send it as it is now.")
    if [tuple(param.shape) for param in params] != list(SHAPES) or not torch.equal(flat, rows[-1]):
        raise CheckFailed(
            f"{where}: need all ranks' numbers, rounded to bfloat16, in their shapes; got others. "
            "Try layout.views(flat)."
        )


def _near(got: Any, wanted: Tensor) -> bool:
    """Return whether they are equal up to the rounding of fp32 sums in another order."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != torch.float32:
        return False
    return torch.allclose(got, wanted, rtol=1e-6, atol=1e-7, equal_nan=True)


def _off(grad: Any, mean: Tensor) -> str:
    if not isinstance(grad, Tensor):
        return f"need a tensor in self.shard.grad; got {grad}."
    if grad.shape != mean.shape or grad.dtype != mean.dtype:
        return f"need {list(mean.shape)} in float32; got {list(grad.shape)} in {grad.dtype}."
    return f"off by {100 * _error(grad, mean):.2g} %."


def _error(grad: Tensor, mean: Tensor) -> float:
    return ((grad - mean).norm() / mean.norm()).item() if mean.norm() else 0.0


def _why_here(grad: Any, mean: Tensor, number: int, rank: int, p: int) -> str:
    """Return the cause of what is wrong in one of the steps only, or an empty text."""
    others = torch.stack([_flat_grads(one, number + 1) for one in range(p)]).sum(0) / p
    if number == 1 and _near(grad, shard_of(others, rank, p)):
        return SHARED
    if number == 1 and _near(grad, mean + BEFORE):
        return "Something was in shard.grad before: set it to the new mean, do not add to it."
    if isinstance(grad, Tensor) and mean.isnan().any() and not grad.isnan().any():
        return "A nan has to stay one: who replaces it hides that the training has broken."
    return ""


def _why(grad: Any, mean: Tensor, rows: list[Tensor], rank: int, p: int) -> str:
    if not isinstance(grad, Tensor):
        return "The optimizer looks there."
    if grad.shape != mean.shape:
        return "A shard of the mean, as long as the shard itself."
    grad, own = grad.float(), shard_of(rows[rank], rank, p)
    divided = shard_of(torch.stack([(row.bfloat16() / p).float() for row in rows]).sum(0), rank, p)
    causes = [
        (mean * p, "Summed, not averaged: divide by the number of ranks."),
        (mean / p, "Averaged twice: divide by the number of ranks once."),
        (own, "Only this rank's own gradient is in it."),
        (own / p, "Only this rank's own gradient is in it."),
        (divided, "Divide in fp32: bf16 rounds each rank's part before it is added."),
        (mean.bfloat16().float(), "The mean was rounded to bfloat16 again, at the end."),
    ]
    rounded = "Too much is rounded: convert to fp32 before it is sent, not after."
    other = "Each gradient in its place, zeros behind them, divided by the ranks: layout.flatten."
    fallback = rounded if _error(grad, mean) < MOST_ROUNDING else other
    return next((says for wrong, says in causes if _near(grad, wrong)), fallback)


MIXED = Exercise(
    key="fsdp-4",
    title="two precisions",
    check=check_mixed,
    reference=planted.Mixed,
    mistakes=planted.mistakes(Mistake),
)
