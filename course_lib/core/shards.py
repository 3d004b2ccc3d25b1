"""Boxes: which part of a whole tensor a rank holds, whatever has split it.

A row shard of FSDP is one box, so is a column shard of tensor parallelism, and a range of a flat
parameter is a few of them. A checkpoint is written in boxes, so a reader with other shards reads
where its boxes intersect the saved ones. Arithmetic on shapes, without torch. Notebook
14_checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

Shape = tuple[int, ...]
Elements = Any  # a torch.Tensor; this file imports no torch


@dataclass(frozen=True)
class Box:
    """The elements of a tensor from `offsets` on, `sizes` of them along each dim."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box of all elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a tensor without dims."""
        return prod(self.sizes)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the elements that both have, or None."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(
            min(start + size, start2 + size2) - offset
            for offset, (start, size, start2, size2) in zip(offsets, ends, strict=True)
        )
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Box") -> "Box":
        """Return the same elements, counted from where `outer` begins."""
        return Box(
            tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        )

    def slices(self) -> tuple[slice, ...]:
        """Return the index of these elements in the whole tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True)
        )


@dataclass
class Shard:
    """This rank's part of one whole tensor of `shape`.

    pieces   each box and its elements. The tensors share the memory of what is trained: saving
             reads them, loading fills them in place
    """

    shape: Shape
    pieces: list[tuple[Box, Elements]] = field(default_factory=list)

    @classmethod
    def of(cls, tensor: Elements) -> "Shard":
        """Return a tensor that is here whole as a shard of itself."""
        box = Box.whole(tensor.shape)
        return cls(box.sizes, [(box, tensor.detach())] if box.numel else [])

    def narrowed(self, dim: int, start: int, size: int) -> "Shard":
        """Return the same elements in a tensor of `size` along dim, where this one is from `start`.

        What lies beyond the end of that tensor is padding, and left out.
        """
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        found = Shard(shape)
        for box, part in self.pieces:
            shifts = [start if number == dim else 0 for number in range(len(shape))]
            offsets = tuple(a + b for a, b in zip(box.offsets, shifts, strict=True))
            own = Box(offsets, box.sizes).intersect(Box.whole(shape))
            if own is not None:
                place = own.within(Box(offsets, box.sizes))
                found.pieces.append((own, part[place.slices()]))
        return found


def same_shard(shard: Shard) -> Shard:
    """Return the shard itself: a whole parameter is in no larger one."""
    return shard


@dataclass(frozen=True)
class InWhole:
    """Where a parameter of this rank stands in the whole model.

    names     in the state_dict of the whole model; tied parameters have several
    to_whole  the shard of the whole tensor, from a shard of what this rank holds of it: what tensor
              parallelism has left may be sharded once more over dp
    """

    names: tuple[str, ...]
    to_whole: Callable[[Shard], Shard] = same_shard


@dataclass(frozen=True, eq=False)
class ParamShard:
    """A parameter as this rank has it.

    names      in the state_dict of the whole model; tied parameters have several
    local      the tensor that the optimizer steps here
    shard_of   the Shard of a tensor laid out as `local` is: of itself, or of optimizer state
    """

    names: tuple[str, ...]
    local: Elements
    shard_of: Callable[[Elements], Shard]

    def at(self, place: InWhole) -> "ParamShard":
        """Return the same shard as one of the whole model: this one's names and boxes are local."""
        shard_of = self.shard_of
        return ParamShard(place.names, self.local, lambda x: place.to_whole(shard_of(x)))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes of the elements start .. stop - 1 in row-major order, in their order.

    At most 2 * ndim - 1 of them: the rest of a row, whole rows, the beginning of another row; the
    two parts of rows are cut in the same way.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start, stop) != (first * row, (first + 1) * row):
        return _in_row(shape, first, start, stop)
    head, tail = -(-start // row), stop // row  # whole rows are head .. tail - 1
    found = _in_row(shape, first, start, head * row)
    if head < tail:
        found.append(Box((head, *(0 for _ in shape[1:])), (tail - head, *shape[1:])))
    return found + _in_row(shape, tail, tail * row, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """Return the boxes of elements that all lie in one row."""
    begin = row * prod(shape[1:])
    return [
        Box((row, *box.offsets), (1, *box.sizes))
        for box in boxes_of_range(shape[1:], start - begin, stop - begin)
    ]


def covers_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether each element of a tensor lies in exactly one of the boxes."""
    whole = Box.whole(shape)
    if any(len(box.sizes) != len(shape) or box.intersect(whole) != box for box in boxes):
        return not boxes and not whole.numel
    ordered = sorted(boxes, key=lambda box: box.offsets)
    for number, box in enumerate(ordered):
        for later in ordered[number + 1 :]:
            if shape and later.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break  # nor do those behind it reach this box
            if box.intersect(later):
                return False
    return sum(box.numel for box in boxes) == whole.numel
