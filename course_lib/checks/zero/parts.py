"""Tools for the checks of 09_zero: calls in any order, and the bytes of tensors that are alive.

`alive_bytes` counts storages, not the memory of the process: a view counts as all that it keeps.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.exercise import Cause
from course_lib.checks.expectations import Demand, Value, read
from course_lib.checks.on_ranks import At
from course_lib.checks.properties import NOT_WAITED, SHARED
from course_lib.checks.watch import WAIT, Step
from course_lib.ranks.held_up import others_are_ready
from course_lib.ranks.work_handle import TrackedWork

LETS_GO_S, ON_A_BUSY_MACHINE_S = 1.0, 10.0
CALLS = "calls"  # a facet


def named(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers in one flat tensor, copied."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def shard_numel(numel: int, p: int) -> int:
    """Return the numbers in an equal shard."""
    return -(-numel // p)


def calls_of(step: Step) -> list[str]:
    """Return the calls of a step, in no order; of one rank none, for it may do without."""
    return sorted(line for line in step.order if line != WAIT) if dist.get_world_size() > 1 else []


def bytes_too_many(enough: int, *besides: Any) -> int:
    """Return how many bytes more than `enough` are alive, but for those of `besides`."""
    return max(0, alive_bytes(*besides, enough=enough) - enough)


@contextmanager
def only_new() -> Iterator[None]:
    """Let `alive_bytes` count only what is made from here on: all else is hidden from it."""
    gc.freeze()  # what is there is not even looked through, which takes a rank 0.3 s
    try:
        yield
    finally:
        gc.unfreeze()


def alive_bytes(*besides: Any, enough: int) -> int:
    """Return the bytes of the storages that tensors keep alive, but for those in `besides`.

    A thread of gloo lets go of a call's tensors a moment after the call has returned: where there
    are more bytes than `enough`, look again until that moment has passed. It is longer where a
    thread waits for a core.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(besides)}
    start_s = time.perf_counter()
    while True:
        found = sum(size for address, size in _storages().items() if address not in known)
        limit_s = ON_A_BUSY_MACHINE_S if others_are_ready() else LETS_GO_S
        if found <= enough or time.perf_counter() - start_s > limit_s:
            return found
        time.sleep(LETS_GO_S / 50)


def _tensors(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists and dicts, and the parameters of modules."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from thing.parameters()
    elif isinstance(thing, list | tuple | dict):
        for one in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(one)


def _storages() -> dict[int, int]:
    """Return address and bytes of the floating-point storages that objects refer to."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would wake objects that warn
            grad = thing.grad if thing.is_leaf else None
            for tensor in (thing, *([grad] if grad is not None else [])):
                has_memory = tensor.layout == torch.strided and not tensor.is_meta
                if has_memory and tensor.is_floating_point() and tensor.dim():
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


# --- for the checks of other lessons, which still list what they expect

OF_THE_CLASS = SHARED
ROUNDED = Cause("Nearly right: something on the way was rounded; keep the gradients' dtype.")
BESIDE = "with a 2nd object"  # where several objects are alive, what is told says so


def nearly(got: Tensor, need: Tensor) -> bool:
    """Return whether rounding to a shorter dtype explains the difference."""
    return torch.allclose(got.double(), need.double(), rtol=0.01, atol=0)


@contextmanager
def telling(where: str) -> Iterator[None]:
    """Put the place before the text of an error of the answer: `used twice: ...`."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        error.args = (f"{where}: {error}",)
        raise


@contextmanager
def unwaited_calls() -> Iterator[dict[int, str]]:
    """Yield the kinds of the calls that were started and that nobody has waited for, by number."""
    begin, unwaited = TrackedWork.__init__, dict[int, str]()

    def note_begin(work: TrackedWork, *args: Any, **kwargs: Any) -> None:
        begin(work, *args, **kwargs)
        unwaited[work.post.number] = work.post.kind

    def noting(ends: Callable[..., Any]) -> Callable[..., Any]:
        def note_end(work: TrackedWork, *args: Any) -> Any:
            unwaited.pop(work.post.number, None)
            return ends(work, *args)

        return note_end

    with (
        patch.object(TrackedWork, "__init__", note_begin),
        patch.object(TrackedWork, "wait", noting(TrackedWork.wait)),
        patch.object(TrackedWork, "get_future", noting(TrackedWork.get_future)),
    ):
        yield unwaited


ALL_WAITED = Demand(
    lambda at: not at.seen.unwaited,
    lambda at: f"nothing waits for {' and '.join(sorted(set(at.seen.unwaited)))}",
    NOT_WAITED,
)


def unless_alone(
    needed: Callable[[At], list[tuple[str, int]]], value: Value = "calls"
) -> Callable[[At], list[tuple[str, int]]]:
    """Return the calls that are needed; a single rank may do without."""
    return lambda at: needed(at) if at.world_size > 1 or read(at, value) else []
