"""Predict a step of FSDP: traffic, memory and timeline, from the order of its operations.

`fsdp_moves` lists what a rank does in a step; the other functions read that list. Its messages give
the traffic, what it gathers and frees gives the memory (a sawtooth), and `fsdp_step` simulates it
on a link. Unit 0 is the root: it stays gathered from forward to backward, and computes first and
last; the other units are used in order. All parameters are trained. Notebook 10_fsdp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from course_lib.core.errors import CourseError
from course_lib.core.records import Event, Ledger
from course_lib.cost.network import AnyLink, RankGroup, collective_s, ranks_of
from course_lib.cost.traffic import CollectiveCall
from course_lib.zero.cost import padded_bytes


@dataclass(frozen=True, kw_only=True)
class UnitSizes:
    """The number of parameters of each unit, the root's first, and bytes per number.

    param_bytes     of a shard and its gradient
    compute_bytes   of gathered parameters, and of the gradients that backward computes
    reduce_bytes    of the gradients in the reduce_scatter
    """

    numels: tuple[int, ...]
    p: int
    param_bytes: int = 4
    compute_bytes: int = 4
    reduce_bytes: int = 4

    def __post_init__(self) -> None:
        if not self.numels or min(self.numels) < 0 or self.p < 1:
            raise CourseError(
                "UnitSizes: need the parameters of the root and of each unit, and p of 1 or more; "
                f"got {self.numels} and p = {self.p}. Try numels=(0, 100, 100), p=2."
            )

    def shard_numel(self, unit: int) -> int:
        """Return how many parameters of a unit a rank owns: ceil(numel / p)."""
        return -(-self.numels[unit] // self.p)

    def whole_bytes(self, unit: int) -> int:
        """Return the bytes of a gathered unit, which are those of its all_gather."""
        return padded_bytes(self.numels[unit], self.p, self.compute_bytes)

    def grad_bytes(self, unit: int) -> int:
        """Return the bytes of a unit's reduce_scatter."""
        return padded_bytes(self.numels[unit], self.p, self.reduce_bytes)

    def shard_bytes(self) -> int:
        """Return the bytes of all shards that a rank owns."""
        return sum(map(self.shard_numel, range(len(self.numels)))) * self.param_bytes


@dataclass(frozen=True)
class Move:
    """One operation of a rank: `kind` says which, `unit` on which unit.

    gather, reduce                    launch an all_gather or a reduce_scatter
    wait_gather, wait_reduce          wait for it
    first, forward, last              compute in forward (first and last: the root)
    last_back, backward, first_back   compute in backward
    collect, drop                     copy the gradients into one flat tensor; free the parameters'
    free                              free the gathered parameters
    """

    kind: str
    unit: int


def fsdp_moves(
    num_units: int, *, reshard_after_forward: bool = True, prefetch: bool = True, sync: bool = True
) -> Iterator[Move]:
    """Yield what a rank does from forward to the end of backward; num_units counts the root."""
    gathered = set()

    def use(unit: int, following: int | None) -> Iterator[Move]:
        for one in (unit, following if prefetch else None):
            if one is not None and one not in gathered:
                gathered.add(one)
                yield Move("gather", one)
        yield Move("wait_gather", unit)

    def free(unit: int) -> Iterator[Move]:
        gathered.discard(unit)
        yield Move("free", unit)

    last = num_units - 1
    for unit in range(num_units):
        yield from use(unit, unit + 1 if unit < last else None)
        yield Move("forward" if unit else "first", unit)
        if unit and reshard_after_forward:
            yield from free(unit)
    yield Move("last", 0)
    yield from use(0, last or None)
    yield Move("last_back", 0)
    for unit in (*range(last, 0, -1), 0):
        if unit:
            yield from use(unit, unit - 1 or None)
        yield Move("backward" if unit else "first_back", unit)
        yield from (Move("collect", unit), Move("drop", unit))
        if sync:
            if unit < last:  # one reduce_scatter at a time
                yield Move("wait_reduce", unit + 1)
            yield Move("reduce", unit)
        yield from free(unit)
    if sync:
        yield Move("wait_reduce", 0)


