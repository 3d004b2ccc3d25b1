"""Ranks on other machines: the same cell on an allocation of Slurm, or on hosts reached by ssh.

ranks = Ranks(16, cluster="slurm", nodes=2)

On the notebook's machine:

    cluster_place   the place of such ranks, for the pool; read this first
    allocation      nodes of Slurm: asked for, waited for, given back
    ssh_hosts       hosts reached by ssh
    door            where the servers of the nodes connect back to
    node_link       one node: its ranks as members, and what its server says

On each node:

    node_server     forks the node's ranks, and relays between them and the notebook

What both sides use:

    channel         messages that are authenticated before they are unpickled
    rows            rows of the call board that travel
    inbox           a queue that can be waited on beside pipes
    facts           versions that have to be the same on both sides
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from course_lib.core.errors import CourseError

if TYPE_CHECKING:  # a node imports little before it has connected
    from course_lib.cluster_ranks.cluster_place import ClusterPlace, Nodes

__all__ = ["place_of"]


def place_of(
    cluster: str,
    world_size: int,
    *,
    nodes: int = 1,
    minutes: int = 30,
    profile: str | None = None,
    hosts: Sequence[str] = (),
) -> "ClusterPlace":
    """Return the place of `world_size` ranks: nothing is asked for before they start.

    cluster   "slurm" or "ssh"
    nodes     of Slurm; for ssh, one a host
    minutes   after which Slurm ends the allocation
    profile   of the site, as `course cluster profiles` lists them
    hosts     for ssh: names or addresses; empty: those of COURSE_HOSTS, with commas

    Raises: CourseError for what no such place can be
    """
    from course_lib.cluster_ranks.cluster_place import ClusterPlace

    chosen: Nodes
    if cluster == "slurm":
        from course_lib.cluster_ranks.allocation import Allocation

        chosen = Allocation(nodes, world_size, minutes=minutes, profile=profile)
    elif cluster == "ssh":
        from course_lib.cluster_ranks.ssh_hosts import SshHosts

        chosen = SshHosts(hosts)
    else:
        raise CourseError(f'Ranks: need cluster="slurm" or cluster="ssh"; got {cluster!r}.')
    return ClusterPlace(chosen, world_size)
