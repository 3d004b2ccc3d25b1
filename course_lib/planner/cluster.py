"""A cluster as the planner sees it: GPUs in nodes, and how fast their collectives are.

The bandwidth of a collective is a curve. It grows with the size of the message, because each step
of a ring has a latency, and it falls with the number of nodes, because there are more steps. Two
numbers a level give that curve: latency and bandwidth inside a node, and per adapter between nodes.
The profiles in `profiles/` hold them beside the measured points that they come from.
Notebook 12_planner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.core.files import read_json
from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.plain_values import build
from course_lib.cost.bandwidth import bus_bandwidth, bus_factor
from course_lib.cost.hardware import Device, find_device
from course_lib.planner.constants import SOFTWARE, USABLE, Software

FOLDER = Path(__file__).parent / "profiles"
DEFAULT_PROFILES = {
    **{"a100": "selene-a100", "h100": "torchtitan-h100", "h200": "dgx-h200"},
    **{"b200": "dgx-b200", "gb200": "gb200-nvl72"},
}
GPU_WORDS = {"a100-80gb": "a100-80", "a100-40gb": "a100-40"}  # of a table's column `gpu`


@dataclass(frozen=True, kw_only=True)
class LinkNumbers:
    """Latency per step of a ring, and bytes/s per GPU, of one level of a cluster's network."""

    latency_s: float
    bytes_per_s: float
    send_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """A profile, as its file in `profiles/` has it.

    gpu         name of the device in course_lib.cost.hardware
    software    what trained there, by its name in constants.py
    inside      links of a node
    outside     links between nodes: a GPU's own adapter, or its share of the node's
    gather_share   bandwidth of all_gather and reduce_scatter between nodes, divided by that of
                   all_reduce: NCCL has rings for them, and trees for all_reduce
    measured    points of the curve: number of nodes, bytes, bus bandwidth of an all_reduce in GB/s
    source      where the numbers were read
    """

    gpu: str
    gpus_per_node: int
    software: str
    inside: LinkNumbers
    outside: LinkNumbers
    gather_share: float = 1.0
    measured: Sequence[Sequence[float]] = ()
    source: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Nodes of equal GPUs, their links, and the software that trains on them.

    inside, outside    links between GPUs of a node, and between nodes (per adapter)
    send_bytes_per_s   of a message between two GPUs: inside a node, and between nodes
    gather_share       part of that bandwidth that gathers and reduce_scatters reach between nodes
    source             where the link's numbers were read

    Raises: CourseError for a cluster without GPUs
    """

    name: str
    device: Device
    gpus_per_node: int
    num_nodes: int = 1
    inside: Link
    outside: Link
    send_bytes_per_s: tuple[float, float]
    gather_share: float = 1.0
    software: Software = field(repr=False)
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for what in ("num_nodes", "gpus_per_node"):
            count = getattr(self, what)
            if type(count) is not int or count < 1:
                raise CourseError(
                    f"Cluster: need {what} as a whole number above 0; got {count!r}. Try {what}=1."
                )

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.num_nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> int:
        """Bytes of a GPU that a training step can have."""
        return int(USABLE * self.device.memory_bytes)

    def with_nodes(self, num_nodes: int) -> "Cluster":
        """Return the cluster with another number of nodes."""
        return replace(self, num_nodes=num_nodes)

    def link(self, size: int, stride: int = 1) -> Link:
        """Return the link that rings of `size` ranks use, each `stride` ranks after the last."""
        return self._links.ring(range(0, size * stride, stride))

    @cached_property
    def _links(self) -> TwoLevelLink:
        gpus = self.gpus_per_node  # with an adapter each
        return TwoLevelLink(
            inside=self.inside, outside=self.outside, ranks_per_node=gpus, adapters=gpus
        )

    def send_link(self, stride: int) -> Link:
        """Return the link of messages to the rank `stride` ranks further."""
        inside_bytes_per_s, outside_bytes_per_s = self.send_bytes_per_s
        if stride < self.gpus_per_node:
            return Link(latency_s=self.inside.latency_s, bytes_per_s=inside_bytes_per_s)
        return Link(latency_s=self.outside.latency_s, bytes_per_s=outside_bytes_per_s)

    def collective_s(self, kind: str, num_bytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of a collective on a ring of `size` ranks, `stride` ranks apart.

        It is `course_lib.cost.network.collective_s` for rings, without the list of their hops, and
        with the latency of p-1 steps for an all_reduce, too: NCCL reduces small messages along
        trees. Measured, its latency is no longer than an all_gather's.
        """
        if size == 1:
            return 0.0
        link = self.link(size, stride)
        sent_s = bus_factor(kind, size) * num_bytes / link.bytes_per_s
        if link is not self.inside and kind != "all_reduce":
            sent_s /= self.gather_share
        return (size - 1) * link.latency_s + sent_s

    def all_reduce_bandwidth(self, num_bytes: float, num_nodes: int = 1) -> float:
        """Return the bus bandwidth of an all_reduce over all GPUs of that many nodes: the curve."""
        p = num_nodes * self.gpus_per_node
        return bus_bandwidth(
            "all_reduce", num_bytes, self.collective_s("all_reduce", num_bytes, p), p
        )


