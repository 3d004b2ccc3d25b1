"""Collectives on a ring: every rank sends one shard to its right and receives one from its left.

After p - 1 such steps each rank has met every other rank's numbers once, over links that are all
busy all the time. Reduce-scatter adds on the way, all-gather copies, and one after the other they
are an all-reduce. Shard s starts at rank s + 1 and is summed in the order of the ring up to rank s,
so the result is the same on every run, and all ranks hold the same bits. Notebook 04_collectives.
"""

import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import (
    Group,
    GroupMember,
    check_op,
    combine,
    exchange,
    finish,
    flat_view,
    member_of,
    shard_of,
    whole_for,
)

PIECE_BYTES = 2 * 2**20


def ring_reduce_scatter(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Sum over the group; rank r gets shard r. The input stays as it is.

    Shapes:  x [n, ...] -> [n/p, ...], cut by torch.tensor_split: any n
    Cost:    (p-1)/p * x bytes sent per rank, p-1 steps
    Adjoint: ring_all_gather (of op="sum")
    Raises:  MeshError, ShapeError, ValueError (op)
    Source:  MPICH, src/mpi/coll/allreduce/allreduce_intra_ring.c, "Phase 2"
    """
    member = member_of(group, "ring_reduce_scatter")
    check_op(op, tensor, "ring_reduce_scatter")
    rank, p = member.rank, member.size
    parcel = shard_of(tensor, member, rank - 1, "ring_reduce_scatter").clone()
    for step in range(p - 1):
        mine = shard_of(tensor, member, (rank - 2 - step) % p, "ring_reduce_scatter")
        incoming = mine.new_empty(mine.shape)
        exchange(member, parcel, rank + 1, incoming, rank - 1)
        parcel = combine(incoming, mine, op)
    return finish(parcel, op, p)


def ring_all_gather(shard: Tensor, out: Tensor | None = None, group: Group = None) -> Tensor:
    """Put the shards of all ranks together, in the order of the ranks, on every rank.

    Without `out` all shards need the same length. With it, rank r's shard is
    `out.tensor_split(p)[r]`, so that any length works and no memory is taken.

    Shapes:  [n/p, ...] -> [n, ...]
    Cost:    (p-1)/p * out bytes sent per rank, p-1 steps
    Adjoint: ring_reduce_scatter (op="sum")
    Raises:  MeshError, ShapeError
    Source:  MPICH, src/mpi/coll/allgather/allgather_intra_ring.c, "Algorithm: Ring"
    """
    member = member_of(group, "ring_all_gather")
    rank, p = member.rank, member.size
    out = whole_for(shard, out, member, "ring_all_gather")
    whole = out.detach().contiguous()
    shards = whole.tensor_split(p)
    shards[rank].copy_(shard.detach())
    for step in range(p - 1):
        exchange(
            member, shards[(rank - step) % p], rank + 1, shards[(rank - 1 - step) % p], rank - 1
        )
    return out if whole.data_ptr() == out.data_ptr() else out.copy_(whole)


def ring_all_reduce(
    tensor: Tensor, op: str = "sum", group: Group = None, *, piece_bytes: int = PIECE_BYTES
) -> Tensor:
    """Sum over the group, in place, on every rank: a reduce-scatter, then an all-gather.

    A shard of more than `piece_bytes` travels in pieces: one is added while the next one is on its
    way, and no more than two pieces of memory are taken.

    Shapes:  x of any shape stays [...]; the same tensor is returned
    Cost:    2 (p-1)/p * x bytes sent per rank, 2 (p-1) steps
    Adjoint: ring_all_reduce (of op="sum")
    Raises:  MeshError, ValueError (op)
    Source:  MPICH, src/mpi/coll/allreduce/allreduce_intra_ring.c
    """
    member = member_of(group, "ring_all_reduce")
    check_op(op, tensor, "ring_all_reduce")
    with flat_view(tensor) as flat:
        if flat.is_cuda:  # NCCL cuts into pieces by itself, and needs sends and receives in pairs
            shard = ring_reduce_scatter(flat, op, group)
            ring_all_gather(shard, flat, group)
        elif member.size > 1:
            _piecewise(flat, op, member, piece_bytes)
    return tensor


def _piecewise(flat: Tensor, op: str, member: GroupMember, piece_bytes: int) -> None:
    """The ring as one row of moves, with every receive posted before its message can come.

    Move i receives a piece, and what came in move i leaves in move i + k. The first half of the
    moves adds, through two boxes in turn; the second half receives into place.
    """
    rank, p = member.rank, member.size
    shards = flat.tensor_split(p)
    k = max(1, -(-shards[0].nbytes // piece_bytes))  # pieces a shard
    pieces = [shard.tensor_split(k) for shard in shards]
    half = (p - 1) * k
    boxes = flat.new_empty(min(2, half), len(pieces[0][0]))

    def piece(i: int) -> Tensor:
        step, j = divmod(i, k)
        return pieces[(rank - 2 - step) % p][j]

    def receive(i: int) -> tuple[Tensor, dist.Work]:
        box = boxes[i % len(boxes)][: len(piece(i))] if i < half else piece(i)
        return box, member.irecv(box, rank - 1, tag=int(i >= half))

    def send(i: int) -> dist.Work:
        return member.isend(piece(i), rank + 1, tag=int(i + k >= half))

    adds = [receive(i) for i in range(len(boxes))]
    sends = [send(i) for i in range(-k, 0)]  # my shard rank - 1, as it is
    gathers = [receive(i) for i in range(half, 2 * half)]
    for i in range(half):
        box, work = adds[i]
        work.wait()
        combine(piece(i), box, op)
        if len(adds) < half:
            adds.append(receive(len(adds)))
        if i + k >= half:  # shard rank is complete
            finish(piece(i), op, p)
        sends.append(send(i))
    for i, (_, work) in enumerate(gathers, start=half):
        work.wait()
        if i + k < 2 * half:
            sends.append(send(i))
    for work in sends:
        work.wait()
