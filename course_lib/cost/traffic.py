"""Cost of a list of collectives: bytes sent per rank, and seconds on a link.

Each method's `cost.py` lists the collectives of its step; they are added up here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.cost.bandwidth import bus_factor
from course_lib.cost.network import AnyLink, RankGroup, collective_s


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective of a step: phase, part of the model, and bytes of the whole tensor."""

    phase: str
    part: str
    kind: str
    num_bytes: int


def sent_bytes(calls: Iterable[CollectiveCall], p: int) -> float:
    """Return the bytes that each of p ranks sends around the ring for these calls."""
    return sum(call.num_bytes * bus_factor(call.kind, p) for call in calls)


def traffic_s(calls: Iterable[CollectiveCall], group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of these calls, one after another and fully exposed (no overlap)."""
    return sum(collective_s(call.kind, call.num_bytes, group, link) for call in calls)
