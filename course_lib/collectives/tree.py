"""Collectives in about log2(p) rounds: binomial trees, and recursive doubling.

The root sends the tensor to a second rank, the two send it to two more, then four to four: after k
rounds 2**k ranks have it. Run backwards, the tree is a reduction; run by all ranks at once, it is
an all-reduce. The rounds are few, but each carries the whole tensor. Notebook 04_collectives.
"""

import torch
from torch import Tensor

from course_lib.collectives.group import (
    Group,
    check_op,
    combine,
    exchange,
    finish,
    flat_view,
    member_of,
)
from course_lib.cost.network import num_doublings


def star_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Copy the root's tensor to all, in place: the root sends it to one rank after another.

    Cost:    (p-1) * x bytes sent by the root, all of them over its one link
    Raises:  MeshError for a root outside the group
    """
    member = member_of(group, "star_broadcast")
    first = member.rank_of(root, "star_broadcast")
    with flat_view(tensor) as flat:
        if member.rank == first:
            for i in range(1, member.size):
                member.isend(flat, first + i).wait()
        else:
            member.irecv(flat, first).wait()
    return tensor


def tree_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Copy the root's tensor to all, in place: in each round, every rank that has it sends it on.

    Shapes:  x of any shape stays [...]; the same tensor is returned
    Cost:    ceil(log2 p) rounds of x bytes
    Adjoint: tree_reduce
    Raises:  MeshError for a root outside the group
    Source:  MPICH, src/mpi/coll/bcast/bcast_intra_binomial.c (which starts with the longest hops)
    """
    member = member_of(group, "tree_broadcast")
    first = member.rank_of(root, "tree_broadcast")
    mine = (member.rank - first) % member.size  # rank relative to the root
    with flat_view(tensor) as flat:
        for k in range(num_doublings(member.size)):
            have = 2**k  # number of ranks that have it
            if mine < have and mine + have < member.size:
                member.isend(flat, member.rank + have).wait()
            elif have <= mine < 2 * have:
                member.irecv(flat, member.rank - have).wait()
    return tensor


def tree_reduce(
    tensor: Tensor, root: int = 0, op: str = "sum", group: Group = None
) -> Tensor | None:
    """Sum over the group on the root (a new tensor); None elsewhere. The broadcast run backwards.

    Cost:    ceil(log2 p) rounds of x bytes; each rank but the root sends once
    Adjoint: tree_broadcast (of op="sum")
    Raises:  MeshError for a root outside the group, ValueError (op)
    Source:  MPICH, src/mpi/coll/reduce/reduce_intra_binomial.c
    """
    member = member_of(group, "tree_reduce")
    first = member.rank_of(root, "tree_reduce")
    check_op(op, tensor, "tree_reduce")
    mine = (member.rank - first) % member.size  # rank relative to the root
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    for k in reversed(range(num_doublings(member.size))):
        have = 2**k
        if have <= mine < 2 * have:
            member.isend(total, member.rank - have).wait()
        elif mine < have and mine + have < member.size:
            incoming = torch.empty_like(total)
            member.irecv(incoming, member.rank + have).wait()
            combine(total, incoming, op)
    return finish(total, op, member.size) if mine == 0 else None


def recursive_doubling_all_reduce(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Sum over the group, in place, on every rank: exchange in round k with the rank 2**k away.

    If p is not a power of two, the ranks past the largest power of two that fits send their tensor
    before the first round and receive the sum after the last one.

    Cost:    log2(p) rounds of x bytes; two rounds more when p is no power of two
    Adjoint: recursive_doubling_all_reduce (of op="sum")
    Raises:  MeshError, ValueError (op)
    Source:  MPICH, src/mpi/coll/allreduce/allreduce_intra_recursive_doubling.c
    """
    member = member_of(group, "recursive_doubling_all_reduce")
    check_op(op, tensor, "recursive_doubling_all_reduce")
    rank = member.rank
    core = 1 << (member.size.bit_length() - 1)  # the largest power of two that is <= p
    with flat_view(tensor) as flat:
        if rank >= core:
            member.isend(flat, rank - core).wait()
            member.irecv(flat, rank - core).wait()
            return tensor
        incoming = torch.empty_like(flat)
        if rank + core < member.size:
            member.irecv(incoming, rank + core).wait()
            combine(flat, incoming, op)
        for k in range(num_doublings(core)):
            exchange(member, flat, rank ^ 2**k, incoming, rank ^ 2**k)
            combine(flat, incoming, op)
        finish(flat, op, member.size)
        if rank + core < member.size:
            member.isend(flat, rank + core).wait()
    return tensor


def barrier(group: Group = None, device: str = "cpu") -> None:
    """Block until every rank of the group has called it.

    Cost:    ceil(log2 p) rounds of one byte
    Raises:  MeshError
    Source:  MPICH, src/mpi/coll/barrier/barrier_intra_dissemination.c, "Algorithm: MPI_Barrier"
    """
    member = member_of(group, "barrier")
    token, other = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    for k in range(num_doublings(member.size)):
        exchange(member, token, member.rank + 2**k, other, member.rank - 2**k)
