"""Exercise 2 of 10_fsdp: the hooks of a unit, from the gather before forward to a shard's gradient.

The unit that the answer gets does not give its memory back when it is freed: it fills it with NaN,
so that whoever computes with it is noticed. The planted mistakes are in `fsdp_hooks_mistakes`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks import fsdp_hooks_mistakes as planted
from course_lib.checks.exercise import Exercise, Mistake
from course_lib.checks.fsdp_hooks_judge import (
    RAISED,
    ROUNDS,
    STEP,
    Pass,
    judge,
    judge_evaluation,
)
from course_lib.checks.fsdp_parts import MODULES, WORLD_SIZES, batch
from course_lib.checks.tools import run
from course_lib.checks.zero_parts import alive_bytes, calls_in, only_new
from course_lib.flat_shards import FlatLayout
from course_lib.ranks import Ranks, record


class _Unit:
    """What the answer is given: params, shard, layout, gather() and free()."""

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
        """Fill the row."""
        dist.all_gather_single(self.row.data, self.shard.detach())
        self.is_whole = True

    def free(self) -> None:
        """Make the row useless."""
        self.row.data.fill_(torch.nan)
        self.is_whole = False


def _passes(rank: int, answer: Callable[..., Any], p: int) -> list[tuple[list[Pass], Any]]:
    found = []
    for kind in MODULES:
        with only_new():
            found.append(_watched(rank, answer, kind, p))
    return found


def _watched(
    rank: int, answer: Callable[..., Any], kind: type[nn.Module], p: int
) -> tuple[list[Pass], Any]:
    module = kind()
    unit = _Unit(module)
    hooks = answer(module, unit)
    found: list[Pass] = []
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
    rank: int, module: nn.Module, unit: _Unit, number: int, before: list[Pass], p: int
) -> Pass:
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
    return Pass(
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
    """1 to 3 ranks, two passes that add up, a third one after a step, one without gradients."""
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
