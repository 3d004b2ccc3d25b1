"""Exercise 2 of 10_fsdp: the hooks of a unit, from the gather before forward to a shard's gradient.

The unit that the answer gets does not give its memory back when it is freed: it fills it with NaN,
so that whoever computes with it is noticed. The planted mistakes are in `hooks_answers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import run
from course_lib.checks.fsdp import hooks_answers as planted
from course_lib.checks.fsdp.parts import (
    MODULES,
    WORLD_SIZES,
    Small,
    batch,
    calls_in,
    close,
    expect_calls,
    expect_near,
    grad_of,
    row_bytes,
    row_of,
)
from course_lib.checks.zero.parts import (
    alive_bytes,
    flat,
    only_new,
    shard_numel,
    shard_of,
)
from course_lib.ranks import Ranks, record
from course_lib.zero.flat_layout import FlatLayout

# the backward passes that are in shard.grad after each one; before the third it is cleared, and the
# shard has changed
ROUNDS = ((0,), (0, 1), (2,))
STEP = 0.5
RAISED = (
    "Does `missing` begin anew with each backward? What if no gradient is wanted? And is "
    "shard.grad as long as the shard?"
)
EVALUATION = "In evaluation, too, gather once, and free; but hook nothing: output.requires_grad."
AGAIN = (
    "Backward computed with a freed flat parameter (the check fills it with NaN): gather again "
    "when the output's gradient is there, with output.register_hook; free after the last "
    "gradient, not before."
)
ANEW = "begins anew with each backward: fill it again when the gradients have been sent."
OWN = "Only this rank's own tokens are in it: the others' come with a reduce_scatter."
TAIL = (
    "The numbers are right, but the padding has a gradient: zeros there, or the norm for "
    "clipping is too large. layout.flatten does it."
)


class _Unit:
    """The unit that the answer is given: params, shard, layout, gather() and free()."""

    def __init__(self, module: nn.Module) -> None:
        self.params = list(module.parameters())
        self.layout = FlatLayout.of(self.params, dist.get_world_size())
        self.row = self.layout.flatten(self.params)
        mine = self.layout.shard_slice(dist.get_rank())
        self.shard = nn.Parameter(self.row[mine].clone())
        for param, view in zip(self.params, self.layout.views(self.row), strict=True):
            param.data = view
        self.is_whole = True
        self.free()

    def gather(self) -> None:
        """Fill the flat parameter."""
        dist.all_gather_single(self.row.data, self.shard.detach())
        self.is_whole = True

    def free(self) -> None:
        """Make the flat parameter useless."""
        self.row.data.fill_(torch.nan)
        self.is_whole = False


@dataclass
class UnitPass:
    """Forward and backward on one rank."""

    out: Tensor
    x_grad: Any
    shard_grad: Any
    calls: tuple[list[tuple[str, int]], list[tuple[str, int]]]
    is_whole: tuple[bool, bool]  # after forward, after backward
    with_grad: int  # parameters that still have one
    has_none: bool  # no gradient of the shard
    alive_bytes: int


def _passes(rank: int, answer: Callable[..., Any], p: int) -> list[tuple[list[UnitPass], Any]]:
    found = []
    for kind in MODULES:
        with only_new():
            found.append(_watched(rank, answer, kind, p))
    return found


def _watched(
    rank: int, answer: Callable[..., Any], kind: type[nn.Module], p: int
) -> tuple[list[UnitPass], Any]:
    module = kind()
    unit = _Unit(module)
    hooks = answer(module, unit)
    found: list[UnitPass] = []
    for number in range(len(ROUNDS)):
        if number == 2:
            unit.shard.data.add_(STEP)
            unit.shard.grad = None
        found.append(_pass(rank, module, unit, number, found, p))
    with torch.no_grad(), record() as log:
        module(batch(rank)[0])
    del hooks
    return found, (calls_in(log.events), unit.is_whole)


def _pass(
    rank: int, module: nn.Module, unit: _Unit, number: int, before: list[UnitPass], p: int
) -> UnitPass:
    x, above = batch(rank, number)
    with record() as forward:
        out = module(x.requires_grad_())
    after_forward, result = unit.is_whole, out.detach().clone()
    with record() as backward:
        out.backward(above[:, : out.shape[1]])
    x_grad, grad = x.grad, unit.shard.grad
    copy = grad.clone() if isinstance(grad, Tensor) else grad
    left = sum(param.grad is not None for param in unit.params)
    own = [result, unit.row, unit.shard, x, above, out, x_grad, grad, copy]
    for one in before:
        own += [one.out, one.x_grad, one.shard_grad]
    known = [tensor for tensor in own if isinstance(tensor, Tensor)]
    alive = 0 if left else alive_bytes(*known, enough=0)
    return UnitPass(
        result,
        x_grad,
        copy,
        (calls_in(forward.events), calls_in(backward.events)),
        (after_forward, unit.is_whole),
        left,
        grad is None,
        alive,
    )


def check_hooks(answer: Callable[..., Any]) -> str:
    """Check 1 to 3 ranks, two passes that add up, a third after a step, one without gradients."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            found = run(ranks, _passes, answer, p, on={"raised": RAISED})
        for kind, by_rank in zip(MODULES, zip(*found, strict=True), strict=True):
            for number in range(len(ROUNDS)):
                for rank, (passes, _) in enumerate(by_rank):
                    judge(passes[number], kind, number, rank, p)
            for rank, (_, evaluated) in enumerate(by_rank):
                judge_evaluation(evaluated, kind, rank, p)
    return "Gathered, used, freed, twice; then a shard of the mean, one message, nothing left."


HOOKS = Exercise(
    key="fsdp-2",
    title="the hooks of a unit",
    check=check_hooks,
    reference=planted.Hooks,
    mistakes=planted.mistakes(Mistake),
)