def fsdp_traffic(
    sizes: UnitSizes,
    *,
    reshard_after_forward: bool = True,
    prefetch: bool = True,
    num_micro_batches: int = 1,
    sync: bool = True,
) -> list[CollectiveCall]:
    """Return the collectives of a step in the order of their launch; `part` is the unit's number.

    With `sync` every micro-batch reduces its gradients, without it only the last one does.
    """
    calls = []
    for number in range(num_micro_batches):
        phase = "forward"
        sends = sync or number == num_micro_batches - 1
        options = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
        for move in fsdp_moves(len(sizes.numels), **options, sync=sends):
            phase = "backward" if move.kind == "last_back" else phase
            if sizes.numels[move.unit] and move.kind in ("gather", "reduce"):
                gathers = move.kind == "gather"
                kind = "all_gather" if gathers else "reduce_scatter"
                size = (sizes.whole_bytes if gathers else sizes.grad_bytes)(move.unit)
                calls.append(
                    CollectiveCall(phase=phase, part=str(move.unit), kind=kind, num_bytes=size)
                )
    return calls


def times_plain_dp(
    gather_bytes: float,
    reduce_bytes: float,
    ddp_bytes: float,
    *,
    reshard_after_forward: bool = True,
) -> float:
    """Return what FSDP sends in a step, divided by what plain data parallelism sends.

    Arguments are bytes per number: gathered, reduced, and all-reduced by plain data parallelism. On
    a ring a rank sends (p-1)/p of these bytes in a gather or a reduce_scatter, twice that in an
    all_reduce. In one precision the ratio is 3/2; bf16 gathers with fp32 reduction send as much as
    DDP in fp32, and twice as much as DDP in bf16. A root that stays gathered makes it less.
    """
    gathers = 2 if reshard_after_forward else 1
    return (gathers * gather_bytes + reduce_bytes) / (2 * ddp_bytes)


def fsdp_ledger(
    sizes: UnitSizes, *, reshard_after_forward: bool = True, prefetch: bool = True
) -> Ledger:
    """Return bytes of parameters and gradients after each move; times are numbers of moves."""
    params, grads, sent = sizes.shard_bytes(), 0, 0
    ledger = Ledger()
    ledger.add(0.0, params=params, grads=grads)
    options = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
    for time, move in enumerate(fsdp_moves(len(sizes.numels), **options), start=1):
        unit, shard = move.unit, sizes.shard_numel(move.unit)
        own = sizes.numels[unit] * sizes.compute_bytes
        if move.kind in ("gather", "free"):
            params += sizes.whole_bytes(unit) * (1 if move.kind == "gather" else -1)
        elif move.kind in ("backward", "first_back", "drop"):
            grads += -own if move.kind == "drop" else own
        elif move.kind == "collect":
            grads += sizes.grad_bytes(unit)
        elif move.kind == "reduce":
            sent = shard * sizes.reduce_bytes
            grads += sent
        elif move.kind == "wait_reduce":
            grads += shard * sizes.param_bytes - sizes.grad_bytes(unit) - sent
        ledger.add(float(time), params=params, grads=grads)
    return ledger


