"""All the collectives, built by hand from send and recv.

Each one is what it says in one line, and a handful of messages. The plain names (`broadcast`,
`all_reduce`, ...) are what later lessons call; the others name the algorithm. `root` is always a
global rank, `group` may be any group that holds this rank, and a wrong root, shape or op is told
on every rank before anything is sent. Notebook 04_collectives.
"""

from torch import Tensor

from course_lib.collectives.group import (
    Group,
    describe,
    exchange,
    flat_view,
    member_of,
    shard_of,
    whole_for,
)
from course_lib.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from course_lib.collectives.tree import recursive_doubling_all_reduce, tree_broadcast, tree_reduce
from course_lib.core import ShapeError

SMALL_BYTES = 64 * 2**10  # below the crossover of ring and doubling for 50 us and 2.5 GB/s, any p

broadcast = tree_broadcast
reduce = tree_reduce
all_gather = ring_all_gather
reduce_scatter = ring_reduce_scatter


def scatter(tensor: Tensor | None, out: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Deal the root's tensor: rank r gets shard r, in `out`. Other ranks may pass None.

    Shapes:  root's x [n, ...], cut by torch.tensor_split; out [n/p, ...]
    Cost:    (p-1)/p * x bytes sent by the root, one shard after another
    Adjoint: gather
    Raises:  MeshError for a root outside the group; ShapeError on the root if out is not its shard
    Source:  MPICH, src/mpi/coll/scatterv/scatterv_allcomm_linear.c, "Algorithm: Linear"
    """
    member = member_of(group, "scatter")
    first = member.rank_of(root, "scatter")
    if member.rank != first:
        with flat_view(out) as flat:
            member.irecv(flat, first).wait()
        return out
    if tensor is None or out.shape != shard_of(tensor, member, first, "scatter").shape:
        raise ShapeError(
            f"rank {root}, scatter: need the root's tensor, and for out the shape of its shard "
            f"{first} of {member.size}; got {describe(tensor)} and {describe(out)}. "
            f"Try out=torch.empty_like(tensor.tensor_split({member.size})[{first}])."
        )
    shards = [shard.contiguous() for shard in tensor.detach().tensor_split(member.size)]
    for i in range(1, member.size):
        number = (first + i) % member.size
        member.isend(shards[number], number).wait()
    out.detach().copy_(shards[first])
    return out


def gather(
    shard: Tensor, out: Tensor | None = None, root: int = 0, group: Group = None
) -> Tensor | None:
    """Put the shards of all ranks together on the root; None elsewhere.

    Without `out` (only the root's counts) all shards need the same length; with it, any length.

    Shapes:  [n/p, ...] -> [n, ...] on the root
    Cost:    (p-1)/p * out bytes received by the root, one shard after another
    Adjoint: scatter
    Raises:  MeshError for a root outside the group; ShapeError on the root if shard is not out's
    """
    member = member_of(group, "gather")
    first = member.rank_of(root, "gather")
    if member.rank != first:
        member.isend(shard.detach().contiguous(), first).wait()
        return None
    out = whole_for(shard, out, member, "gather")
    whole = out.detach().contiguous()
    shards = whole.tensor_split(member.size)
    shards[first].copy_(shard.detach())
    for i in range(1, member.size):
        number = (first + i) % member.size
        member.irecv(shards[number], number).wait()
    return out if whole.data_ptr() == out.data_ptr() else out.copy_(whole)


def all_reduce(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Sum over the group, in place, on every rank: by doubling if small, else around the ring.

    Few messages matter for a small tensor, few bytes for a large one;
    `course_lib.cost.network.crossover_bytes` computes where that changes.

    Cost:    see recursive_doubling_all_reduce (up to SMALL_BYTES) and ring_all_reduce
    Adjoint: all_reduce (of op="sum")
    Raises:  MeshError, ValueError (op)
    """
    small = tensor.nbytes <= SMALL_BYTES
    return (recursive_doubling_all_reduce if small else ring_all_reduce)(tensor, op, group)


def all_to_all(tensor: Tensor, group: Group = None) -> Tensor:
    """Rank r sends shard s to rank s, and gets shard r of every rank, in the order of the ranks.

    Shapes:  [n, ...] -> p shards r of it: [n, ...] if p divides n; the same n on every rank
    Cost:    (p-1)/p * x bytes sent per rank, p-1 steps
    Adjoint: all_to_all
    Raises:  MeshError, ShapeError
    Source:  MPICH, src/mpi/coll/alltoall/alltoall_intra_pairwise.c, "Algorithm: Pairwise Exchange"
    """
    member = member_of(group, "all_to_all")
    rank, p = member.rank, member.size
    mine = shard_of(tensor, member, rank, "all_to_all")
    out = tensor.new_empty(p * len(mine), *tensor.shape[1:])
    received = out.view(p, *mine.shape)
    received[rank].copy_(mine)
    for step in range(1, p):
        shard = shard_of(tensor, member, (rank + step) % p, "all_to_all").contiguous()
        exchange(member, shard, rank + step, received[(rank - step) % p], rank - step)
    return out
