"""Whole gradients that FSDP keeps on each rank inside `no_sync`, until a later backward.

An optimizer sees only the shards. So while a whole gradient is kept, its shard has a gradient too,
zeros if need be: when the optimizer clears that, the kept one is dropped. Notebook 10_fsdp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from course_lib.core.errors import CourseError


class KeptGrads(dict[int, Tensor]):
    """The kept gradients of a unit, by the index of their parameter."""

    def __init__(self, names: Sequence[str], shards: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._names, self._shards = names, shards
        # the gradients of the shards meanwhile, with the versions of both
        self._marks: dict[int, tuple[Tensor, int, int]] = {}

    def keep(self, index: int, grad: Tensor) -> None:
        """Keep a gradient in the place of the one before, which it includes."""
        self[index], shard = grad, self._shards[index]
        shard.grad = torch.zeros_like(shard) if shard.grad is None else shard.grad
        self._marks[index] = shard.grad, shard.grad._version, shard._version

    def drop_cleared(self, *, all_reduced: bool = False) -> None:
        """Drop the gradients that an optimizer has cleared on the shards.

        Raises:  CourseError if one has stepped without them, or written zeros; and with
                 all_reduced if any is left
        """
        for index, (mark, version, of_shard) in list(self._marks.items()):
            shard, grad = self._shards[index], self._shards[index].grad
            same = grad is None or not grad.numel() or (grad is mark and grad._version == version)
            left = all_reduced and grad is not None
            zeros = not same and grad is not None and not grad.any()
            if left or zeros or shard._version != of_shard:
                raise CourseError(
                    "FSDP: need a backward outside of no_sync() before the gradients are used; got "
                    f"{self._names[index]}, of which no_sync() keeps one on each rank. Try "
                    "no_sync() around all backwards but the last, or model.zero_grad()."
                )
            if grad is None:
                del self._marks[index], self[index]

    def clear(self) -> None:
        """Drop all of them."""
        super().clear()
        self._marks = {}


def is_negative_zero(number: Tensor) -> bool:
    """Return whether a number is -0.0."""
    return bool((number == 0) & number.real.signbit())
