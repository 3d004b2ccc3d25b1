"""Tools for the checks of 09_zero: a module whose numbers are all different, and bytes alive."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.ddp.parts import Bag
from course_lib.checks.exercise import CheckFailed
from course_lib.core import COMMUNICATION_KINDS, Event

WORLD_SIZES = (3, 2, 4, 1)  # on 2 ranks, wrong answers look alike
ROUNDING = 1e-12
NUMBER_BYTES = 8  # everything is float64
LETS_GO_S = 1.0
ALONE = "rank 0 of 1,"


def uneven(sizes: Sequence[int]) -> Bag:
    """Return parameters of different sizes and numbers; the first is tied, the second frozen."""
    module = Bag(sizes)
    with torch.no_grad():
        for i, param in enumerate(module.weights):
            param.copy_(module.pattern(i) + 10 * i)
    return module


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers in one flat tensor, copied."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def shard_numel(numel: int, p: int) -> int:
    """Return the numbers in an equal shard."""
    return -(-numel // p)


def shard_of(row: Tensor, rank: int, p: int) -> Tensor:
    """Return a rank's shard of a flat tensor that is padded with zeros."""
    n = shard_numel(row.numel(), p)
    return torch.cat([row, row.new_zeros(n * p - row.numel())])[rank * n : (rank + 1) * n]


@contextmanager
def only_new() -> Iterator[None]:
    """Let `alive_bytes` count only what is made from here on: all else is hidden from it."""
    gc.freeze()  # what is there is not even looked through, which takes a rank 0.3 s
    try:
        yield
    finally:
        gc.unfreeze()


def alive_bytes(*besides: nn.Module | Tensor, enough: int) -> int:
    """Return the bytes of the storages that tensors keep alive, but for those of `besides`.

    A thread of gloo lets go of a call's tensors a moment after the call has returned: where there
    are more bytes than `enough`, look again until that moment has passed.
    """
    known, end_s = set[int](), time.perf_counter() + LETS_GO_S
    for thing in besides:
        tensors = thing.parameters() if isinstance(thing, nn.Module) else [thing]
        known |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
    while True:
        found = sum(size for address, size in _storages().items() if address not in known)
        if found <= enough or time.perf_counter() > end_s:
            return found
        time.sleep(LETS_GO_S / 50)


def _storages() -> dict[int, int]:
    """Return address and bytes of the floating-point storages that objects refer to."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would wake objects that warn
            grad = thing.grad if thing.is_leaf else None
            for tensor in (thing, *([grad] if grad is not None else [])):
                if tensor.layout == torch.strided and tensor.is_floating_point() and tensor.dim():
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def calls_in(events: Sequence[Event]) -> list[tuple[str, int]]:
    """Return kind and bytes of the communication, in order."""
    made = sorted((e for e in events if e.kind in COMMUNICATION_KINDS), key=lambda e: e.start_s)
    return [(call.kind, call.num_bytes) for call in made]


def expect_calls(
    where: str, got: Sequence[tuple[str, int]], needed: Sequence[tuple[str, int]], says: str
) -> None:
    """Demand these calls, in this order; a single rank may do without."""
    if list(got) != list(needed) and (got or not where.startswith(ALONE)):
        raise CheckFailed(f"{where}: need {_listed(needed)}; got {_listed(got)}. {says}")


def _listed(calls: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} of {size} bytes" for kind, size in calls) or "no call at all"


def close(got: Any, wanted: Tensor) -> bool:
    """Return whether they are equal up to the rounding of sums in another order."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    return torch.allclose(got, wanted, rtol=ROUNDING, atol=ROUNDING)
