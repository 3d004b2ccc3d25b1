"""One step of data parallelism on paper: buckets leave while backward goes on.

A bucket is ready when the last of its gradients is there. All-reduces take the wire one after the
other, each for its alpha-beta time, and the optimizer steps when backward and the last of them are
done. Small buckets leave early, but each pays the latency again; one large bucket pays it once and
overlaps with nothing. What computing costs is measured (`course_lib.ddp.lab`) or shared out by
FLOP; adding two tensors and sharing a processor with the wire are free. Notebook 06_ddp.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from course_lib.core.errors import CourseError
from course_lib.core.records import Event
from course_lib.cost.network import AnyLink, RankGroup, collective_s, ranks_of
from course_lib.cost.packing import fill_buckets


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one rank computes in a step, in seconds, and the gradients it gets on the way.

    grad_bytes   bytes of each gradient, in the order of backward: the last layer's first
    ready_s      when each of them is there, counted from the start of backward; never falls
    """

    forward_s: float
    ready_s: tuple[float, ...]
    grad_bytes: tuple[int, ...]
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        falls = any(a > b for a, b in zip((0.0, *self.ready_s), self.ready_s, strict=False))
        if not self.ready_s or len(self.ready_s) != len(self.grad_bytes) or falls:
            raise CourseError(
                "StepCost: need one moment a gradient, from 0 on and never falling; got "
                f"{len(self.ready_s)} moments and {len(self.grad_bytes)} gradients"
                f"{' in another order' if falls else ''}. Try ready_by_share(flop, backward_s)."
            )

    @property
    def backward_s(self) -> float:
        """Seconds of backward: until the last gradient is there."""
        return self.ready_s[-1]

    @property
    def compute_s(self) -> float:
        """Seconds of a step that has nobody to talk to."""
        return self.forward_s + self.backward_s + self.optimizer_s


def ready_by_share(shares: Sequence[float], backward_s: float) -> tuple[float, ...]:
    """When each gradient is there if backward's time is shared out like `shares`, say by FLOP."""
    total = sum(shares)
    return tuple(backward_s * done / total for done in accumulate(shares))


def ddp_step(
    cost: StepCost, bucket_bytes: float, group: RankGroup, link: AnyLink, *, overlap: bool = True
) -> list[Event]:
    """The events of one step, the same on every rank: computing, all-reduces, the wait for them.

    An all_reduce lasts from when the wire is free for it until it has arrived; see `on_the_wire`.
    """
    ranks = tuple(ranks_of(group))
    backward_end_s = cost.forward_s + cost.backward_s
    events = [_event("forward", 0.0, cost.forward_s)]
    now_s = wire_free_s = cost.forward_s
    for number, members in enumerate(fill_buckets(cost.grad_bytes, bucket_bytes)):
        ready_s = cost.forward_s + cost.ready_s[members[-1]]
        events.append(_event("backward", now_s, ready_s, label=f"B{number}"))
        start_s = max(ready_s if overlap else backward_end_s, wire_free_s)
        num_bytes = sum(cost.grad_bytes[member] for member in members)
        wire_free_s = start_s + collective_s("all_reduce", num_bytes, ranks, link)
        call = _event("all_reduce", start_s, wire_free_s, label=f"bucket {number}")
        events.append(replace(call, num_bytes=num_bytes, group=ranks))
        now_s = ready_s
    done_s = max(backward_end_s, wire_free_s)
    if done_s > backward_end_s:
        events.append(_event("wait", backward_end_s, done_s, label="all_reduce"))
    events.append(_event("optimizer", done_s, done_s + cost.optimizer_s))
    return [replace(event, rank=rank) for rank in ranks for event in events]


def step_s(
    cost: StepCost, bucket_bytes: float, group: RankGroup, link: AnyLink, *, overlap: bool = True
) -> float:
    """Seconds of the step that `ddp_step` plays."""
    return max(e.end_s for e in ddp_step(cost, bucket_bytes, group, link, overlap=overlap))


def exposed_s(
    cost: StepCost, bucket_bytes: float, group: RankGroup, link: AnyLink, *, overlap: bool = True
) -> float:
    """Seconds of communication that computing does not hide: the step less what it computes."""
    return step_s(cost, bucket_bytes, group, link, overlap=overlap) - cost.compute_s


def bucket_range(cost: StepCost) -> list[int]:
    """Bucket sizes worth trying: from a bucket a gradient, doubling, up to one bucket for all."""
    total, sizes = sum(cost.grad_bytes), [max(1, min(cost.grad_bytes))]
    while sizes[-1] < total:
        sizes.append(min(2 * sizes[-1], total))
    return sizes


def best_bucket_bytes(
    cost: StepCost, group: RankGroup, link: AnyLink, sizes: Iterable[int] | None = None
) -> int:
    """The bucket size with the shortest step; of equal ones the largest, with fewest messages."""
    tried = sorted(sizes or bucket_range(cost), reverse=True)
    return min(tried, key=lambda size: step_s(cost, size, group, link))


def on_the_wire(events: Iterable[Event]) -> list[Event]:
    """Measured events, with each all_reduce from when the one before it on its rank has ended.

    The recorder notes when a call is made; until the wire is free the call only waits in line.
    """
    free_s: dict[int, float] = {}
    found = []
    for event in sorted(events, key=lambda e: e.start_s):
        if event.kind == "all_reduce":
            start_s = min(event.end_s, max(event.start_s, free_s.get(event.rank, event.start_s)))
            free_s[event.rank] = event.end_s
            event = replace(event, start_s=start_s)
        found.append(event)
    return found


def _event(kind: str, start_s: float, end_s: float, label: str = "") -> Event:
    return Event(rank=0, kind=kind, start_s=start_s, end_s=end_s, label=label)
