"""The groups of ranks that FSDP communicates in: those that shard, and those that replicate.

Hybrid sharding puts the ranks in a grid of replicate x shard. The ranks of a row (a node) shard the
parameters; those of a column have equal shards, and all-reduce the shards' gradients. Only this
small all-reduce crosses nodes. Notebook 10_fsdp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from course_lib.collectives.group import Group, GroupMember, member_of
from course_lib.core.errors import CourseError, MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Grid = list[list[int]]


@dataclass(frozen=True)
class ShardingGroups:
    """This rank in its groups.

    shard       the ranks among which parameters are sharded
    replicas    the ranks with the same shards as this one; None without hybrid sharding
    part        the ranks that together keep whole parameters after forward; None: all or one
    """

    shard: GroupMember
    replicas: GroupMember | None = None
    part: GroupMember | None = None

    @property
    def members(self) -> list[GroupMember]:
        """This rank in the groups that keep parameters in common."""
        return [self.shard, *([self.replicas] if self.replicas else [])]

    @property
    def num_ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.shard.size * (self.replicas.size if self.replicas else 1)


def hybrid_ranks(ranks: Sequence[int], num_replicas: int) -> tuple[Grid, Grid]:
    """Return the groups of ranks that shard (rows), and those that replicate (columns).

    Raises:  MeshError unless the rows are equally long
    """
    if num_replicas < 1 or len(ranks) % num_replicas:
        raise MeshError(
            f"FSDP: need a mesh (replicate, shard) of {len(ranks)} ranks; got {num_replicas} "
            f"replicas. Try mesh=(1, {len(ranks)})."
        )
    size = len(ranks) // num_replicas
    rows = [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]
    return rows, [list(column) for column in zip(*rows, strict=True)]


def sharding_groups(
    group: Group, mesh: "tuple[int, int] | DeviceMesh | None", reshard_after_forward: bool | int
) -> ShardingGroups:
    """Return this rank's groups; every rank of the group has to call this together.

    Raises:  MeshError for a mesh that does not fit the group, or a rank outside of it
             CourseError for a size to reshard to that does not divide the shard group
    """
    member, replicas = member_of(group, "FSDP"), None
    if isinstance(mesh, tuple):
        if len(mesh) != 2 or mesh[0] * mesh[1] != member.size:
            raise MeshError(
                f"FSDP: need a mesh (replicate, shard) of {member.size} ranks; got {mesh}. "
                f"Try mesh=(1, {member.size})."
            )
        rows, columns = hybrid_ranks(member.ranks, mesh[0])
        member, replicas = (_join(groups, member) for groups in (rows, columns))
    elif mesh is not None:
        replicas, member = (member_of(mesh.get_group(axis), "FSDP") for axis in (0, 1))
    return ShardingGroups(
        member,
        replicas if replicas and replicas.size > 1 else None,
        _part(member, reshard_after_forward),
    )


def _part(member: GroupMember, reshard_after_forward: bool | int) -> GroupMember | None:
    """Return the consecutive ranks that keep whole parameters after forward, if it is some."""
    size = int(reshard_after_forward)
    if isinstance(reshard_after_forward, bool) or size in (1, member.size):
        return None
    if size < 1 or member.size % size:
        raise CourseError(
            f"FSDP: need reshard_after_forward to be True, False or a size that divides "
            f"{member.size} ranks; got {reshard_after_forward}. Try True."
        )
    return _join(hybrid_ranks(member.ranks, member.size // size)[0], member)


def _join(groups: Grid, member: GroupMember) -> GroupMember:
    """Return this rank in a new process group: the one of these that holds it."""
    ranks = next(ranks for ranks in groups if member.global_rank(member.rank) in ranks)
    return member_of(dist.new_group(ranks, use_local_synchronization=True), "FSDP")