def judge(got: UnitPass, kind: type[nn.Module], number: int, rank: int, p: int) -> None:
    """Demand the results of one process, the calls of the budget, and no whole tensors left."""
    numbers = "1 number" if kind is Small else "23 numbers"
    where = f"rank {rank} of {p}, {numbers}, pass {number + 1}"
    outs, x_grads, _ = _whole(kind, number, p)
    whole = row_bytes(row_of(kind).numel(), p)
    expect_near(got.out, outs[rank], f"{where}, the output", "Try gather() in before_forward.")
    gathers = [("all_gather", whole)]
    expect_calls(f"{where}, forward", got.calls[0], gathers, "gather() once, before the module.")
    if got.is_whole[0]:
        raise CheckFailed(
            f"{where}: Never freed: the unit is whole between forward and backward. Try free() in "
            "after_forward."
        )
    _expect_x(got, x_grads[rank], where)
    kinds = [kind for kind, _ in got.calls[1]]
    if kinds == ["all_gather"] and got.with_grad + got.has_none:
        raise CheckFailed(f"{where}: no gradient was sent. When is `missing` empty? It {ANEW}")
    means = [shard_of(_mean(kind, one, p), rank, p) for one in ROUNDS[number]]
    says = _why(got.shard_grad, means, kind, number, rank, p)
    expect_near(got.shard_grad, torch.stack(means).sum(0), f"{where}, shard.grad", says)
    needed = [*gathers, ("reduce_scatter", whole)]
    expect_calls(f"{where}, backward", got.calls[1], needed, _why_calls(kinds))
    _expect_nothing_left(got, where, whole)


def _expect_x(got: UnitPass, wanted: Tensor, where: str) -> None:
    says = "The gradient of the input is this rank's own: hooks do not change it."
    first = got.calls[1][0][0] if got.calls[1] else ""
    if first != "all_gather" or (isinstance(got.x_grad, Tensor) and got.x_grad.isnan().any()):
        says = AGAIN
    expect_near(got.x_grad, wanted, f"{where}, the gradient of the input", says)


def _expect_nothing_left(got: UnitPass, where: str, whole: int) -> None:
    if got.is_whole[1]:
        raise CheckFailed(f"{where}: the unit is still whole. Try free() after its last gradient.")
    if got.with_grad:
        raise CheckFailed(
            f"{where}: {got.with_grad} whole gradients are still there, and the next backward "
            "would add to them: param.grad = None for each."
        )
    if got.alive_bytes >= whole:
        raise CheckFailed(
            f"{where}: {got.alive_bytes} bytes are alive that nobody needs: who holds a whole "
            "flat gradient?"
        )


def judge_evaluation(evaluated: Any, kind: type[nn.Module], rank: int, p: int) -> None:
    """Demand one gather, and that everything is freed."""
    calls, is_whole = evaluated
    where = f"rank {rank} of {p}, under torch.no_grad()"
    expect_calls(where, calls, [("all_gather", row_bytes(row_of(kind).numel(), p))], EVALUATION)
    if is_whole:
        raise CheckFailed(f"{where}: Never freed: free() in after_forward, always.")


def _whole(kind: type[nn.Module], number: int, p: int) -> tuple[list[Tensor], ...]:
    """Compute on one process: each rank's output, gradient of its input, and flat gradient."""
    outs, x_grads, rows = [], [], []
    for rank in range(p):
        module, (x, above) = kind(), batch(rank, number)
        with torch.no_grad():
            for param in module.parameters():
                param.add_(STEP if number == 2 else 0)
        out = module(x.requires_grad_())
        out.backward(above[:, : out.shape[1]])
        outs.append(out.detach())
        x_grads.append(grad_of(x))
        rows.append(flat([grad_of(param) for param in module.parameters()]))
    return outs, x_grads, rows


def _mean(kind: type[nn.Module], number: int, p: int) -> Tensor:
    return torch.stack(_whole(kind, number, p)[2]).mean(0)


def _why(
    grad: Any, means: list[Tensor], kind: type[nn.Module], number: int, rank: int, p: int
) -> str:
    row = row_of(kind)
    n = shard_numel(row.numel(), p)
    if not isinstance(grad, Tensor) or grad.shape != (n,):
        return "shard.grad is this rank's part of the mean, as long as the shard."
    if grad.isnan().any():
        return AGAIN
    mean = torch.stack(means).sum(0)
    own = [shard_of(_whole(kind, one, p)[2][rank], rank, p) for one in ROUNDS[number]]
    alone = torch.stack(own).sum(0)
    body, tail = mean.clone(), slice(max(0, row.numel() - rank * n), n)
    body[tail] = grad[tail]
    causes = [
        (mean * p, "Summed, not averaged: divide by the number of ranks."),
        (mean / p, "Averaged twice: divide by the number of ranks once."),
        (alone, OWN),
        (alone / p, OWN),
        (means[-1], "Only the last backward is in it: shard.grad adds up until it is cleared."),
        (mean / len(means), "The mean is over ranks; two backward passes add up."),
        (body, TAIL),
    ]
    fallback = (
        "Send when the last gradient of the unit is there, in whichever order they come: each "
        "param.grad, side by side."
    )
    return next((says for wrong, says in causes if close(grad, wrong)), fallback)


def _why_calls(kinds: list[str]) -> str:
    if kinds.count("all_reduce") + kinds.count("reduce_scatter") > 1:
        return "All gradients of a unit travel as one reduce_scatter of its flat gradient."
    if "all_reduce" in kinds:
        return "An all_reduce sends twice the bytes: nobody needs the others' part of the mean."
    if "all_gather" not in kinds:
        return AGAIN
    return "Gather once, when the output's gradient is there; then one reduce_scatter."
