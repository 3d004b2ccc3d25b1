"""The place of a notebook's ranks: this machine, or one allocation that all its pools share.

COURSE_RANKS names it, in the environment of the kernel or in a notebook's first cell:

    laptop             this machine, as without it
    slurm, slurm:2     an allocation with as few nodes as hold 4 ranks, or with 2
    ssh:one,two        these hosts

A kernel has one place, so that nothing measured here is ever shown as a cluster's, or a cluster's
as this machine's. Ranks that the course starts for itself, as its checks do, are always here.
"""

import os
import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink

PLACE = "COURSE_RANKS"
LAPTOP = "laptop"
FORM = r"laptop|slurm(:[1-9]\d{0,3})?|ssh:[\w.@-]+(,[\w.@-]+)*"


@dataclass(frozen=True)
class DefaultPlace:
    """Where pools of ranks start that name no place: `laptop`, `slurm:2`, `ssh:one,two`.

    Raises: CourseError for a place that cannot be read
    """

    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(FORM, self.text):
            raise CourseError(
                f"{PLACE}: need laptop, slurm, slurm:NODES or ssh:HOST,HOST; got {self.text!r}. "
                f"Try {PLACE}=slurm:2."
            )

    @property
    def is_cluster(self) -> bool:
        """Whether the ranks are on an allocation."""
        return self.text != LAPTOP

    @cached_property
    def allocation(self) -> Any:
        """The allocation that all pools share; the first one asks for it."""
        kind, _, more = self.text.partition(":")
        hosts = tuple(more.split(",")) if kind == "ssh" else ()
        nodes = len(hosts) if hosts else int(more) if more else None
        shared = import_module("course_lib.cluster_ranks.shared")  # stands above: it asks Slurm
        return shared.allocate(kind, nodes=nodes, hosts=hosts)

    @property
    def name(self) -> str:
        """The place in the words of a picture: `laptop`, or `cluster (2 nodes, gloo)`."""
        if not self.is_cluster:
            return LAPTOP
        nodes, backends = self.allocation.nodes, " and ".join(sorted(self.allocation.backends))
        return f"cluster ({nodes} node{'s' * (nodes > 1)}{', ' * bool(backends)}{backends})"


def default_place() -> DefaultPlace:
    """Return the place of this kernel.

    Raises: CourseError where COURSE_RANKS has changed since it was first read
    """
    first, asked = _first(), _asked()
    if first.text != asked:
        raise CourseError(
            f"{PLACE}: need one place for all ranks of a kernel; got {asked} after {first.text}. "
            "Try to restart the kernel, and set it before anything else."
        )
    return first


@cache
def _first() -> DefaultPlace:
    return DefaultPlace(_asked())


def _asked() -> str:
    return os.environ.get(PLACE, "").strip() or LAPTOP


def resolve(
    world_size: int, link: Link | TwoLevelLink | None, cluster: Any
) -> tuple[Link | TwoLevelLink | None, Any]:
    """Return the link that a pool emulates, and its cluster; None: this machine.

    Nothing is emulated on the allocation of the default place, and one line says so.
    """
    if cluster == LAPTOP:
        return link, None
    if cluster is not None or not (place := default_place()).is_cluster:
        return link, cluster
    if link is not None:
        print(f"Ranks({world_size}): on {place.name}, over its real link. Not emulated: {link}")
    return None, place.allocation
