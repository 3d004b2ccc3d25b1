"""Tools for the checks of 07_tensor_parallel: numbers up to rounding, equal ranks, one sum."""

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.exercise import Cause
from course_lib.checks.expect import SHOWN
from course_lib.checks.expectations import Demand, Numbers, Value, read
from course_lib.checks.on_ranks import At
from course_lib.checks.watch import bits_of

ROUNDING = 1e-11
Wanted = Callable[[At], Any]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # bfloat16 keeps 8 bits

NOT_A_NAME = "^(?!NameError|AttributeError).*"  # `world_size` is no word about sizes

OUTSIDE = Cause(
    "Autograd does not know dist.all_reduce: backward ignores it, and PyTorch warns of wrong "
    "gradients. Sum inside g (reduce_from_region), which defines its backward."
)
NOT_WAITED = Cause(
    "A collective was started with async_op=True, and its result was read before it was complete: "
    "call wait() on the handle first."
)
NEARLY = Cause(
    "Nearly right: sum each rank's term once, in the dtype of the input, and add nothing (no "
    "epsilon)."
)
NOT_TRAINING = Cause(
    "Right in training, wrong where no gradient is needed (under no_grad, or frozen): evaluation "
    "needs the same sums. Leave the gradient to autograd, and do not check the mode."
)
APART = Cause(
    "Ranks that differ in the last bit drift apart. Return what all_reduce wrote: y + (total - y) "
    "rounds differently on each rank."
)


def shard_of(size: int, p: int, rank: int) -> Tensor:
    """Return a rank's numbers out of 0 ... size - 1: the first ranks get one more."""
    return torch.arange(size).tensor_split(p)[rank]


def close(
    value: Value, right: Wanted, causes: Sequence[tuple[Cause, Wanted]] = (), **more: Any
) -> Numbers:
    """Demand numbers up to rounding, relative and absolute: `TOLERANCE` of their dtype.

    `more` goes to `Numbers`; what is wrong by a few digits only is told as NEARLY.
    """

    def seen(at: At) -> Any:
        return _settled(read(at, value), right(at))

    def up_to_rounding(wrong: Wanted) -> Wanted:
        return lambda at: _settled(wrong(at), seen(at))

    causes = [(cause, up_to_rounding(wrong)) for cause, wrong in causes]
    more["predicates"] = (*more.get("predicates", ()), (nearly(right, SHOWN), NEARLY))
    more["otherwise"] = (*more.get("otherwise", ()), (nearly(right), NEARLY))
    return Numbers(seen, right, causes, **more)


def nearly(right: Wanted, limit: float = 0.02) -> Callable[[At, Any, int | None], bool]:
    """Return a predicate of `Numbers`: whether what was got is off by little."""

    def holds(at: At, got: Any, item: int | None) -> bool:
        need = right(at) if item is None else right(at)[item]
        atol = limit * need.abs().max().item()
        return got.shape == need.shape and torch.allclose(got, need, rtol=limit, atol=atol)

    return holds


def same_bits(value: str, what: str) -> Demand:
    """Demand that ranks that are right up to rounding got the same, bit for bit."""
    return Demand(
        lambda at: not any(_drift(read(at, value), read(other, value)) for other in at.everyone),
        f"{what} is right up to rounding, but not the same on every rank",
        APART,
    )


def _drift(one: Any, other: Any) -> bool:
    """Return whether two tensors differ by rounding: by more, and one of them is wrong."""
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    if not tensors or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    limit = 2 * TOLERANCE.get(one.dtype, ROUNDING)
    return not torch.equal(one, other) and torch.allclose(one, other, rtol=limit, atol=limit)


def _settled(got: Any, need: Any) -> Any:
    """Return what was got, with the needed numbers where they differ by rounding only."""
    if isinstance(got, list) and isinstance(need, list) and len(got) == len(need):
        return [_settled(*pair) for pair in zip(got, need, strict=True)]
    tensors = isinstance(got, Tensor) and isinstance(need, Tensor)
    if not tensors or (got.shape, got.dtype) != (need.shape, need.dtype):
        return got
    limit = TOLERANCE.get(need.dtype, ROUNDING)
    return need.where(torch.isclose(got, need, rtol=limit, atol=limit), got)


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


def backward(out: Any, above: Tensor) -> None:
    """Run backward, if that is possible with this gradient from above."""
    if isinstance(out, Tensor) and out.requires_grad and out.shape == above.shape:
        out.backward(above)


def bits_on_all(x: Any) -> list[Any]:
    """Return the numbers of all ranks, and the bits of a tensor, which they have to agree on."""
    bits = bits_of(x.double()) if isinstance(x, Tensor) else ""
    return [[*range(dist.get_world_size())], bits]


def bytes_beyond(allowed: Callable[[Any], int], make: Callable[[], Any]) -> int:
    """Return the bytes of all numbers that `make()` keeps alive, beyond those that are allowed.

    Wherever they are kept: in closures and global names as well. A rank's heartbeat has the frame
    that runs, with all tensors in it, for a moment: so look again until a second has passed.
    """
    gc.freeze()  # get_objects lists those made from here on
    try:
        made, end_s = make(), time.monotonic() + 1
        while (found := _new_bytes() - allowed(made)) > 0 and time.monotonic() < end_s:
            time.sleep(0.02)
    finally:
        gc.unfreeze()
    return max(0, found)


def _new_bytes() -> int:
    gc.collect()
    tensors = (one for one in gc.get_objects() if isinstance(one, Tensor))
    storages = (one.untyped_storage() for one in tensors if one.is_floating_point())
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
