"""The MLP that exercise 2 of 07_tensor_parallel splits, and what it computes on one process."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.on_ranks import At
from course_lib.checks.tensor_parallel.parts import shard_of

NAMES = ("up_weight", "up_bias", "down_weight", "down_bias")
LATER = (
    "in eval mode, under no_grad",
    "after a step of SGD",
    "after a step of SGD, in eval mode, under no_grad",
    "with an x that needs no gradient",
)
RATE = 0.125  # of a step of SGD


@dataclass(frozen=True)
class Case:
    """A whole MLP and a batch, the same on every rank."""

    width: int  # outputs of up
    num_out: int
    shape: tuple[int, ...]  # of x
    dtype: torch.dtype = torch.double
    scale: float = 1.0  # of x

    @property
    def layers(self) -> tuple[nn.Linear, nn.Linear]:
        """Return up and down, new ones."""
        up, down = nn.Linear(self.shape[-1], self.width), nn.Linear(self.width, self.num_out)
        for seed, param in enumerate((*up.parameters(), *down.parameters())):
            param.data = self._random(seed, *param.shape)
        return up, down

    @property
    def x(self) -> Tensor:
        """Return the batch."""
        return self._random(10, *self.shape) * self.scale

    @property
    def above(self) -> Tensor:
        """Return the gradient of the output."""
        return self._random(11, *self.shape[:-1], self.num_out)

    def _random(self, seed: int, *shape: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=random, dtype=torch.double).to(self.dtype)


CASES = {
    "7 outputs of up": Case(7, 3, (2, 3, 3)),  # 7 is not divisible by 2, 3 or 4
    "8 outputs of up": Case(8, 3, (2, 3, 3)),
    "x of [1, 4] in bfloat16": Case(5, 2, (1, 4), torch.bfloat16),
    "x of [12, 6] in float32": Case(16, 8, (12, 6), torch.float32),
    "x all zero": Case(6, 5, (1, 1, 3), scale=0.0),
}


@dataclass(frozen=True)
class Whole:
    """The MLP of a case on one process; params and grads as in NAMES."""

    params: list[Tensor]
    out: Tensor
    grads: list[Tensor]
    x_grad: Tensor
    after_step: Tensor  # the output after a step of SGD


@functools.cache
def _on_one_process(name: str) -> Whole:
    """Compute a case's MLP on one process, in float64; return it in the dtype of the case."""
    case = CASES[name]
    (up, down), x = case.layers, case.x.double().requires_grad_()
    params = [*up.parameters(), *down.parameters()]
    kept = [param.detach().clone() for param in params]
    out = down.double()(F.gelu(up.double()(x)))
    grads = torch.autograd.grad(out, [x, *params], case.above.double())
    stepped = [param.detach() - RATE * grad for param, grad in zip(params, grads[1:], strict=True)]
    after_step = F.linear(F.gelu(F.linear(x.detach(), *stepped[:2])), *stepped[2:])
    return Whole(
        params=kept,
        out=out.detach().to(case.dtype),
        grads=[grad.to(case.dtype) for grad in grads[1:]],
        x_grad=grads[0].to(case.dtype),
        after_step=after_step.to(case.dtype),
    )


def whole_of(at: At) -> Whole:
    """Return the MLP of this label, on one process."""
    return _on_one_process(at.label)


def _shards(at: At, whole: list[Tensor]) -> list[Tensor]:
    """Return this rank's part of up.weight, up.bias, down.weight, down.bias or their gradients."""
    mine = shard_of(CASES[at.label].width, at.world_size, at.rank)
    return [whole[0][mine], whole[1][mine], whole[2][:, mine], whole[3]]


def params_of(at: At) -> list[Tensor]:
    """Return this rank's parameters."""
    return _shards(at, whole_of(at).params)


def grads_of(times: Callable[[At], float] = lambda _at: 1.0) -> Callable[[At], list[Tensor]]:
    """Return a function of At: the gradients of this rank's parameters, times something."""
    return lambda at: [grad * times(at) for grad in _shards(at, whole_of(at).grads)]


def out_of(at: At) -> Tensor:
    """Return the right output."""
    return whole_of(at).out


def later_of(at: At) -> list[Tensor]:
    """Return the right outputs of LATER."""
    return [out_of(at), *[whole_of(at).after_step] * (len(LATER) - 1)]


def x_grad_of(at: At) -> Tensor:
    """Return the right gradient of x."""
    return whole_of(at).x_grad


def bias_of(at: At) -> Tensor:
    """Return the bias of down."""
    return whole_of(at).params[3]


def of_summed_x(at: At) -> Tensor:
    """Return this rank's part of the output of the sum of x over the ranks, plus the bias."""
    w1, b1, w2, b2 = params_of(at)
    if at.world_size == 1:
        return torch.full_like(out_of(at), torch.nan)  # on one rank, it makes no difference
    return F.linear(F.gelu(F.linear(at.world_size * CASES[at.label].x, w1, b1)), w2, b2)


def without_gelu(at: At) -> Tensor:
    """Return the output without GELU."""
    w1, b1, w2, b2 = whole_of(at).params
    return F.linear(F.linear(CASES[at.label].x, w1, b1), w2, b2)


def without_up_bias(at: At) -> Tensor:
    """Return the output without the bias of up."""
    w1, _, w2, b2 = whole_of(at).params
    return F.linear(F.gelu(F.linear(CASES[at.label].x, w1)), w2, b2)


def is_bias_parted(at: At, *_: Any) -> bool:
    """Return whether some rank keeps another bias of down than the whole one."""
    return any(not torch.allclose(o.seen.params[3], bias_of(o)) for o in at.everyone)


def part_bytes(at: At) -> int:
    """Return the bytes of this rank's part, and of one more bias."""
    return sum(param.nbytes for param in params_of(at)) + bias_of(at).nbytes


def is_whole(at: At, got: Tensor, item: int) -> bool:
    """Return whether this has the shape of the whole of it."""
    return params_of(at)[item].shape != got.shape == whole_of(at).params[item].shape


def is_uneven(at: At, got: Tensor, item: int) -> bool:
    """Return whether another number of the outputs of up was taken."""
    need = params_of(at)[0]
    return item == 0 and got.shape[1] == need.shape[1] and got.shape[0] != need.shape[0]
