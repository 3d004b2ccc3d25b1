"""Predict a step of FSDP: traffic, memory and timeline, from the order of its operations.

`fsdp_moves` lists what a rank does in a step; the functions of this file read that list. Its
messages give the traffic, what it gathers and frees gives the memory (a sawtooth), and `fsdp_step`
simulates it on a link. Notebook 10_fsdp.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.links import Link
from course_lib.core.records import Event, Ledger
from course_lib.cost.bandwidth import bus_factor
from course_lib.cost.network import AnyLink, RankGroup, collective_s, ranks_of
from course_lib.cost.traffic import CollectiveCall
from course_lib.fsdp.moves import LAUNCHES, Move, UnitSizes, fsdp_moves


@dataclass(frozen=True, kw_only=True)
class UnitCall(CollectiveCall):
    """A collective of a unit, among `num_ranks` ranks; `part` is the unit's number."""

    num_ranks: int


def fsdp_traffic(
    sizes: UnitSizes,
    *,
    reshard_after_forward: bool | int = True,
    prefetch: bool = True,
    num_micro_batches: int = 1,
    sync: bool = True,
) -> list[UnitCall]:
    """Return the collectives of a step in the order of their launch.

    With `sync` every micro-batch reduces its gradients, without it only the last one does.
    """
    calls = []
    for number in range(num_micro_batches):
        phase = "forward"
        sends = sync or number == num_micro_batches - 1
        for move in _moves(sizes, reshard_after_forward, prefetch, sync=sends):
            phase = "backward" if move.kind == "last_back" else phase
            if sizes.numels[move.unit] and move.kind in LAUNCHES:
                num_bytes, num_ranks = _message(sizes, move, reshard_after_forward)
                calls.append(
                    UnitCall(
                        phase=phase,
                        part=str(move.unit),
                        kind=LAUNCHES[move.kind],
                        num_bytes=num_bytes,
                        num_ranks=num_ranks,
                    )
                )
    return calls


def unit_sent_bytes(calls: Iterable[UnitCall]) -> float:
    """Return the bytes that each rank sends around the rings of these calls' groups."""
    return sum(call.num_bytes * bus_factor(call.kind, call.num_ranks) for call in calls)


def _moves(
    sizes: UnitSizes, reshard_after_forward: bool | int, prefetch: bool, sync: bool = True
) -> Iterator[Move]:
    """Yield `fsdp_moves` of a model; resharding to all p ranks is the same as True."""
    yield from fsdp_moves(
        len(sizes.numels),
        reshard_after_forward=_as_bool(sizes, reshard_after_forward),
        prefetch=prefetch,
        sync=sync,
        replicates=sizes.replicas > 1,
    )


def _as_bool(sizes: UnitSizes, reshard_after_forward: bool | int) -> bool | int:
    """Return True or False for a number that means the same: all p ranks, or one."""
    if isinstance(reshard_after_forward, bool) or reshard_after_forward not in (1, sizes.p):
        return reshard_after_forward
    return reshard_after_forward > 1


def _message(sizes: UnitSizes, move: Move, reshard_after_forward: bool | int) -> tuple[int, int]:
    """Return the bytes of a collective, and the number of its ranks."""
    if move.kind == "reduce":
        return sizes.grad_bytes(move.unit), sizes.p
    if move.kind == "replicate":
        return sizes.reduced_bytes(move.unit), sizes.replicas
    k = int(reshard_after_forward) if move.kind == "gather_part" else sizes.p
    return sizes.whole_bytes(move.unit), k


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
    sizes: UnitSizes, *, reshard_after_forward: bool | int = True, prefetch: bool = True
) -> Ledger:
    """Return bytes of parameters and gradients after each move; times are numbers of moves."""
    ledger, params, grads = Ledger(), sizes.shard_bytes(), 0
    ledger.add(0.0, params=params, grads=grads)
    for time, move in enumerate(_moves(sizes, reshard_after_forward, prefetch), start=1):
        params += _param_change(sizes, move, reshard_after_forward)
        grads += _grad_change(sizes, move)
        ledger.add(float(time), params=params, grads=grads)
    return ledger


def _param_change(sizes: UnitSizes, move: Move, reshard_after_forward: bool | int) -> int:
    """Return the bytes of parameters, and of their messages, that a move adds."""
    whole = sizes.whole_bytes(move.unit)
    if move.kind in ("gather", "gather_part", "copy_out"):
        return whole
    if move.kind in ("drop_message", "free"):
        return -whole
    if move.kind in ("keep_part", "drop_part"):
        return whole // int(reshard_after_forward) * (1 if move.kind == "keep_part" else -1)
    return 0


def _grad_change(sizes: UnitSizes, move: Move) -> int:
    """Return the bytes of gradients that a move adds."""
    unit, replicates = move.unit, sizes.replicas > 1
    shard = sizes.shard_numel(unit) * sizes.param_bytes - sizes.reduced_bytes(unit)
    changes = {
        "backward": sizes.numels[unit] * sizes.compute_bytes,
        "drop": -sizes.numels[unit] * sizes.compute_bytes,
        "collect": sizes.grad_bytes(unit),
        "reduce": sizes.reduced_bytes(unit),
        "wait_reduce": (0 if replicates else shard) - sizes.grad_bytes(unit),
        "wait_replicate": shard,
    }
    return changes.get("backward" if move.kind == "first_back" else move.kind, 0)


