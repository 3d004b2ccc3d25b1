"""List the collectives of a step and price them: bytes sent per rank, and seconds on a link.

The methods' own `cost.py` files make such lists; the sums are taken here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.cost.bandwidth import bus_factor
from course_lib.cost.network import AnyLink, RankGroup, collective_s


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One call: in which phase, for which part of the model, and of how many bytes in all."""

    phase: str
    part: str
    kind: str
    num_bytes: int


def sent_bytes(calls: Iterable[CollectiveCall], p: int) -> float:
    """Bytes that each of p ranks sends around the ring for these calls."""
    return sum(call.num_bytes * bus_factor(call.kind, p) for call in calls)


def traffic_s(calls: Iterable[CollectiveCall], group: RankGroup, link: AnyLink) -> float:
    """Seconds of these calls around the ring, one after another: nothing hides them."""
    return sum(collective_s(call.kind, call.num_bytes, group, link) for call in calls)
