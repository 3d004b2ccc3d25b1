"""Tools for the checks of 07_tensor_parallel: what autograd does not know, equal ranks, memory."""

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from course_lib.checks.exercise import Cause
from course_lib.checks.watch import bits_of

OUTSIDE = Cause(
    "Autograd does not know dist.all_reduce: backward ignores it, and PyTorch warns of wrong "
    "gradients. Sum inside g (reduce_from_region), which defines its backward."
)
NOT_TRAINING = Cause(
    "Right in training, wrong where no gradient is needed (under no_grad, or frozen): evaluation "
    "needs the same sums. Leave the gradient to autograd, and do not check the mode."
)
APART = Cause(
    "Ranks that differ in the last bit drift apart. Return what all_reduce wrote: y + (total - y) "
    "rounds differently on each rank."
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
