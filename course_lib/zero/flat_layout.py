"""Tensors side by side in one flat row, which a group of ranks cuts into equal shards.

A row is filled up with zeros until the ranks can share it evenly: at most group_size - 1 numbers.
Where a shard begins has nothing to do with where a tensor begins, so a rank owns pieces of tensors.
Everything here is arithmetic on shapes; nobody communicates. Notebooks 09_zero and 10_fsdp.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from course_lib.core.errors import MeshError, ShapeError


@dataclass(frozen=True)
class Piece:
    """What a shard holds of one tensor: its numbers start .. stop - 1, counted row by row.

    index    the tensor's number in the layout
    offset   where the piece begins in the shard
    """

    index: int
    start: int
    stop: int
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of the whole tensor; a view where the tensor lies row by row."""
        return tensor.reshape(-1)[self.start : self.stop]

    def within(self, shard: Tensor) -> Tensor:
        """The piece as a view of the shard."""
        return shard[self.offset : self.offset + self.stop - self.start]


@dataclass(frozen=True)
class FlatLayout:
    """Where tensors of these shapes lie in a row that `group_size` ranks share.

    layout = FlatLayout.of(tensors, group_size)
    flat = layout.flatten(tensors)               # [padded_numel]
    mine = flat[layout.shard_slice(rank)]        # [shard_numel], the same length on every rank
    tensors = layout.views(flat)

    Raises: MeshError for a group of no ranks
    """

    shapes: tuple[tuple[int, ...], ...]
    group_size: int

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise MeshError(
                f"FlatLayout: need a group_size of 1 or more; got {self.group_size}. "
                "Try dist.get_world_size(group)."
            )

    @classmethod
    def of(cls, tensors: Iterable[Tensor], group_size: int) -> "FlatLayout":
        """The layout of these tensors."""
        return cls(tuple(tuple(tensor.shape) for tensor in tensors), group_size)

    @cached_property
    def numels(self) -> list[int]:
        """Numbers in each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def starts(self) -> list[int]:
        """Where each tensor begins in the row, and at last where the zeros begin."""
        return list(accumulate(self.numels, initial=0))

    @property
    def numel(self) -> int:
        """Numbers in all tensors, without what fills the row up."""
        return self.starts[-1]

    @property
    def shard_numel(self) -> int:
        """Numbers in one rank's shard: ceil(numel / group_size)."""
        return -(-self.numel // self.group_size)

    @property
    def padded_numel(self) -> int:
        """Numbers in the whole row."""
        return self.shard_numel * self.group_size

    def shard_slice(self, rank: int) -> slice:
        """Where the shard of the group's rank number `rank` lies in the row.

        Raises: MeshError for a rank outside of the group
        """
        if not 0 <= rank < self.group_size:
            raise MeshError(
                f"FlatLayout: need a rank from 0 to {self.group_size - 1}; got {rank}. "
                "Try dist.get_rank(group)."
            )
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new row with copies of the tensors, and zeros at its end.

        Shapes:  those of the layout -> [padded_numel]
        Raises:  ShapeError for other shapes than the layout's
        """
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes != self.shapes:
            raise ShapeError(
                f"FlatLayout.flatten: need tensors of shapes {_short(self.shapes)}; got "
                f"{_short(shapes)}. Try the tensors that the layout was made of, in their order."
            )
        rows = [tensor.detach().reshape(-1) for tensor in tensors]
        padding = self.padded_numel - self.numel
        return torch.cat([*rows, rows[0].new_zeros(padding)]) if rows else torch.zeros(0)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors, as views of the row: what is written to one is written to the other.

        Raises:  ShapeError if flat is not [padded_numel]
        """
        if flat.shape != (self.padded_numel,):
            raise ShapeError(
                f"FlatLayout.views: need a row of [{self.padded_numel}]; got {list(flat.shape)}. "
                "Try all shards, one behind the other."
            )
        parts = flat[: self.numel].split(self.numels) if self.shapes else []
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def pieces(self, rank: int) -> list[Piece]:
        """What the shard of a rank holds: a piece of each tensor that reaches into it, in order."""
        shard = self.shard_slice(rank)
        found = []
        for index, (start, numel) in enumerate(zip(self.starts, self.numels, strict=False)):
            first, last = max(shard.start, start), min(shard.stop, start + numel)
            if first < last:
                found.append(Piece(index, first - start, last - start, first - shard.start))
        return found


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    """`[[3, 2], [3]]`, of many the first three."""
    rest = f" and {len(shapes) - 3} more" if len(shapes) > 4 else ""
    return str([list(shape) for shape in shapes[: 3 if rest else None]]) + rest
