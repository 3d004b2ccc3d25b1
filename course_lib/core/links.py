"""A link between two ranks: a fixed latency (alpha) and a bandwidth (beta).

A message of n bytes takes alpha + n / beta seconds; beta is in bytes per second here, while papers
often write beta for its inverse. The presets are round figures for estimates; lesson 04 measures
the numbers of a machine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from course_lib.core.errors import CourseError
from course_lib.core.units import format_rate, format_seconds


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link of one kind: a latency in seconds per message, and a bandwidth in bytes per second.

    Raises: CourseError for a negative latency, or a bandwidth that is not above 0
    """

    latency_s: float
    bytes_per_s: float
    name: str = "link"

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise CourseError(
                f"Link: need latency_s >= 0 and bytes_per_s > 0; got {self.latency_s} and "
                f"{self.bytes_per_s}. Try Link(latency_s=50e-6, bytes_per_s=1.25e9)."
            )

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds of one message of `num_bytes`: alpha + n / beta."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def between(self, sender: int, receiver: int) -> "Link":
        """Return the link from one rank to another: the same everywhere."""
        return self

    def ring(self, ranks: Sequence[int]) -> "Link":
        """Return the link of a ring over these ranks: the same for any."""
        return self

    def __str__(self) -> str:
        return f"{self.name} ({format_seconds(self.latency_s)}, {format_rate(self.bytes_per_s)})"


@dataclass(frozen=True, kw_only=True)
class TwoLevelLink:
    """Two kinds of links: `inside` nodes of `ranks_per_node` ranks, and `outside`, between nodes.

    outside    of one network adapter
    adapters   of a node, which its ranks share: NCCL makes a ring through each, and they share a
               message. 0: each rank has a port of its own, and a group makes one ring, as in
               lesson 04 and on emulated links

    Raises: CourseError for ranks_per_node below 1 or adapters below 0
    """

    inside: Link
    outside: Link
    ranks_per_node: int
    adapters: int = 0

    def __post_init__(self) -> None:
        for what, least in (("ranks_per_node", 1), ("adapters", 0)):
            if getattr(self, what) < least:
                raise CourseError(
                    f"TwoLevelLink: need {what} >= {least}; got {getattr(self, what)}. Try 2."
                )

    def between(self, sender: int, receiver: int) -> Link:
        """Return `inside` for two ranks of one node, `outside` for ranks of different nodes.

        That is a whole adapter, also where ranks share it: only `ring` counts who else sends.
        """
        same_node = sender // self.ranks_per_node == receiver // self.ranks_per_node
        return self.inside if same_node else self.outside

    def ring(self, ranks: Sequence[int]) -> Link:
        """Return the link of rings over these ranks: `inside`, or their share of the adapters.

        Where each node has n ranks of the group, n of its ranks_per_node parts of the adapters work
        for it. The other parts serve the groups beside it, which communicate at the same time.
        """
        ranks_of_node = Counter(rank // self.ranks_per_node for rank in ranks)
        if len(ranks_of_node) <= 1:
            return self.inside
        share = 1.0  # in adapters
        if self.adapters:
            share = self.adapters * min(ranks_of_node.values()) / self.ranks_per_node
        bytes_per_s = min(self.inside.bytes_per_s, share * self.outside.bytes_per_s)
        return replace(self.outside, bytes_per_s=bytes_per_s)

    def __str__(self) -> str:
        return f"{self.ranks_per_node} ranks a node: {self.inside} inside, {self.outside} outside"


# The links of a node of A100 GPUs, as in `course_lib.cost.hardware` (later ones are faster there),
# and of older and simpler machines: PCIe 3, of which about 12 of 16 GB/s arrive, and 10 Gb/s.
NVLINK = Link(name="NVLink", latency_s=3e-6, bytes_per_s=300e9)
PCIE = Link(name="PCIe", latency_s=10e-6, bytes_per_s=12e9)
INFINIBAND = Link(name="InfiniBand", latency_s=5e-6, bytes_per_s=25e9)
ETHERNET = Link(name="Ethernet", latency_s=50e-6, bytes_per_s=1.25e9)
