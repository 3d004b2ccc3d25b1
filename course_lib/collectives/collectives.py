"""All the collectives, built by hand from send and recv.

The plain names (`broadcast`, `all_reduce`, ...) are what later lessons call; the others name the
algorithm. `root` is always a global rank, `group` may be any group that holds this rank, and a
wrong root, shape or op raises an error before anything is sent. Notebook 04_collectives.
"""

from torch import Tensor

from course_lib.collectives.group import (
    Group,
    describe,
    exchange,
    flat_view,
    member_of,
    shard_of,
    shards_of,
    whole_for,
)
from course_lib.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from course_lib.collectives.tree import recursive_doubling_all_reduce, tree_broadcast, tree_reduce
from course_lib.core import ShapeError

SMALL_BYTES = 64 * 2**10  # below where ring and doubling cross over for 50 us, 2.5 GB/s and any p

broadcast = tree_broadcast
reduce = tree_reduce
all_gather = ring_all_gather
reduce_scatter = ring_reduce_scatter


def scatter(tensor: Tensor | None, out: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Split the root's tensor: rank r gets shard r, in `out`. Other ranks may pass None.

    Shapes:  root's x [n, ...], split by torch.tensor_split; out [n/p, ...]
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
            f"rank {root}, scatter: need the root's tensor, and out in the shape of its shard "
            f"{first} of {member.size}; got {describe(tensor)} and {describe(out)}. "
            f"Try out=torch.empty_like(tensor.tensor_split({member.size})[{first}])."
        )
    shards = [shard.contiguous() for shard in shards_of(tensor, member, "scatter")]  # [n/p, ...]
    for i in range(1, member.size):
        rank = (first + i) % member.size
        member.isend(shards[rank], rank).wait()
    out.detach().copy_(shards[first])
    return out


def gather(
    shard: Tensor, out: Tensor | None = None, root: int = 0, group: Group = None
) -> Tensor | None:
    """Concatenate the shards of all ranks on the root; return None elsewhere.

    Without `out` (only the root's counts), all shards need the same length; with it, any length.

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
    shards = whole.tensor_split(member.size)  # p views of [n/p, ...]
    shards[first].copy_(shard.detach())
    for i in range(1, member.size):
        rank = (first + i) % member.size
        member.irecv(shards[rank], rank).wait()
    return out if whole.data_ptr() == out.data_ptr() else out.copy_(whole)


def all_reduce(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Sum over the group, in place, on every rank: by doubling if small, else on the ring.

    Latency dominates for a small tensor, bandwidth for a large one;
    `course_lib.cost.network.crossover_bytes` computes where the ring becomes faster. The ring takes
    any number of ranks, and each of its messages goes to a neighbor.

    Cost:    see recursive_doubling_all_reduce (up to SMALL_BYTES) and ring_all_reduce
    Adjoint: all_reduce (of op="sum")
    Raises:  MeshError, ValueError (op)
    """
    small = tensor.nbytes <= SMALL_BYTES
    return (recursive_doubling_all_reduce if small else ring_all_reduce)(tensor, op, group)


def all_to_all(tensor: Tensor, group: Group = None) -> Tensor:
    """Send shard s to rank s, for every s; return the shards received, in the order of the ranks.

    Shapes:  [n, ...] -> p shards r of it: [n, ...] if p divides n; the same n on every rank
    Cost:    (p-1)/p * x bytes sent per rank, p-1 steps
    Adjoint: all_to_all
    Raises:  MeshError, ShapeError
    Source:  MPICH, src/mpi/coll/alltoall/alltoall_intra_pairwise.c, "Algorithm: Pairwise Exchange"
    """
    member = member_of(group, "all_to_all")
    rank, p = member.rank, member.size
    shards = shards_of(tensor, member, "all_to_all")  # p views of [n/p, ...]
    mine = shards[rank]
    out = tensor.new_empty(p * len(mine), *tensor.shape[1:])
    received = out.view(p, *mine.shape)  # [p, n/p, ...]
    received[rank].copy_(mine)
    for step in range(1, p):
        shard = shards[(rank + step) % p].contiguous()
        exchange(member, shard, rank + step, received[(rank - step) % p], rank - step)
    return out
