"""All-reduce by recursive halving and doubling: as few bytes as the ring, in far fewer messages.

In each round of the halving, two ranks split the part that both still have to sum: each sends one
half away and adds what arrives to the other. After log2(p) rounds every rank has the sum of one
part in p. The same exchanges backwards, now with sums, double the part until it is whole: an
all-gather. Notebook 04_collectives.
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


def halving_doubling_all_reduce(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Sum over the group, in place, on every rank: halve the part to sum, then double it again.

    Nearest ranks first, so the largest messages stay inside a node. If p is not a power of two, the
    ranks past the largest power of two that fits send their tensor before the first round and
    receive the sum after the last one.

    Shapes:  x of any shape stays [...]; the same tensor is returned
    Cost:    2 log2(p) messages, 2 (p-1)/p * x bytes sent per rank; two messages of x more when p is
             no power of two
    Adjoint: halving_doubling_all_reduce (of op="sum")
    Raises:  MeshError, ValueError (op)
    Source:  MPICH, src/mpi/coll/allreduce/allreduce_intra_reduce_scatter_allgather.c
    """
    member = member_of(group, "halving_doubling_all_reduce")
    check_op(op, tensor, "halving_doubling_all_reduce")
    rank = member.rank
    core = 1 << (member.size.bit_length() - 1)  # the largest power of two that is <= p
    with flat_view(tensor) as flat:
        if rank >= core:
            member.isend(flat, rank - core).wait()
            member.irecv(flat, rank - core).wait()
            return tensor
        if rank + core < member.size:
            folded = torch.empty_like(flat)
            member.irecv(folded, rank + core).wait()
            combine(flat, folded, op)
        part, halvings = flat, list[tuple[int, Tensor, Tensor]]()
        for k in range(num_doublings(core)):
            low, high = part.tensor_split(2)  # views of flat
            kept, given = (high, low) if rank & 2**k else (low, high)
            incoming = torch.empty_like(kept)
            exchange(member, given, rank ^ 2**k, incoming, rank ^ 2**k)
            part = combine(kept, incoming, op)
            halvings.append((rank ^ 2**k, kept, given))
        finish(part, op, member.size)
        for partner, kept, given in reversed(halvings):
            exchange(member, kept, partner, given, partner)
        if rank + core < member.size:
            member.isend(flat, rank + core).wait()
    return tensor
