"""Sharding a parameter on dim 0: rank r keeps the r-th of p equal ranges of rows.

That is `torch.chunk`, so names and all dims but the first stay what they are. Where p does not
divide the rows, the last shards are shorter or empty; messages have room for the longest one.
This file is arithmetic on shapes, without communication. Notebook 10_fsdp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dim0Layout:
    """A parameter of a shape in p shards; one without dims counts as a single row."""

    shape: tuple[int, ...]
    p: int

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The shape with at least one dim, the one to shard."""
        return self.shape or (1,)

    @cached_property
    def shard_rows(self) -> int:
        """Rows of the longest shard: ceil(rows / p)."""
        return -(-self.rows[0] // self.p)

    @cached_property
    def numel(self) -> int:
        """Numbers in the parameter."""
        return prod(self.rows)

    @cached_property
    def slot_numel(self) -> int:
        """Numbers in the longest shard; each rank's slot in a message has room for them."""
        return self.shard_rows * prod(self.rows[1:])

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard; [0, ...] for ranks behind the last row."""
        left = self.rows[0] - rank * self.shard_rows
        return (min(self.shard_rows, max(0, left)), *self.rows[1:])

    def shard_of(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a rank's shard of a whole tensor.

        Shapes:  [rows, ...] -> [up to shard_rows, ...]
        """
        rows = tensor.reshape(self.rows)
        return rows[rank * self.shard_rows : (rank + 1) * self.shard_rows]

    def shard_in(self, slot: Tensor, rank: int) -> Tensor:
        """Return a rank's shard in its slot, without the padding behind it.

        Shapes:  [slot_numel] -> [up to shard_rows, ...]
        """
        shape = self.shard_shape(rank)
        return slot[: prod(shape)].view(shape)

    def whole_in(self, slots: Tensor) -> Tensor:
        """Return the whole tensor that lies in p consecutive slots.

        Shapes:  [p * slot_numel] -> the parameter's
        """
        return slots[: self.numel].view(self.shape)

    def copy_to_slots(self, whole: Tensor, slots: Tensor) -> None:
        """Copy every rank's shard of a whole tensor to its slot, in the slots' dtype; pad with 0.

        Shapes:  the parameter's -> [p, slot_numel]
        """
        flat = whole.reshape(-1)
        full = self.numel // self.slot_numel if self.slot_numel else self.p  # slots without padding
        end = full * self.slot_numel
        slots[:full].copy_(flat[:end].view(full, self.slot_numel))
        if full < self.p:
            slots[full:].zero_()
            slots[full, : self.numel - end].copy_(flat[end:])


def columns(
    layouts: Sequence[Dim0Layout], dtypes: Sequence[torch.dtype]
) -> tuple[list[tuple[int, Dim0Layout, torch.dtype]], int]:
    """Return where each parameter's slot begins in a row, in bytes, and the bytes of a row.

    Each start, and the row, is a multiple of the largest number's bytes, so that each is aligned.
    """
    unit = max(dtype.itemsize for dtype in dtypes)
    columns, start = [], 0
    for layout, dtype in zip(layouts, dtypes, strict=True):
        columns.append((start, layout, dtype))
        start += -(-layout.slot_numel * dtype.itemsize // unit) * unit
    return columns, start
