"""Which ranks share the experts of a layer, and which hold the same ones.

Expert parallelism takes no ranks of its own: it reuses those that hold the same dense parameters,
dp x cp. Neighbors share the experts, as they communicate most. Notebook 16_experts.
"""

import math
from typing import NamedTuple

import torch.distributed as dist

from course_lib.core.errors import MeshError
from course_lib.mesh.mesh import COPIES
from course_lib.mesh.rank_mesh import RankMesh


class ExpertGroups(NamedTuple):
    """This rank's two process groups.

    ep         ranks that share the experts of a layer, and exchange tokens
    expert_dp  ranks that hold the same experts, and average their gradients
    """

    ep: dist.ProcessGroup
    expert_dp: dist.ProcessGroup


def expert_groups(mesh: RankMesh, ep: int | None = None) -> ExpertGroups:
    """Form the groups of expert parallelism out of the ranks of dp x cp; all ranks call it.

    ep   ranks that share the experts of a layer; None: as many as the mesh's own axis ep has

    Cost:    one new_group for each group
    Raises:  MeshError unless ep divides dp * cp
    """
    whole, ep = mesh.mesh, mesh.size("ep") if ep is None else ep
    copies = mesh.num_copies
    if ep < 1 or copies % ep:
        raise MeshError(
            f"rank {mesh.rank}, expert_groups: need ep as a divisor of dp * cp = {copies}; got "
            f"{ep}. Try ep={math.gcd(max(ep, 1), copies)}."
        )
    shared, same = list[list[int]](), list[list[int]]()
    for ranks in whole.groups(*whole.having(*COPIES)):
        ordered = sorted(ranks, key=lambda rank: (*_outside(mesh, rank), rank))
        shared += [ordered[first : first + ep] for first in range(0, copies, ep)]
        same += [ordered[index::ep] for index in range(ep)]
    return ExpertGroups(_own(shared, mesh.rank), _own(same, mesh.rank))


def _outside(mesh: RankMesh, rank: int) -> list[int]:
    """Return a rank's coordinates but for the one along ep, which is then the innermost."""
    return [index for axis, index in mesh.mesh.coordinates(rank).items() if axis != "ep"]


def _own(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)