def peak_param_bytes(
    sizes: UnitSizes, *, reshard_after_forward: bool | int = True, prefetch: bool = True
) -> int:
    """Return the peak bytes of parameters: shards, the root, and two blocks or a second root.

    Two, as a message and what is copied out of it are there at the same time; with prefetch it is
    the next unit's message later, which adds nothing. Without resharding the units before are there
    too; a smaller group to reshard to has no short formula, and the moves are added up.
    """
    root, *units = map(sizes.whole_bytes, range(len(sizes.numels)))
    reshard_after_forward = _as_bool(sizes, reshard_after_forward)
    if reshard_after_forward > 1:
        ledger = fsdp_ledger(sizes, reshard_after_forward=reshard_after_forward, prefetch=prefetch)
        return max(ledger.bytes_by_kind["params"])
    kept = [0] * len(units) if reshard_after_forward else accumulate(units[:-1], initial=0)
    most = max((before + 2 * unit for before, unit in zip(kept, units, strict=False)), default=0)
    return sizes.shard_bytes() + root + max(root, most)


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
    reshard_after_forward: bool | int = True,
    prefetch: bool = True,
) -> list[Event]:
    """Return the events of one step, the same on every rank: compute, collectives, waits.

    The group has p * replicas ranks, p in a row. A collective lasts from when the link is free for
    it until it completes; a link within nodes and one between them carry messages side by side.

    Raises:  CourseError unless sizes and times are of equally many units and ranks
    """
    ranks = tuple(ranks_of(group))
    num_units, wanted = len(sizes.numels), sizes.p * sizes.replicas
    if not len(times.forward_s) == len(times.backward_s) == num_units - 1 or len(ranks) != wanted:
        raise CourseError(
            f"fsdp_step: need times of {num_units - 1} units besides the root and {wanted} ranks; "
            f"got {len(times.forward_s)} forward, {len(times.backward_s)} backward and "
            f"{len(ranks)} ranks. Try forward_s=(0.01,) * {num_units - 1}."
        )
    clock = _Clock(times, sizes, ranks, link, int(reshard_after_forward))
    for move in _moves(sizes, reshard_after_forward, prefetch):
        clock.simulate(move)
    clock.compute("optimizer", times.optimizer_s)
    return [
        replace(event, rank=rank, group=clock.ranks_for(kind, index))
        for index, rank in enumerate(ranks)
        for kind, event in clock.events
    ]


def fsdp_step_s(
    times: UnitTimes,
    sizes: UnitSizes,
    group: RankGroup,
    link: AnyLink,
    *,
    reshard_after_forward: bool | int = True,
    prefetch: bool = True,
) -> float:
    """Return the seconds of the step that `fsdp_step` simulates."""
    options: dict[str, Any] = {
        "reshard_after_forward": reshard_after_forward,
        "prefetch": prefetch,
    }
    return max(event.end_s for event in fsdp_step(times, sizes, group, link, **options))


class _Clock:
    """The times of a rank and of its links while moves are simulated."""

    def __init__(
        self,
        times: UnitTimes,
        sizes: UnitSizes,
        ranks: tuple[int, ...],
        link: AnyLink,
        part: int,
    ) -> None:
        self.times, self.sizes, self.ranks, self.link, self.part = times, sizes, ranks, link, part
        self.now_s = 0.0
        self.link_free_s: dict[Link, float] = {}
        self.completes_s: dict[tuple[str, int], float] = {}
        self.events: list[tuple[str, Event]] = []  # with the kind of the move, where it sends

    def ranks_for(self, kind: str, index: int) -> tuple[int, ...]:
        """Return the group of a collective move, for a rank by its index in all ranks."""
        if kind not in LAUNCHES:
            return ()
        if kind == "replicate":
            return self.ranks[index % self.sizes.p :: self.sizes.p]
        size = self.part if kind == "gather_part" else self.sizes.p
        return self.ranks[index // size * size :][:size]

    def simulate(self, move: Move) -> None:
        """Advance the times by one move."""
        if move.kind in LAUNCHES:
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
        """Queue a collective on its link; the rank does not wait."""
        kind, ranks = LAUNCHES[move.kind], self.ranks_for(move.kind, 0)
        num_bytes, _ = _message(self.sizes, move, self.part)
        if not num_bytes:
            return
        port = _slowest_link(self.link, ranks)
        start_s = max(self.now_s, self.link_free_s.get(port, 0.0))
        end_s = start_s + collective_s(kind, num_bytes, ranks, self.link)
        self.link_free_s[port] = end_s
        short = move.kind.removesuffix("_part")
        self.completes_s[short, move.unit] = end_s
        self._add(kind, start_s, end_s, f"{short} {move.unit or 'root'}", num_bytes, move.kind)

    def wait(self, move: Move) -> None:
        """Wait until the collective completes."""
        kind = move.kind.removeprefix("wait_")
        completes_s = self.completes_s.get((kind, move.unit), 0.0)
        if completes_s > self.now_s:
            self._add("wait", self.now_s, completes_s, LAUNCHES[kind])
            self.now_s = completes_s

    def _add(
        self, kind: str, start_s: float, end_s: float, label: str, size: int = 0, sends: str = ""
    ) -> None:
        event = Event(rank=0, kind=kind, start_s=start_s, end_s=end_s, label=label, num_bytes=size)
        self.events.append((sends, event))


def _slowest_link(link: AnyLink, ranks: tuple[int, ...]) -> Link:
    """Return the link that a group's collective occupies: the slowest between its ranks."""
    if isinstance(link, Link):
        return link
    hops = [link.between(ranks[0], other) for other in ranks[1:]] or [link.between(0, 0)]
    return min(hops, key=lambda hop: hop.bytes_per_s)
