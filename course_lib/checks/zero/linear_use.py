"""Run zero-4 on a rank: a layer is used forward and backward, another one alive beside it or not.

Afterwards it is used twice without autograd, and its shard changes in between.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.zero.parts import (
    BESIDE,
    alive_bytes,
    flat,
    named,
    only_new,
    same,
    shard_of,
    telling,
    unwaited_calls,
)
from course_lib.core import Event
from course_lib.ranks import record
from course_lib.zero.flat_layout import FlatLayout

TRANSPOSED_INPUTS = "transposed inputs"
IDLE = "no tokens on rank 0"


@dataclass(frozen=True, kw_only=True)
class Use:
    """Use of a layer: tokens of `num_in` numbers go through it `times` times.

    transposed   x and the gradient from above are transposed tensors
    odd_numbers  both are 0 on rank 0, and there is a nan on the last rank
    idle         rank 0 has no tokens
    beside       another layer, whose forward and backward follow those of this one
    """

    num_in: int
    num_out: int
    tokens: int
    times: int = 1
    dtype: torch.dtype = torch.float64
    transposed: bool = False
    odd_numbers: bool = False
    idle: bool = False
    beside: "Use | None" = None
    seed: int = 0

    def layer(self) -> nn.Linear:
        """Return the whole layer, the same on every rank."""
        layer = nn.Linear(self.num_in, self.num_out)
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(_numbers(self.seed + 5, *param.shape))
        return layer.to(self.dtype)

    def layout(self, p: int) -> FlatLayout:
        """Return the layout of its weight and bias on p ranks."""
        return FlatLayout(((self.num_out, self.num_in), (self.num_out,)), p)

    def shard(self, rank: int, p: int) -> nn.Parameter:
        """Return a rank's shard of the flat weight and bias."""
        return nn.Parameter(shard_of(flat([*self.layer().parameters()]), rank, p))

    def batch(self, rank: int, p: int) -> tuple[Tensor, Tensor]:
        """Return x of a rank, and the gradient from above."""
        x = self._tokens(100, self.num_in, rank, p)
        return x.requires_grad_(), self._tokens(200, self.num_out, rank, p)

    def _tokens(self, seed: int, width: int, rank: int, p: int) -> Tensor:
        count = 0 if self.idle and rank == 0 else self.tokens
        tokens = _numbers(self.seed + seed + rank, count, width).to(self.dtype)
        if self.odd_numbers and rank == p - 1:
            tokens[-1, 0] = math.nan
        elif self.odd_numbers and rank == 0:
            tokens.zero_()
        return tokens.t().contiguous().t() if self.transposed else tokens

    def out_bytes(self, rank: int) -> int:
        """Return the bytes of the outputs: of the layer, on the way, and of the one beside it."""
        count = 0 if self.idle and rank == 0 else self.tokens
        beside = self.beside.out_bytes(rank) if self.beside else 0
        return count * self.num_out * self.dtype.itemsize * self.times + beside

    def __str__(self) -> str:
        times = {1: "once", 2: "twice"}[self.times]
        odd = (
            (self.transposed, TRANSPOSED_INPUTS),
            (self.odd_numbers, "zeros on rank 0 and a nan on the last rank"),
            (self.idle, IDLE),
            (self.beside, f"{BESIDE} of {self.beside and self.beside.num_in} numbers"),
        )
        sizes = f"{self.num_in} to {self.num_out} numbers"
        words = f"a layer of {sizes} in {named(self.dtype)}, used {times}"
        return ", ".join([words, *(each for holds, each in odd if holds)])


def _numbers(seed: int, *shape: int) -> Tensor:
    """Return numbers between 1 and 2, so that no sum cancels and rounding stays small."""
    return 1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed)).double()


USES = (
    Use(num_in=5, num_out=5, tokens=2),  # 30 numbers: uneven on 4 ranks
    Use(num_in=5, num_out=5, tokens=2, times=2),
    Use(num_in=2, num_out=5, tokens=3, dtype=torch.bfloat16),
)
ODD_USES = (  # each with one thing that USES do not have
    Use(num_in=5, num_out=5, tokens=2, beside=Use(num_in=5, num_out=5, tokens=2, seed=1000)),
    Use(num_in=5, num_out=5, tokens=2, beside=Use(num_in=3, num_out=3, tokens=3, seed=1000)),
    Use(num_in=2, num_out=5, tokens=3, transposed=True),
    Use(num_in=2, num_out=5, tokens=3, odd_numbers=True),
    Use(num_in=2, num_out=5, tokens=3, idle=True),
)


