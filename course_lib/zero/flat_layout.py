"""The layout of a flat parameter: tensors side by side, cut into equal shards, one per rank.

The flat tensor is padded with zeros until the group can share it evenly: at most group_size - 1
numbers. Shards do not begin where tensors begin, so a rank owns pieces of tensors. Everything here
is arithmetic on shapes, without communication. Notebook 09_zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from course_lib.core.errors import MeshError, ShapeError

if TYPE_CHECKING:  # `live.py` stands on this file, and needs no PyTorch
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The part of a tensor in a shard: its numbers start .. stop - 1 in row-major order.

    index    the tensor's number in the layout
    offset   where the piece begins in the shard
    """

    index: int
    start: int
    stop: int
    offset: int

    def of(self, tensor: "Tensor") -> "Tensor":
        """Return the piece of the whole tensor: a view if the tensor is contiguous."""
        return tensor.reshape(-1)[self.start : self.stop]

    def within(self, shard: "Tensor") -> "Tensor":
        """Return the piece as a view of the shard."""
        return shard[self.offset : self.offset + self.stop - self.start]


@dataclass(frozen=True)
class FlatLayout:
    """The places of tensors of these shapes in a flat tensor that `group_size` ranks share.

    layout = FlatLayout.of(tensors, group_size)
    flat = layout.flatten(tensors)               # [padded_numel]
    shard = flat[layout.shard_slice(rank)]       # [padded_numel / group_size]
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
    def of(cls, tensors: "Iterable[Tensor]", group_size: int) -> "FlatLayout":
        """Return the layout of these tensors."""
        return cls(tuple(tuple(tensor.shape) for tensor in tensors), group_size)

    @cached_property
    def numels(self) -> list[int]:
        """Number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def starts(self) -> list[int]:
        """Offset of each tensor in the flat tensor, and last of the padding."""
        return list(accumulate(self.numels, initial=0))

    @property
    def numel(self) -> int:
        """Number of elements of all tensors, without the padding."""
        return self.starts[-1]

    @property
    def shard_numel(self) -> int:
        """Number of elements of one rank's shard: ceil(numel / group_size)."""
        return -(-self.numel // self.group_size)

    @property
    def padded_numel(self) -> int:
        """Number of elements of the flat tensor, with the padding."""
        return self.shard_numel * self.group_size

    def shard_slice(self, rank: int) -> slice:
        """Return where the shard of a rank of the group lies in the flat tensor.

        Raises: MeshError for a rank outside of the group
        """
        if not 0 <= rank < self.group_size:
            raise MeshError(
                f"FlatLayout: need a rank from 0 to {self.group_size - 1}; got {rank}. "
                "Try dist.get_rank(group)."
            )
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def flatten(self, tensors: "Sequence[Tensor]") -> "Tensor":
        """Return a new flat tensor with copies of the tensors and zeros at its end.

        Shapes:  those of the layout -> [padded_numel]
        Raises:  ShapeError for other shapes than the layout's
        """
        import torch

        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes != self.shapes:
            raise ShapeError(
                f"FlatLayout.flatten: need tensors of shapes {_short(self.shapes)}; got "
                f"{_short(shapes)}. Try the tensors that the layout was made of, in their order."
            )
        parts = [tensor.detach().reshape(-1) for tensor in tensors]
        padding = self.padded_numel - self.numel
        return torch.cat([*parts, parts[0].new_zeros(padding)]) if parts else torch.zeros(0)

    def views(self, flat: "Tensor") -> "list[Tensor]":
        """Return the tensors as views of the flat tensor: both share their memory.

        Raises:  ShapeError if flat is not [padded_numel]
        """
        if flat.shape != (self.padded_numel,):
            raise ShapeError(
                f"FlatLayout.views: need a flat tensor of [{self.padded_numel}]; got "
                f"{list(flat.shape)}. Try all shards, concatenated."
            )
        parts = flat[: self.numel].split(self.numels) if self.shapes else []
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def pieces(self, rank: int) -> list[Piece]:
        """Return a rank's pieces: one of each tensor that overlaps its shard, in order."""
        shard = self.shard_slice(rank)
        found = []
        for index, (start, numel) in enumerate(zip(self.starts, self.numels, strict=False)):
            first, last = max(shard.start, start), min(shard.stop, start + numel)
            if first < last:
                found.append(Piece(index, first - start, last - start, first - shard.start))
        return found


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return `[[3, 2], [3]]`; of many shapes the first three and how many more."""
    rest = f" and {len(shapes) - 3} more" if len(shapes) > 4 else ""
    return str([list(shape) for shape in shapes[: 3 if rest else None]]) + rest
