"""All-reduce in two levels: most bytes stay inside a node, and every rank sends across nodes.

A flat ring has the bandwidth of its slowest link, and leaves each node through one rank only. Here
the ranks of a node first sum one part each (reduce-scatter), the ranks that hold the same part sum
it across nodes (all-reduce), and the parts are collected inside the node again (all-gather).
Notebook 04_collectives.
"""

from torch import Tensor

from course_lib.collectives.group import Group, GroupMember, check_op, flat_view, member_of
from course_lib.collectives.ring import all_gather_steps, reduce_scatter_steps, run_steps
from course_lib.core import MeshError


def hierarchical_all_reduce(
    tensor: Tensor, op: str = "sum", group: Group = None, *, ranks_per_node: int
) -> Tensor:
    """Sum over the group, in place, on every rank: inside each node, across nodes, inside again.

    The group's first `ranks_per_node` ranks are the first node, and so on.

    Shapes:  x of any shape stays [...]; the same tensor is returned
    Cost:    with m ranks in each of q nodes: 2 (m-1)/m * x bytes sent inside, 2 (q-1)/q * x/m bytes
             across, 2 (m-1) + 2 (q-1) steps
    Adjoint: hierarchical_all_reduce (of op="sum")
    Raises:  MeshError where the nodes are not of equal size, ValueError (op)
    """
    member = member_of(group, "hierarchical_all_reduce")
    check_op(op, tensor, "hierarchical_all_reduce")
    inside, across = _levels(member, ranks_per_node)
    with flat_view(tensor) as flat:
        parts = flat.tensor_split(inside.size)  # views of flat, one for each rank of the node
        run_steps(reduce_scatter_steps(inside.rank, inside.size), parts, parts, op, inside)
        shards = parts[inside.rank].tensor_split(across.size)
        steps = reduce_scatter_steps(across.rank, across.size)
        steps += all_gather_steps(across.rank, across.size)
        run_steps(steps, shards, shards, op, across)  # a mean of the nodes' means
        run_steps(all_gather_steps(inside.rank, inside.size), parts, parts, op, inside)
    return tensor


def _levels(member: GroupMember, ranks_per_node: int) -> tuple[GroupMember, GroupMember]:
    """Return this rank among the ranks of its node, and among those in its place in each node."""
    if ranks_per_node < 1 or member.size % ranks_per_node:
        raise MeshError(
            f"rank {member.global_rank(member.rank)}, hierarchical_all_reduce: need ranks_per_node "
            f"to divide the {member.size} ranks of the group; got {ranks_per_node}. "
            "Try ring_all_reduce, which takes any number."
        )
    node, local = divmod(member.rank, ranks_per_node)
    first = node * ranks_per_node
    inside = member.ranks[first : first + ranks_per_node]
    across = member.ranks[local::ranks_per_node]
    return GroupMember(local, inside, member.group), GroupMember(node, across, member.group)