def runs_on(p: int) -> list[dict[str, Use]]:
    """Return the uses on p ranks, a plain one first; three ranks are enough for the odd ones."""
    first, *more = USES
    return [{"use": use} for use in (first, *(ODD_USES if p == 3 else ()), *more)]


@dataclass
class Used:
    """One use of the layer on one rank; `again`: without autograd, with a shard twice as large."""

    out: Any
    x_grad: Any
    shard_grad: Any
    again: Any
    forward: list[Event]
    backward: list[Event]
    unwaited: list[str]
    alive_bytes: int
    left_bytes: int
    grad_bytes: int  # that the gradient of the shard keeps
    changed: bool


def use_layer(rank: int, answer: Any, use: Use) -> dict[str, Used]:
    """Use the layer; note its numbers and calls, and what is alive in between and afterwards."""
    p, apply = dist.get_world_size(), getattr(answer, "apply", answer)
    layout, shard, (x, above) = use.layout(p), use.shard(rank, p), use.batch(rank, p)
    given = [tensor.detach().clone() for tensor in (x, shard, above)]
    with telling(str(use)), only_new(), unwaited_calls() as unwaited:
        with record() as forward:
            out = x
            for _ in range(use.times):
                out = apply(out, shard, layout)
        beside = _forward(rank, apply, use.beside)
        result = copied(out)
        results = [result] if isinstance(result, Tensor) else []
        between = alive_bytes(x, shard, *results, *beside[1:], enough=use.out_bytes(rank))
        with record() as backward:
            if isinstance(out, Tensor) and out.requires_grad:
                out.backward(above)
        _backward(*beside)
        del out, beside
        x_grad, shard_grad = copied([x.grad, shard.grad])
        grad_bytes = 0 if shard.grad is None else shard.grad.untyped_storage().nbytes()
        x.grad = shard.grad = None
        changed = not all(map(same, given, (x, shard, above)))
        again = _without_autograd(apply, x, shard, layout)
        results += [each for each in (x_grad, shard_grad, again) if isinstance(each, Tensor)]
        left = alive_bytes(x, shard, *results, enough=0)
    calls = calls_of(forward.events), calls_of(backward.events)
    kinds = list(unwaited.values())
    used = Used(
        result, x_grad, shard_grad, again, *calls, kinds, between, left, grad_bytes, changed
    )
    return {str(use): used}


def _forward(rank: int, apply: Callable[..., Any], use: Use | None) -> tuple[Any, ...]:
    """Return the output of the layer beside, and what belongs to it; nothing where none is."""
    if use is None:
        return ()
    p = dist.get_world_size()
    shard, (x, above) = use.shard(rank, p), use.batch(rank, p)
    return apply(x, shard, use.layout(p)), x, shard, above


def _backward(*beside: Any) -> None:
    if beside and isinstance(beside[0], Tensor) and beside[0].requires_grad:
        beside[0].backward(beside[-1])


@torch.no_grad()
def _without_autograd(
    apply: Callable[..., Any], x: Tensor, shard: nn.Parameter, layout: FlatLayout
) -> Any:
    """Return what the layer gives after its shard has changed; it was used before, too."""
    apply(x, shard, layout)
    shard.mul_(2)
    return copied(apply(x, shard, layout))


@dataclass(frozen=True)
class Whole:
    """Compute in one process what each rank gets from the whole layer."""

    outs: list[Tensor]
    x_grads: list[Tensor]
    grads: list[Tensor]  # flat
    first: list[Tensor]  # those of the first use alone
    once: list[Tensor]


@cache
def whole_layer(use: Use, p: int) -> Whole:
    """Return the right numbers of all ranks."""
    whole = Whole([], [], [], [], [])
    for rank in range(p):
        layers, (x, above) = [use.layer() for _ in range(use.times)], use.batch(rank, p)
        out = x
        for layer in layers:
            out = layer(out)
        out.backward(above)
        whole.outs.append(out.detach())
        whole.x_grads.append(copied(x.grad))
        grads = [flat([copied(param.grad) for param in each.parameters()]) for each in layers]
        whole.grads.append(torch.stack(grads).sum(0))
        whole.first.append(grads[0])
        whole.once.append(layers[0](x).detach())
    return whole
