"""Tools for the checks of 10_fsdp: how the rows of a tensor are split, and what is kept alive."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from course_lib.checks.watch import Step, Watch
from course_lib.ranks.held_up import others_are_ready

LETS_GO_S, ON_A_BUSY_MACHINE_S = 1.0, 10.0


def num_rows(tensor: Tensor, p: int) -> int:
    """Return the rows of a full shard."""
    return -(-len(tensor) // p)


def rows_of(tensor: Tensor, rank: int, p: int) -> Tensor:
    """Return the rows that a rank keeps, as torch.chunk splits them."""
    rows = num_rows(tensor, p)
    return tensor[rank * rows : (rank + 1) * rows]


def held_bytes(*tensors: Any) -> int:
    """Return the bytes that tensors keep alive: a view keeps all of what it looks into."""
    return sum(_storages(tensors).values())


class MemoryWatch(Watch):
    """A watch that can tell what is still alive after its steps, of all that is made in it.

    It keeps the steps until then: a thread of gloo lets go of a call's tensors a moment after the
    call has returned, and where Python does so in that very moment, PyTorch frees them never.
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
        self._steps.clear()
        start_s, mine = time.perf_counter(), _storages(tree_leaves((known, self.seen)))
        while True:
            gc.collect()
            alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
            found = sum(size for place, size in _storages(alive).items() if place not in mine)
            limit_s = ON_A_BUSY_MACHINE_S if others_are_ready() else LETS_GO_S
            if found <= enough or time.perf_counter() - start_s > limit_s:
                return found
            time.sleep(LETS_GO_S / 50)


def _storages(things: Any) -> dict[int, int]:
    """Return address and bytes of what tensors and their gradients keep alive."""
    tensors = [one for one in things if issubclass(type(one), Tensor)]
    grads = [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    storages = [
        one.untyped_storage()
        for one in (*tensors, *grads)
        if one.layout == torch.strided and not one.is_meta and one.is_floating_point() and one.dim()
    ]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
