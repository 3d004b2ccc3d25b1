"""One step of FSDP in time, on paper: while a unit computes, the next one's weights travel.

Messages take the wire one after the other, in the order in which they leave, each for its
alpha-beta time. Without prefetch every gather is waited for in full; with it a rank waits only
where a unit computes faster than the next one travels. Copying, and sharing a processor with the
wire, are free. Notebook 10_fsdp.
"""

from dataclasses import dataclass, replace

from course_lib.core.errors import CourseError
from course_lib.core.records import Event
from course_lib.cost.fsdp_plan import Move, UnitSizes, fsdp_moves
from course_lib.cost.network import AnyLink, Group, collective_s, ranks_of


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """What a rank computes in a step, in seconds.

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
        """Seconds that a move computes: 0 for all that is no computing."""
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
        """Seconds of a step that has nobody to talk to."""
        parts = (self.forward_s, self.backward_s, self.first_s, self.last_s)
        return sum(map(sum, parts)) + self.optimizer_s


def fsdp_step(
    times: UnitTimes,
    sizes: UnitSizes,
    group: Group,
    link: AnyLink,
    *,
    reshard_after_forward: bool = True,
    prefetch: bool = True,
) -> list[Event]:
    """The events of one step, the same on every rank: computing, messages, the wait for them.

    A message lasts from when the wire is free for it until it has arrived; see `on_the_wire`.

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
    player = _Player(times, sizes, ranks, link)
    for move in fsdp_moves(num_units, **options):
        player.play(move)
    player.compute("optimizer", times.optimizer_s)
    return [replace(event, rank=rank) for rank in ranks for event in player.events]


def fsdp_step_s(
    times: UnitTimes,
    sizes: UnitSizes,
    group: Group,
    link: AnyLink,
    *,
    reshard_after_forward: bool = True,
    prefetch: bool = True,
) -> float:
    """Seconds of the step that `fsdp_step` plays."""
    options = {"reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
    return max(event.end_s for event in fsdp_step(times, sizes, group, link, **options))


class _Player:
    """A rank's clock and the wire's, while moves are played."""

    def __init__(
        self, times: UnitTimes, sizes: UnitSizes, ranks: tuple[int, ...], link: AnyLink
    ) -> None:
        self.times, self.sizes, self.ranks, self.link = times, sizes, ranks, link
        self.now_s = self.wire_free_s = 0.0
        self.arrives_s: dict[tuple[str, int], float] = {}
        self.events: list[Event] = []

    def play(self, move: Move) -> None:
        """Do one move."""
        if move.kind in ("gather", "reduce"):
            self.send(move)
        elif move.kind.startswith("wait_"):
            self.wait(move)
        elif seconds := self.times.of(move):
            kind = "backward" if "back" in move.kind else "forward"
            self.compute(kind, seconds, f"{kind[0].upper()}{move.unit}")

    def compute(self, kind: str, seconds: float, label: str = "") -> None:
        """Compute for so long."""
        self._add(kind, self.now_s, self.now_s + seconds, label)
        self.now_s += seconds

    def send(self, move: Move) -> None:
        """Put a message in line; nobody waits."""
        gathers = move.kind == "gather"
        kind = "all_gather" if gathers else "reduce_scatter"
        num_bytes = (self.sizes.whole_bytes if gathers else self.sizes.grad_bytes)(move.unit)
        if not num_bytes:
            return
        start_s = max(self.now_s, self.wire_free_s)
        self.wire_free_s = start_s + collective_s(kind, num_bytes, self.ranks, self.link)
        self.arrives_s[move.kind, move.unit] = self.wire_free_s
        label = f"{move.kind} {move.unit or 'root'}"
        self._add(kind, start_s, self.wire_free_s, label, num_bytes)

    def wait(self, move: Move) -> None:
        """Wait until the message is there."""
        kind = move.kind.removeprefix("wait_")
        arrives_s = self.arrives_s.get((kind, move.unit), 0.0)
        if arrives_s > self.now_s:
            label = "all_gather" if kind == "gather" else "reduce_scatter"
            self._add("wait", self.now_s, arrives_s, label)
            self.now_s = arrives_s

    def _add(self, kind: str, start_s: float, end_s: float, label: str, size: int = 0) -> None:
        group = self.ranks if size else ()
        self.events.append(
            Event(rank=0, kind=kind, start_s=start_s, end_s=end_s, label=label, num_bytes=size,
                  group=group)
        )  # fmt: skip
