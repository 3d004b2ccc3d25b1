"""The right answer to exercise 1 of 07_tensor_parallel, and the wrong ones its check must name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.tensor_parallel.parts import (
    CopyToRegion,
    ReduceFromRegion,
    copy_to_region,
    reduce_from_region,
    summed,
)

Part = Callable[[Tensor], Tensor]


def together(x: Tensor, part: Part) -> Tensor:
    """Return the sum of part(x) over the ranks."""
    return reduce_from_region(part(copy_to_region(x)))


def pair(f_backward: Any = summed, g_forward: Any = summed, g_backward: Any = None) -> Any:
    """Return an answer with other insides."""

    class Copy(CopyToRegion):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return f_backward(grad)

    class Sum(ReduceFromRegion):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out: Tensor = g_forward(x)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return g_backward(grad) if g_backward else grad

    return lambda x, part: Sum.apply(part(Copy.apply(x)))


def mean_of_own(x: Tensor) -> Tensor:
    return x / dist.get_world_size()


def mean(x: Tensor) -> Tensor:
    return summed(x) / dist.get_world_size()


def in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def not_waiting(x: Tensor) -> Tensor:
    total = x.detach().clone()
    dist.all_reduce(total, async_op=True)
    return total.clone()


def no_return(x: Tensor) -> None:
    summed(x)


def unsummed(x: Tensor) -> Tensor:
    summed(x)
    return x.clone()


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts).sum(0)


def swapped(x: Tensor, part: Part) -> Tensor:
    return copy_to_region(part(reduce_from_region(x)))


def without_f(x: Tensor, part: Part) -> Tensor:
    return reduce_from_region(part(x))


def left_the_graph(x: Tensor, part: Part) -> Tensor:
    return summed(part(x))