def cluster_names() -> list[str]:
    """Return the names of the profiles that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def read_profile(name: str) -> ClusterProfile:
    """Return the profile of that name, or in a JSON file: a profile's, or a study's `links.json`.

    Raises: CourseError that names all profiles, or for a file that holds neither
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if path.parent == FOLDER and name not in cluster_names():
        raise CourseError(
            f"cluster: need one of {', '.join(cluster_names())}, or a file such as "
            f"runs/study/links.json; got {name!r}."
        )
    plain = read_json(path, "a cluster profile or measured links")
    if isinstance(plain, dict) and plain and all(key.isdecimal() for key in plain):
        return _profile_of_links(build(dict[str, list[float]], plain, path.name), name)
    found: ClusterProfile = build(ClusterProfile, plain, path.name)
    return found


def _profile_of_links(links: dict[str, list[float]], where: str) -> ClusterProfile:
    """Return the profile of this machine, with the link measured between most ranks."""
    ranks = max(links, key=int)
    if len(links[ranks]) != 2 or min(links[ranks]) <= 0:
        raise CourseError(
            f"{where}: need latency and bytes per second by the number of ranks; got "
            f"{links[ranks]} for {ranks}. Try to delete it and to measure again."
        )
    latency_s, bytes_per_s = links[ranks]
    link = LinkNumbers(latency_s=latency_s, bytes_per_s=bytes_per_s, send_bytes_per_s=bytes_per_s)
    return replace(
        read_profile("laptop"),
        gpus_per_node=int(ranks),
        inside=link,
        outside=link,
        source=f"{where}, measured by `course study`",
    )


@cache
def find_cluster(
    name: str, num_nodes: int = 1, *, gpu: str = "", gpus_per_node: int = 0
) -> Cluster:
    """Return the cluster with that profile: its name, or a file as `read_profile` takes.

    gpu, gpus_per_node   other ones than those of the profile

    Raises: CourseError for a name without profile, or an unknown GPU
    """
    profile = read_profile(name)
    inside, outside = profile.inside, profile.outside
    return Cluster(
        name=name,
        device=find_device(gpu or profile.gpu),
        gpus_per_node=gpus_per_node or profile.gpus_per_node,
        num_nodes=num_nodes,
        inside=Link(latency_s=inside.latency_s, bytes_per_s=inside.bytes_per_s),
        outside=Link(latency_s=outside.latency_s, bytes_per_s=outside.bytes_per_s),
        send_bytes_per_s=(inside.send_bytes_per_s, outside.send_bytes_per_s),
        gather_share=profile.gather_share,
        software=SOFTWARE[profile.software],
        source=profile.source,
    )


def cluster_for(gpu: str, num_nodes: int = 1, gpus_per_node: int = 0, profile: str = "") -> Cluster:
    """Return the cluster of a table's row, whose profile is the GPU's default where it has none.

    Raises: CourseError for an unknown GPU or profile
    """
    device = find_device(GPU_WORDS.get(gpu, gpu))
    family = device.name.split("-")[0]
    name = profile or DEFAULT_PROFILES.get(family, "a6000-pcie")
    return find_cluster(name, num_nodes, gpu=device.name, gpus_per_node=gpus_per_node)
