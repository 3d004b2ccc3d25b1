"""Tools for the checks of 07_tensor_parallel: numbers up to rounding, one sum, and warnings."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.exercise import Cause
from course_lib.checks.expectations import Calls, Numbers, Value, read
from course_lib.checks.on_ranks import At

ROUNDING = 1e-11
Wanted = Callable[[At], Any]
TOLERANCE = {torch.bfloat16: 0.05}  # it keeps 8 bits

OUTSIDE = Cause(
    "Autograd does not know dist.all_reduce: backward passes it by, and PyTorch warns of wrong "
    "gradients. Sum inside of g (reduce_from_region), whose backward is known."
)
OTHER_SIZE = Cause("Sum what has to be summed and nothing else, in its own dtype.")
NOT_WAITED = Cause(
    "An all_reduce was started with async_op=True, and its result was read before it was there: "
    "call wait() on the handle first."
)


def shard_of(size: int, p: int, rank: int) -> Tensor:
    """Return a rank's numbers out of 0 ... size - 1: the first ranks get one more."""
    return torch.arange(size).tensor_split(p)[rank]


def close(
    value: Value, right: Wanted, causes: Sequence[tuple[Cause, Wanted]] = (), **more: Any
) -> Numbers:
    """Demand numbers up to rounding, relative and absolute: `TOLERANCE` of their dtype."""

    def seen(at: At) -> Any:
        return _settled(read(at, value), right(at))

    def up_to_rounding(wrong: Wanted) -> Wanted:
        return lambda at: _settled(wrong(at), seen(at))

    causes = [(cause, up_to_rounding(wrong)) for cause, wrong in causes]
    return Numbers(seen, right, causes, **more)


def _settled(got: Any, need: Any) -> Any:
    """Return what was got, with the needed numbers where they differ by rounding only."""
    if isinstance(got, list) and isinstance(need, list) and len(got) == len(need):
        return [_settled(*pair) for pair in zip(got, need, strict=True)]
    tensors = isinstance(got, Tensor) and isinstance(need, Tensor)
    if not tensors or (got.shape, got.dtype) != (need.shape, need.dtype):
        return got
    limit = TOLERANCE.get(need.dtype, ROUNDING)
    return need.where(torch.isclose(got, need, rtol=limit, atol=limit), got)


def one_sum(value: Value, num_bytes: Callable[[At], int], look: Cause) -> Calls:
    """Demand one all_reduce of that many bytes; on one rank, none does as well."""
    return Calls(
        lambda at: [("all_reduce", num_bytes(at))] if at.world_size > 1 or read(at, value) else [],
        other_kind=look,
        symptoms=((lambda got, need: len(got) == len(need), OTHER_SIZE),),
        look=look,
        value=value,
    )


def changed(**now_and_before: tuple[Tensor, Tensor]) -> tuple[str, ...]:
    """Return the names of the tensors that are not what they were: `gradient_from_above`."""
    return tuple(
        name.replace("_", " ") for name, pair in now_and_before.items() if not torch.equal(*pair)
    )


def is_outside(backward: Callable[[], Any]) -> bool:
    """Run a backward; return whether PyTorch warns of a collective that autograd does not know."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward()
    return any("autograd kernel was not registered" in str(one.message) for one in caught)