def peak_param_bytes(
    sizes: UnitSizes, *, reshard_after_forward: bool = True, prefetch: bool = True
) -> int:
    """Return the peak bytes of parameters: shards, the root, and the largest unit.

    With prefetch it is the largest pair of consecutive units; without resharding, all units.
    """
    root, *units = map(sizes.whole_bytes, range(len(sizes.numels)))
    pairs = zip(units, [*units[1:], 0] if prefetch else [0] * len(units), strict=False)
    most = max(map(sum, pairs), default=0) if reshard_after_forward else sum(units)
    return sizes.shard_bytes() + root + most


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """The seconds of a step's computation on a rank.

    forward_s, backward_s   of each unit but the root, in the order of forward
    first_s, last_s         of the root before the units (an embedding) and after them (a head),
                            each in forward and in backward
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    first_s: tuple[float, float] = (0.0, 0.0)
    last_s: tuple[float, float] = (0.0, 0.0)
    optimizer_s: float = 0.0

    def of(self, move: Move) -> float:
        """Return the seconds that a move computes: 0 for communication and freeing."""
        seconds = {
            "first": self.first_s[0],
            "last": self.last_s[0],
            "last_back": self.last_s[1],
            "first_back": self.first_s[1],
        }
        if move.kind in ("forward", "backward"):
            return (self.forward_s if move.kind == "forward" else self.backward_s)[move.unit - 1]
        return seconds.get(move.kind, 0.0)

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        parts = (self.forward_s, self.backward_s, self.first_s, self.last_s)
        return sum(map(sum, parts)) + self.optimizer_s


def fsdp_step(
    times: UnitTimes,
    sizes: UnitSizes,
    group: RankGroup,
    link: AnyLink,
    *,
    reshard_after_forward: bool = True,
    prefetch: bool = True,
) -> list[Event]:
    """Return the events of one step, the same on every rank: compute, collectives, waits.

    A collective lasts from when the link is free for it until it completes; see `on_the_wire`.

    Raises:  CourseError unless sizes and times are of equally many units and ranks
    """
    ranks = tuple(ranks_of(group))
    num_units = len(sizes.numels)
    if not len(times.forward_s) == len(times.backward_s) == num_units - 1 or len(ranks) != sizes.p:
        raise CourseError(
            f"fsdp_step: need times of {num_units - 1} units besides the root and {sizes.p} ranks; "
            f"got {len(times.forward_s)} forward, {len(times.backward_s)} backward and "
            f"{len(ranks)} ranks. Try forward_s=(0.01,) * {num_units - 1}."
        )
    options = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
    clock = _Clock(times, sizes, ranks, link)
    for move in fsdp_moves(num_units, **options):
        clock.simulate(move)
    clock.compute("optimizer", times.optimizer_s)
    return [replace(event, rank=rank) for rank in ranks for event in clock.events]


def fsdp_step_s(
    times: UnitTimes,
    sizes: UnitSizes,
    group: RankGroup,
    link: AnyLink,
    *,
    reshard_after_forward: bool = True,
    prefetch: bool = True,
) -> float:
    """Return the seconds of the step that `fsdp_step` simulates."""
    options = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
    return max(event.end_s for event in fsdp_step(times, sizes, group, link, **options))


class _Clock:
    """The times of a rank and of its link while moves are simulated."""

    def __init__(
        self, times: UnitTimes, sizes: UnitSizes, ranks: tuple[int, ...], link: AnyLink
    ) -> None:
        self.times, self.sizes, self.ranks, self.link = times, sizes, ranks, link
        self.now_s = self.link_free_s = 0.0
        self.completes_s: dict[tuple[str, int], float] = {}
        self.events: list[Event] = []

    def simulate(self, move: Move) -> None:
        """Advance the times by one move."""
        if move.kind in ("gather", "reduce"):
            self.launch(move)
        elif move.kind.startswith("wait_"):
            self.wait(move)
        elif seconds := self.times.of(move):
            kind = "backward" if "back" in move.kind else "forward"
            self.compute(kind, seconds, f"{kind[0].upper()}{move.unit}")

    def compute(self, kind: str, seconds: float, label: str = "") -> None:
        """Compute for some seconds."""
        self._add(kind, self.now_s, self.now_s + seconds, label)
        self.now_s += seconds

    def launch(self, move: Move) -> None:
        """Queue a collective on the link; the rank does not wait."""
        gathers = move.kind == "gather"
        kind = "all_gather" if gathers else "reduce_scatter"
        num_bytes = (self.sizes.whole_bytes if gathers else self.sizes.grad_bytes)(move.unit)
        if not num_bytes:
            return
        start_s = max(self.now_s, self.link_free_s)
        self.link_free_s = start_s + collective_s(kind, num_bytes, self.ranks, self.link)
        self.completes_s[move.kind, move.unit] = self.link_free_s
        label = f"{move.kind} {move.unit or 'root'}"
        self._add(kind, start_s, self.link_free_s, label, num_bytes)

    def wait(self, move: Move) -> None:
        """Wait until the collective completes."""
        kind = move.kind.removeprefix("wait_")
        completes_s = self.completes_s.get((kind, move.unit), 0.0)
        if completes_s > self.now_s:
            label = "all_gather" if kind == "gather" else "reduce_scatter"
            self._add("wait", self.now_s, completes_s, label)
            self.now_s = completes_s

    def _add(self, kind: str, start_s: float, end_s: float, label: str, size: int = 0) -> None:
        group = self.ranks if size else ()
        self.events.append(
            Event(rank=0, kind=kind, start_s=start_s, end_s=end_s, label=label, num_bytes=size,
                  group=group)
        )  # fmt: skip
