"""Tools for the checks of 07_tensor_parallel: f and g, a rank's traffic, and its memory."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.exercise import CheckFailed
from course_lib.checks.expect import Cause, expect_equal
from course_lib.core import COMMUNICATION_KINDS, Event

WORLD_SIZES = (3, 2, 4, 1)  # on 2 ranks, wrong answers look alike
ROUNDING = 1e-11
OUTSIDE = (
    "dist.all_reduce is not part of the graph: backward passes it by, and PyTorch warns of wrong "
    "gradients. Sum with reduce_from_region, whose backward is known."
)


class CopyToRegion(torch.autograd.Function):
    """f: nothing in forward, the sum over the ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad)


class ReduceFromRegion(torch.autograd.Function):
    """g: the sum over the ranks in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def copy_to_region(x: Tensor) -> Tensor:
    """Apply f as a function."""
    out: Tensor = CopyToRegion.apply(x)
    return out


def reduce_from_region(x: Tensor) -> Tensor:
    """Apply g as a function."""
    out: Tensor = ReduceFromRegion.apply(x)
    return out


def summed(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum (or maximum) over all ranks; x stays as it is, autograd records nothing."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op)
    return total


def mine_of(size: int) -> Tensor:
    """Return this rank's numbers out of 0 ... size - 1: the first ranks get one more."""
    return torch.arange(size).tensor_split(dist.get_world_size())[dist.get_rank()]


def calls_in(events: Iterable[Event]) -> list[Event]:
    """Return the communication among some events, in order."""
    return sorted(
        (event for event in events if event.kind in COMMUNICATION_KINDS), key=lambda e: e.start_s
    )


def close_to(wrong: Tensor) -> Callable[[Any], bool]:
    """Return a cause: the result is this value, up to rounding."""
    return lambda got: (
        got.shape == wrong.shape and bool(torch.allclose(got, wrong, rtol=ROUNDING, atol=ROUNDING))
    )


def expect_close(
    got: Any, expected: Tensor, where: str, causes: Sequence[Cause] = (), look: str = ""
) -> None:
    """Demand equality in float64, up to the rounding of sums in another order."""
    if isinstance(got, Tensor):
        got = got.detach()
        if got.dtype == expected.dtype and got.shape == expected.shape:
            near = torch.isclose(got, expected, rtol=ROUNDING, atol=ROUNDING)
            got = expected.where(near, got)  # what is only rounded is not told as wrong
    expect_equal(got, expected, where=where, causes=causes, look=look)


def is_outside(backward: Callable[[], Any]) -> bool:
    """Run a backward; return whether PyTorch warns of a collective that autograd does not know."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward()
    return any("autograd kernel was not registered" in str(one.message) for one in caught)


def expect_one_sum(where: str, calls: Sequence[Event], num_bytes: int, says: str) -> None:
    """Demand exactly one all_reduce of that many bytes."""
    if [(call.kind, call.num_bytes) for call in calls] == [("all_reduce", num_bytes)]:
        return
    made = ", ".join(f"{call.kind} of {call.num_bytes} bytes" for call in calls) or "no call"
    raise CheckFailed(f"{where}: need one all_reduce of {num_bytes} bytes; got {made}. {says}")


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes of all storages that a module and its lists keep alive, but indices."""
    stack: list[Any] = [model]
    sizes, seen = dict[int, int](), set[int]()
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if thing.is_floating_point():
                storage = thing.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, nn.Module):
            stack += vars(thing).values()
        elif isinstance(thing, dict):
            stack += thing.values()
        elif isinstance(thing, list | tuple):
            stack += thing
    return sum(sizes.values())
