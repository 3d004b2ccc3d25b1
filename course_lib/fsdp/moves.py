"""What a rank does in a step of FSDP, in order, and the sizes of a model's units.

Unit 0 is the root: it stays gathered from forward to backward, and computes first and last; the
other units are used in order. All parameters are trained. Notebook 10_fsdp.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from course_lib.core.errors import CourseError


@dataclass(frozen=True, kw_only=True)
class UnitSizes:
    """The number of parameters of each unit, the root's first, and bytes per number.

    p               ranks that shard a unit
    slots           numbers of a rank's slot in each unit's messages: for each parameter
                    ceil(rows / p) rows; default: ceil(numel / p), without other padding
    replicas        ranks with equal shards: p * replicas ranks in all
    param_bytes     of a shard and its gradient
    compute_bytes   of gathered parameters, and of the gradients that backward computes
    reduce_bytes    of the gradients in the reduce_scatter
    """

    numels: tuple[int, ...]
    p: int
    slots: tuple[int, ...] = ()
    replicas: int = 1
    param_bytes: int = 4
    compute_bytes: int = 4
    reduce_bytes: int = 4

    def __post_init__(self) -> None:
        if not self.numels or min(self.numels) < 0 or min(self.p, self.replicas) < 1:
            raise CourseError(
                "UnitSizes: need the parameters of the root and of each unit, and p of 1 or more; "
                f"got {self.numels} and p = {self.p}. Try numels=(0, 100, 100), p=2."
            )

    def shard_numel(self, unit: int) -> int:
        """Return how many numbers of a unit a rank has room for."""
        return self.slots[unit] if self.slots else -(-self.numels[unit] // self.p)

    def whole_bytes(self, unit: int) -> int:
        """Return the bytes of a gathered unit, which are those of its all_gather."""
        return self.p * self.shard_numel(unit) * self.compute_bytes

    def grad_bytes(self, unit: int) -> int:
        """Return the bytes of a unit's reduce_scatter."""
        return self.p * self.shard_numel(unit) * self.reduce_bytes

    def reduced_bytes(self, unit: int) -> int:
        """Return the bytes of what a rank receives from it, and all-reduces with replicas."""
        return self.shard_numel(unit) * self.reduce_bytes

    def shard_bytes(self) -> int:
        """Return the bytes of all shards that a rank owns."""
        return sum(map(self.shard_numel, range(len(self.numels)))) * self.param_bytes


@dataclass(frozen=True)
class Move:
    """One operation of a rank: `kind` says which, `unit` on which unit.

    gather, reduce                    launch an all_gather or a reduce_scatter
    wait_gather, wait_reduce          wait for it
    copy_out, drop_message            copy what was gathered to whole parameters; free the message
    keep_part, gather_part, drop_part keep a part after forward; gather it among k ranks; free it
    replicate, wait_replicate         launch the all_reduce with replicas, and wait for it
    first, forward, last              compute in forward (first and last: the root)
    last_back, backward, first_back   compute in backward
    collect, drop                     copy the gradients into one message; free the parameters'
    free                              free the gathered parameters
    """

    kind: str
    unit: int


def fsdp_moves(
    num_units: int,
    *,
    reshard_after_forward: bool | int = True,
    prefetch: bool = True,
    sync: bool = True,
    replicates: bool = False,
) -> Iterator[Move]:
    """Yield what a rank does from forward to the end of backward; num_units counts the root.

    replicates   in hybrid sharding: all-reduce gradients with replicas
    """
    frees = reshard_after_forward is True or reshard_after_forward > 1
    gathers, last = _Gathers(prefetch), num_units - 1
    for unit in range(num_units):
        yield from gathers.use(unit, unit + 1 if unit < last else None)
        yield Move("forward" if unit else "first", unit)
        if unit and frees:
            yield from gathers.free(unit, keep_part=reshard_after_forward is not True)
    yield Move("last", 0)
    yield from gathers.use(0, last or None)
    yield Move("last_back", 0)
    for unit in (*range(last, 0, -1), 0):
        if unit:
            yield from gathers.use(unit, unit - 1 or None)
        yield Move("backward" if unit else "first_back", unit)
        yield from gathers.free(unit)
        yield from (Move("collect", unit), Move("drop", unit))
        if sync:
            if unit < last:  # one reduce_scatter at a time
                yield from _reduced(unit + 1, replicates)
            yield Move("reduce", unit)
    if sync:
        yield from _reduced(0, replicates)
        yield from (Move("wait_replicate", unit) for unit in range(num_units) if replicates)


class _Gathers:
    """The units that are gathered, in flight, or kept in part."""

    def __init__(self, prefetch: bool) -> None:
        self.prefetch = prefetch
        self.gathered, self.in_flight, self.kept = set[int](), set[int](), set[int]()

    def use(self, unit: int, following: int | None) -> Iterator[Move]:
        """Gather a unit, unless it is gathered, and prefetch the following one."""
        yield from self.launch(unit)
        yield Move("wait_gather", unit)
        if unit in self.in_flight:
            after = ("drop_part",) if unit in self.kept else ("copy_out", "drop_message")
            yield from (Move(kind, unit) for kind in after)
            self.in_flight.remove(unit)
            self.gathered.add(unit)
        if self.prefetch and following is not None:
            yield from self.launch(following)

    def launch(self, unit: int) -> Iterator[Move]:
        """Launch a unit's all_gather, unless it is gathered or in flight."""
        if unit not in self.in_flight | self.gathered:
            self.in_flight.add(unit)
            yield Move("gather_part" if unit in self.kept else "gather", unit)

    def free(self, unit: int, *, keep_part: bool = False) -> Iterator[Move]:
        """Free a unit; with `keep_part` each rank keeps a part of it."""
        if keep_part:
            self.kept.add(unit)
            yield Move("keep_part", unit)
        self.gathered.remove(unit)
        yield Move("free", unit)


def _reduced(unit: int, replicates: bool) -> Iterator[Move]:
    yield Move("wait_reduce", unit)
    if replicates:
        yield Move("replicate", unit)


LAUNCHES = {
    "gather": "all_gather",
    "gather_part": "all_gather",
    "reduce": "reduce_scatter",
    "replicate": "all_reduce",
}
