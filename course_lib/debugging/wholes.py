"""One tensor over all ranks of a run: which of them hold the same part, and what the parts add to.

Sketches are linear, so sums over ranks are known without the values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from course_lib.core.shards import Box, covers_once
from course_lib.debugging.sketches import Sketch, added, distance
from course_lib.debugging.value_records import Axes, RankValues, Value

ValueKey = tuple[int, str, str, int]
Holder = tuple[int, Value]  # a rank, and what it has
FLOOR = 0.01  # of the largest norm in a phase: what is smaller is compared with this much


@dataclass(frozen=True)
class WholeValue:
    """One tensor of a run.

    copies   for each different part of the tensor: the ranks that have it
    axes     of each rank: its index and the size of each axis of the mesh
    """

    key: ValueKey
    copies: Mapping[tuple[Box, ...], Sequence[Holder]]
    axes: Sequence[Axes]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._first.shape

    @property
    def dtype(self) -> str:
        """The dtype, as in `float32`."""
        return self._first.dtype

    @property
    def _first(self) -> Value:
        return next(iter(self.copies.values()))[0][1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a part of it."""
        return tuple(sorted(rank for held in self.copies.values() for rank, _ in held))

    @property
    def norm(self) -> float:
        """The norm, of each part as the first rank has it."""
        return float(sum(held[0][1].norm ** 2 for held in self.copies.values()) ** 0.5)

    @property
    def is_whole(self) -> bool:
        """Whether the parts cover the tensor, each element once."""
        boxes = [box for part in self.copies for box in part or (Box.whole(self.shape),)]
        return covers_once(self.shape, boxes)

    def copied_axes(self) -> list[str]:
        """Return the axes along which several ranks hold the same part."""
        return [axis for axis in self._sizes() if any(self._differ(axis))]

    def sharded_axes(self) -> list[str]:
        """Return the axes along which ranks hold different parts."""
        sizes, copied = self._sizes(), self.copied_axes()
        here = {self.axes[rank][axis][0] for axis in sizes for rank in self.ranks}
        return [a for a in sizes if len(here) > 1 and a not in copied and self._varies(a)]

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis which hold the same part."""
        return max(
            len({self.axes[rank][axis][0] for rank, _ in held}) for held in self.copies.values()
        )

    def _sizes(self) -> dict[str, int]:
        return {name: size for name, (_, size) in self.axes[0].items() if size > 1}

    def _differ(self, axis: str) -> Iterator[bool]:
        for held in self.copies.values():
            yield len({self.axes[rank][axis][0] for rank, _ in held}) > 1

    def _varies(self, axis: str) -> bool:
        return len({self.axes[rank][axis][0] for rank in self.ranks}) > 1

    def sums(self, over: Sequence[str] = ()) -> list[list[Sketch]]:
        """Return for each part: the sketches of the sums over these axes, one for each remaining
        copy; without axes, the sketch of each copy.
        """
        return [self._part_sums(held, over) for held in self.copies.values()]

    def _part_sums(self, held: Sequence[Holder], over: Sequence[str]) -> list[Sketch]:
        groups: dict[tuple[int, ...], list[Sketch]] = {}
        for rank, value in held:
            place = tuple(index for axis, (index, _) in self.axes[rank].items() if axis not in over)
            groups.setdefault(place if over else (rank,), []).append(value.sketch)
        return [added(group) for group in groups.values()]

    def total(self, over: Sequence[str] = ()) -> Sketch:
        """Return the sketch of the whole tensor, whose parts are summed over these axes."""
        return added([sums[0] for sums in self.sums(over)])

    def disagreement(self, over: Sequence[str] = ()) -> float:
        """Return the largest distance of two copies, after sums over these axes."""
        return max(
            (distance(sums[0], one) for sums in self.sums(over) for one in sums[1:]), default=0.0
        )


def axes_of(run: Sequence[RankValues]) -> list[Axes]:
    """Return the axes of each rank; a run that names none has one, `ranks`."""
    return [one.axes or {"ranks": (one.rank, one.world_size)} for one in run]


def wholes(run: Sequence[RankValues], phases: Sequence[str]) -> dict[ValueKey, WholeValue]:
    """Return the tensors of these phases in the order in which the first rank computes them."""
    held: dict[ValueKey, dict[tuple[Box, ...], list[Holder]]] = {}
    for one in run:
        for key, value in one.values.items():
            if key[1] in phases:
                held.setdefault(key, {}).setdefault(value.boxes, []).append((one.rank, value))
    axes = axes_of(run)
    return {key: WholeValue(key, copies, axes) for key, copies in held.items()}


def scales(found: Mapping[ValueKey, WholeValue]) -> dict[ValueKey, float]:
    """Return for each tensor the norm that its differences are compared with.

    That is its own, but not less than FLOOR of the largest in its phase: the gradient of the keys'
    bias is zero but for rounding, and rounding differs.
    """
    largest: dict[tuple[int, str], float] = {}
    for key, one in found.items():
        largest[key[:2]] = max(largest.get(key[:2], 0.0), one.norm)
    return {key: max(one.norm, FLOOR * largest[key[:2]]) for key, one in found.items()}
