"""Predict the timeline of a DDP step, in which buckets are all-reduced during backward.

A bucket is ready when the last of its gradients is complete. All-reduces use the link one after
another, each for its alpha-beta time, and the optimizer steps when backward and the last all-reduce
are done. Small buckets start early, but each pays the latency; one large bucket pays it once and
overlaps with nothing; `best_num_buckets` is in between. The times of the computation are measured
(`course_lib.ddp.lab`) or divided in proportion to FLOP; summing tensors is free, and so is sharing
a processor with the link. Notebook 06_ddp.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from course_lib.core.errors import CourseError
from course_lib.core.records import Event
from course_lib.cost.network import AnyLink, RankGroup, collective_s, ranks_of
from course_lib.cost.packing import fill_buckets


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The times of a step's computation on one rank, and the bytes of its gradients.

    grad_bytes   bytes of each gradient, in the order of backward: the last layer's first
    ready_s      when each gradient is complete, from the start of backward; never decreases
    """

    forward_s: float
    ready_s: tuple[float, ...]
    grad_bytes: tuple[int, ...]
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        falls = any(a > b for a, b in zip((0.0, *self.ready_s), self.ready_s, strict=False))
        if not self.ready_s or len(self.ready_s) != len(self.grad_bytes) or falls:
            raise CourseError(
                "StepCost: need one time per gradient, from 0 on and never decreasing; got "
                f"{len(self.ready_s)} times and {len(self.grad_bytes)} gradients"
                f"{' in another order' if falls else ''}. Try ready_by_share(flop, backward_s)."
            )

    @property
    def backward_s(self) -> float:
        """Seconds of backward: until the last gradient is complete."""
        return self.ready_s[-1]

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s


def ready_by_share(shares: Sequence[float], backward_s: float) -> tuple[float, ...]:
    """Return when each gradient is complete if backward's time is proportional to `shares`."""
    total = sum(shares)
    return tuple(backward_s * done / total for done in accumulate(shares))


def ddp_step(
    cost: StepCost, bucket_bytes: float, group: RankGroup, link: AnyLink, *, overlap: bool = True
) -> list[Event]:
    """Return the events of one step, the same on every rank: compute, all-reduces, the wait.

    An all_reduce lasts from when the link is free for it until it completes; see `on_the_wire`.
    """
    ranks = tuple(ranks_of(group))
    backward_end_s = cost.forward_s + cost.backward_s
    events = [_event("forward", 0.0, cost.forward_s)]
    now_s = link_free_s = cost.forward_s
    for number, members in enumerate(fill_buckets(cost.grad_bytes, bucket_bytes)):
        ready_s = cost.forward_s + cost.ready_s[members[-1]]
        events.append(_event("backward", now_s, ready_s, label=f"B{number}"))
        start_s = max(ready_s if overlap else backward_end_s, link_free_s)
        num_bytes = sum(cost.grad_bytes[member] for member in members)
        link_free_s = start_s + collective_s("all_reduce", num_bytes, ranks, link)
        call = _event("all_reduce", start_s, link_free_s, label=f"bucket {number}")
        events.append(replace(call, num_bytes=num_bytes, group=ranks))
        now_s = ready_s
    done_s = max(backward_end_s, link_free_s)
    if done_s > backward_end_s:
        events.append(_event("wait", backward_end_s, done_s, label="all_reduce"))
    events.append(_event("optimizer", done_s, done_s + cost.optimizer_s))
    return [replace(event, rank=rank) for rank in ranks for event in events]


def step_s(
    cost: StepCost, bucket_bytes: float, group: RankGroup, link: AnyLink, *, overlap: bool = True
) -> float:
    """Return the seconds of the step that `ddp_step` simulates."""
    return max(e.end_s for e in ddp_step(cost, bucket_bytes, group, link, overlap=overlap))


def exposed_s(
    cost: StepCost, bucket_bytes: float, group: RankGroup, link: AnyLink, *, overlap: bool = True
) -> float:
    """Return the exposed communication: seconds of the step minus those of its computation."""
    return step_s(cost, bucket_bytes, group, link, overlap=overlap) - cost.compute_s


def bucket_range(cost: StepCost) -> list[int]:
    """Return bucket sizes to try: from the smallest gradient, doubling, to one for all of them."""
    total, sizes = sum(cost.grad_bytes), [max(1, min(cost.grad_bytes))]
    while sizes[-1] < total:
        sizes.append(min(2 * sizes[-1], total))
    return sizes


def best_bucket_bytes(
    cost: StepCost, group: RankGroup, link: AnyLink, sizes: Iterable[int] | None = None
) -> int:
    """Return the bucket size with the shortest step; of equal ones the largest."""
    tried = sorted(sizes or bucket_range(cost), reverse=True)
    return min(tried, key=lambda size: step_s(cost, size, group, link))


def equal_buckets_s(cost: StepCost, num_buckets: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a step with k equal buckets: F + B/k + (k-1) max(B/k, c) + c.

    F and B are the seconds of forward and backward, c those of one bucket's all-reduce; the
    optimizer's seconds are added. For whole k, and gradients that are complete at an even pace,
    this is `step_s`.
    """
    bucket_s = cost.backward_s / num_buckets
    sent_s = collective_s("all_reduce", sum(cost.grad_bytes) / num_buckets, group, link)
    compute_s = cost.forward_s + bucket_s + cost.optimizer_s
    return compute_s + (num_buckets - 1) * max(bucket_s, sent_s) + sent_s


def best_num_buckets(cost: StepCost, group: RankGroup, link: AnyLink) -> float:
    """Return the number k of equal buckets with the shortest step: max((B-w)/a, sqrt(B/a)).

    B is the time of backward; an all-reduce of one of k buckets takes c = a + w/k, where a is its
    latency (2 (p-1) alpha on a ring) and w the time of all bytes together. The step is F plus the
    larger of two sums: B + c, where the link keeps up (it falls with k, and holds until
    k = (B-w)/a), and B/k + k c = B/k + k a + w, where buckets queue up (least at sqrt(B/a)). So
    the best k is the larger of the two; both sums are convex in k, and the best whole number is
    one of the two next to it. At least 1, and infinite without latency.
    """
    latency_s = collective_s("all_reduce", 0, group, link)
    bytes_s = collective_s("all_reduce", sum(cost.grad_bytes), group, link) - latency_s
    if latency_s == 0:
        return math.inf if bytes_s > 0 else 1.0
    keeps_up = (cost.backward_s - bytes_s) / latency_s
    queues_up = math.sqrt(cost.backward_s / latency_s)
    return max(1.0, keeps_up, queues_up)


def on_the_wire(events: Iterable[Event]) -> list[Event]:
    """Return measured events in which each all_reduce starts when its rank's last one has ended.

    The recorder notes when a call is made; until the link is free, the call only waits in a queue.
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
