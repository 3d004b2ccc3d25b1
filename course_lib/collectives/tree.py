"""Collectives in about log2(p) rounds: trees, and doubling.

One rank that knows tells a second, the two tell two more, then four tell four: after k rounds 2**k
ranks know. Run backwards it is a sum; run by all ranks at once it is a sum that all get. The rounds
are few, but each carries the whole tensor. Notebook 04_collectives.
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
    place_in,
)
from course_lib.cost.network import num_doublings


def star_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Copy the root's tensor to all, in place: the root sends it to one rank after another.

    Cost: (p-1) * x bytes sent by the root, all of them through its one wire
    Raises: MeshError for a root outside the group
    """
    place = place_in(group, "star_broadcast")
    first = place.number_of(root, "star_broadcast")
    with flat_view(tensor) as flat:
        if place.me == first:
            for i in range(1, place.p):
                place.isend(flat, first + i).wait()
        else:
            place.irecv(flat, first).wait()
    return tensor


def tree_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Copy the root's tensor to all, in place: in each round, all who have it send it on.

    Shapes:  x of any shape stays [...]; the same tensor is returned
    Cost:    ceil(log2 p) rounds of x bytes
    Adjoint: tree_reduce
    Raises:  MeshError for a root outside the group
    Source:  MPICH, src/mpi/coll/bcast/bcast_intra_binomial.c (it starts with the longest hops)
    """
    place = place_in(group, "tree_broadcast")
    first = place.number_of(root, "tree_broadcast")
    mine = (place.me - first) % place.p  # counted from the root
    with flat_view(tensor) as flat:
        for k in range(num_doublings(place.p)):
            have = 2**k  # ranks that have it
            if mine < have and mine + have < place.p:
                place.isend(flat, place.me + have).wait()
            elif have <= mine < 2 * have:
                place.irecv(flat, place.me - have).wait()
    return tensor


def tree_reduce(
    tensor: Tensor, root: int = 0, op: str = "sum", group: Group = None
) -> Tensor | None:
    """Sum over the group on the root (a new tensor), None elsewhere: the broadcast run backwards.

    Cost:    ceil(log2 p) rounds of x bytes; each rank but the root sends once
    Adjoint: tree_broadcast (of op="sum")
    Raises:  MeshError for a root outside the group, ValueError (op)
    Source:  MPICH, src/mpi/coll/reduce/reduce_intra_binomial.c
    """
    place = place_in(group, "tree_reduce")
    first = place.number_of(root, "tree_reduce")
    check_op(op, tensor, "tree_reduce")
    mine = (place.me - first) % place.p
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    for k in reversed(range(num_doublings(place.p))):
        have = 2**k
        if have <= mine < 2 * have:
            place.isend(total, place.me - have).wait()
        elif mine < have and mine + have < place.p:
            incoming = torch.empty_like(total)
            place.irecv(incoming, place.me + have).wait()
            combine(total, incoming, op)
    return finish(total, op, place.p) if mine == 0 else None


def recursive_doubling_all_reduce(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Sum over the group, in place, on every rank: in round k with the rank 2**k away.

    When p is no power of two, the ranks too many hand their tensor in first and get the sum last.

    Cost:    log2(p) rounds of x bytes; two rounds more when p is no power of two
    Adjoint: recursive_doubling_all_reduce (of op="sum")
    Raises:  MeshError, ValueError (op)
    Source:  MPICH, src/mpi/coll/allreduce/allreduce_intra_recursive_doubling.c
    """
    place = place_in(group, "recursive_doubling_all_reduce")
    check_op(op, tensor, "recursive_doubling_all_reduce")
    me, core = place.me, 1 << (place.p.bit_length() - 1)  # core: the power of two that fits
    with flat_view(tensor) as flat:
        if me >= core:
            place.isend(flat, me - core).wait()
            place.irecv(flat, me - core).wait()
            return tensor
        incoming = torch.empty_like(flat)
        if me + core < place.p:
            place.irecv(incoming, me + core).wait()
            combine(flat, incoming, op)
        for k in range(num_doublings(core)):
            exchange(place, flat, me ^ 2**k, incoming, me ^ 2**k)
            combine(flat, incoming, op)
        finish(flat, op, place.p)
        if me + core < place.p:
            place.isend(flat, me + core).wait()
    return tensor


def barrier(group: Group = None, device: str = "cpu") -> None:
    """Go on when every rank of the group has come here.

    Cost:   ceil(log2 p) rounds of one byte
    Raises: MeshError
    Source: MPICH, src/mpi/coll/barrier/barrier_intra_dissemination.c, "Algorithm: MPI_Barrier"
    """
    place = place_in(group, "barrier")
    token, other = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    for k in range(num_doublings(place.p)):
        exchange(place, token, place.me + 2**k, other, place.me - 2**k)
