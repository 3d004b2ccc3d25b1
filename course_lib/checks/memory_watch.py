"""A watch that counts bytes of tensors: those of storages, not the memory of the process.

A view counts as all of what it looks into, and a tensor with all that its gradient keeps, too.
"""

import gc
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from course_lib.checks.watch import Step, Watch
from course_lib.ranks.held_up import others_are_ready

LETS_GO_S, ON_A_BUSY_MACHINE_S = 1.0, 10.0


class MemoryWatch(Watch):
    """A watch that can tell what is still alive after its steps, of all that is made in it.

    It keeps the calls of its steps until then: a thread of gloo lets go of a call's tensors a
    moment after the call has returned, and where Python does so in that very moment, PyTorch frees
    them never.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Step] = []

    def __enter__(self) -> "MemoryWatch":
        gc.freeze()  # all that is there is hidden from what counts
        return self

    def __exit__(self, *_: Any) -> None:
        gc.unfreeze()

    @contextmanager
    def step(self, label: str, **given: Any) -> Iterator[Step]:
        """Watch the block, as any watch."""
        with super().step(label, **given) as step:
            self._steps.append(step)
            yield step

    def left_bytes(self, *known: Any, enough: int = 0) -> int:
        """Return the bytes of all tensors alive but the known ones, in lists or dicts, and `seen`.

        Where there are more than `enough`, look again until gloo has let go.
        """
        time.sleep(LETS_GO_S / 50)
        for step in self._steps:
            step.calls.clear()  # which hold tensors, also where somebody holds the step
        self._steps.clear()
        start_s, mine = time.perf_counter(), _storages(tree_leaves((known, self.seen)))
        while True:
            found = _alive_bytes(mine)
            limit_s = ON_A_BUSY_MACHINE_S if others_are_ready() else LETS_GO_S
            if found <= enough or time.perf_counter() - start_s > limit_s:
                return found
            time.sleep(LETS_GO_S / 50)

    def bytes_too_many(self, enough: int, *known: Any) -> int:
        """Return how many bytes more than `enough` are left."""
        return max(0, self.left_bytes(*known, enough=enough) - enough)


def held_bytes(*tensors: Any) -> int:
    """Return the bytes that tensors keep alive; None keeps none."""
    return sum(_storages(tensors).values())


def _tensors(things: Iterable[Any]) -> list[Tensor]:
    """Return the tensors; isinstance would wake objects that warn."""
    return [one for one in things if issubclass(type(one), Tensor)]


def _alive_bytes(known: Container[int]) -> int:
    """Return the bytes of what is alive and not known; a loop's list of it would keep it alive.

    A single number counts nothing by itself, but a known one may be a view of more.
    """
    gc.collect()
    counted = [x for x in _tensors(gc.get_objects()) if x.is_floating_point() and x.dim()]
    return sum(size for place, size in _storages(counted).items() if place not in known)


def _storages(things: Iterable[Any]) -> dict[int, int]:
    """Return address and bytes of what tensors and their gradients keep alive."""
    tensors = _tensors(things)
    grads = [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    with_memory = [
        one for one in (*tensors, *grads) if one.layout == torch.strided and not one.is_meta
    ]
    storages = [one.untyped_storage() for one in with_memory]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
