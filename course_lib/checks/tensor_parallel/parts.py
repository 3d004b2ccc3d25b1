"""Tools for the checks of 07_tensor_parallel: numbers up to rounding, equal ranks, one sum."""

import gc
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.exercise import Cause
from course_lib.checks.expect import SHOWN
from course_lib.checks.expectations import Calls, Demand, Numbers, Value, read
from course_lib.checks.on_ranks import At

ROUNDING = 1e-11
Wanted = Callable[[At], Any]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # bfloat16 keeps 8 bits

NOT_A_NAME = "^(?!NameError|AttributeError).*"  # `world_size` is no word about sizes

OUTSIDE = Cause(
    "Autograd does not know dist.all_reduce: backward ignores it, and PyTorch warns of wrong "
    "gradients. Sum inside g (reduce_from_region), which defines its backward."
)
OTHER_SIZE = Cause("Sum what has to be summed and nothing else, in its own dtype.")
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


def bytes_kept(make: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `make()` returns, and the bytes of all numbers that it keeps alive.

    These are the tensors of a module, also views of what was there, and all new ones, wherever they
    are kept: in closures and global names as well.
    """
    gc.freeze()  # get_objects lists those made from here on
    try:
        made = make()
        gc.collect()
        new = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    finally:
        gc.unfreeze()
    storages = (tensor.untyped_storage() for tensor in _floats_in([made, new]))
    return made, sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _floats_in(thing: Any) -> list[Tensor]:
    """Return the tensors of a module, its submodules, and lists and dicts of them; no indices."""
    if isinstance(thing, Tensor):
        return [thing] if thing.is_floating_point() else []
    thing = vars(thing) if isinstance(thing, nn.Module) else thing
    things = thing.values() if isinstance(thing, dict) else thing
    inside = isinstance(things, Collection) and not isinstance(things, str)
    return [tensor for each in things for tensor in _floats_in(each)] if inside else []
