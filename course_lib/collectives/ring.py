"""Collectives on a ring: every rank sends one shard to its right and receives one from its left.

After p - 1 such steps each shard has visited every rank, over links that are all busy all the time.
Reduce-scatter adds on the way, all-gather copies, and one after the other they are an all-reduce.
Shard s starts at rank s + 1 and is summed in the order of the ring up to rank s, so the result is
the same on every run, and all ranks hold the same bits. Notebook 04_collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import (
    Group,
    GroupMember,
    check_op,
    combine,
    finish,
    flat_view,
    member_of,
    needs_pairs,
    shards_of,
    start_exchange,
    whole_for,
)

PIECE_BYTES = 2 * 2**20  # a larger shard travels in pieces of this size
RECEIVES_AHEAD = 4


def ring_reduce_scatter(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Sum over the group; rank r gets shard r. The input stays as it is.

    Shapes:  x [n, ...] -> [n/p, ...], split by torch.tensor_split: any n
    Cost:    (p-1)/p * x bytes sent per rank, p-1 steps; (p-1)/p * x in memory
    Adjoint: ring_all_gather (of op="sum")
    Raises:  MeshError, ShapeError, ValueError (op)
    Source:  MPICH, src/mpi/coll/allreduce/allreduce_intra_ring.c, "Phase 2"
    """
    member = member_of(group, "ring_reduce_scatter")
    check_op(op, tensor, "ring_reduce_scatter")
    shards = shards_of(tensor, member, "ring_reduce_scatter")  # p views of [n/p, ...]
    shards = tuple(shard.contiguous() for shard in shards)
    if member.size == 1:
        return shards[0].clone()
    totals = [torch.empty_like(shard) for shard in shards]
    run_steps(reduce_scatter_steps(member.rank, member.size), shards, totals, op, member)
    return totals[member.rank]


def ring_all_gather(shard: Tensor, out: Tensor | None = None, group: Group = None) -> Tensor:
    """Concatenate the shards of all ranks, in the order of the ranks, on every rank.

    Without `out` all shards need the same length. With it, rank r's shard is
    `out.tensor_split(p)[r]`, so that any length works and no memory is allocated.

    Shapes:  [n/p, ...] -> [n, ...]
    Cost:    (p-1)/p * out bytes sent per rank, p-1 steps
    Adjoint: ring_reduce_scatter (op="sum")
    Raises:  MeshError, ShapeError
    Source:  MPICH, src/mpi/coll/allgather/allgather_intra_ring.c, "Algorithm: Ring"
    """
    member = member_of(group, "ring_all_gather")
    out = whole_for(shard, out, member, "ring_all_gather")
    whole = out.detach().contiguous()
    shards = whole.tensor_split(member.size)  # p views of [n/p, ...]
    shards[member.rank].copy_(shard.detach())
    steps = all_gather_steps(member.rank, member.size)
    run_steps(steps, shards, shards, "sum", member, piece_bytes=max(1, whole.nbytes))  # no pieces
    return out if whole.data_ptr() == out.data_ptr() else out.copy_(whole)


def ring_all_reduce(
    tensor: Tensor, op: str = "sum", group: Group = None, *, piece_bytes: int = PIECE_BYTES
) -> Tensor:
    """Sum over the group, in place, on every rank: a reduce-scatter, then an all-gather.

    Shapes:  x of any shape stays [...]; the same tensor is returned
    Cost:    2 (p-1)/p * x bytes sent per rank, 2 (p-1) steps; up to 4 pieces in memory
    Adjoint: ring_all_reduce (of op="sum")
    Raises:  MeshError, ValueError (op)
    Source:  MPICH, src/mpi/coll/allreduce/allreduce_intra_ring.c
    """
    member = member_of(group, "ring_all_reduce")
    check_op(op, tensor, "ring_all_reduce")
    rank, p = member.rank, member.size
    with flat_view(tensor) as flat:  # [numel]
        shards = flat.tensor_split(p)  # p views of [numel/p]
        steps = reduce_scatter_steps(rank, p) + all_gather_steps(rank, p)
        run_steps(steps, shards, shards, op, member, piece_bytes)
    return tensor


@dataclass(frozen=True)
class RingStep:
    """One step of one rank: send shard `send` to the right, receive shard `receive` from the left.

    The rank `adds` what it receives to its own shard, or stores it there.
    """

    send: int
    receive: int
    adds: bool


def reduce_scatter_steps(rank: int, p: int) -> list[RingStep]:
    """Return a rank's p - 1 steps of a reduce-scatter: its own shard comes last, complete."""
    return [
        RingStep(send=(rank - step) % p, receive=(rank - step - 1) % p, adds=True)
        for step in range(1, p)
    ]


def all_gather_steps(rank: int, p: int) -> list[RingStep]:
    """Return a rank's p - 1 steps of an all-gather: it begins by sending its own shard."""
    return [
        RingStep(send=(rank + 1 - step) % p, receive=(rank - step) % p, adds=False)
        for step in range(1, p)
    ]


def run_steps(
    steps: list[RingStep],
    shards: Sequence[Tensor],
    totals: Sequence[Tensor],
    op: str,
    member: GroupMember,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Take the steps: what a rank receives in one step it sends on in the next one.

    Sums of what it receives and its own `shards`, or what it only stores, go to `totals`, which may
    be the same tensors. A large shard that is added travels in pieces: one is added while the next
    ones are on their way. Each receive is posted ahead, so that its sender does not wait for it.
    """
    if not steps:
        return
    num_pieces, ahead = _pipelining(shards[0], piece_bytes)
    mine, sums = (_pieces(tensors, steps, num_pieces) for tensors in (shards, totals))
    num_adds = num_pieces * sum(step.adds for step in steps)
    longest = -(-shards[0].numel() // num_pieces)
    scratch = shards[0].new_empty(min(ahead, num_adds), longest)
    into = [
        scratch[i % ahead][: piece.numel()] if i < num_adds else piece
        for i, piece in enumerate(sums)
    ]
    first = shards[steps[0].send].view(-1).tensor_split(num_pieces)
    receives, sends = _post(member, into[:ahead], first)
    for i, piece in enumerate(sums):
        receives[i].wait()
        if i < num_adds:
            combine(mine[i], into[i], op, out=piece)
        if num_adds - num_pieces <= i < num_adds:  # the rank's own shard, summed over all ranks
            finish(piece, op, member.size)
        send_on = [piece] if i + num_pieces < len(sums) else []
        posted = _post(member, into[i + ahead : i + ahead + 1], send_on)
        receives += posted[0]
        sends += posted[1]
    for send in sends:
        send.wait()


def _pieces(shards: Sequence[Tensor], steps: list[RingStep], num_pieces: int) -> list[Tensor]:
    """List the pieces of the shards that a rank receives, in their order."""
    return [
        piece for step in steps for piece in shards[step.receive].view(-1).tensor_split(num_pieces)
    ]


def _pipelining(shard: Tensor, piece_bytes: int) -> tuple[int, int]:
    """Return the number of pieces of a shard, and how many receives are posted ahead."""
    if needs_pairs(shard):  # NCCL, which also cuts messages into pieces by itself
        return 1, 1
    return max(1, -(-shard.nbytes // piece_bytes)), RECEIVES_AHEAD


def _post(
    member: GroupMember, into: Sequence[Tensor], outs: Sequence[Tensor]
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Start to receive from the left, then to send to the right; return the handles of both."""
    left, right = member.rank - 1, member.rank + 1
    if into and needs_pairs(into[0]):
        works = start_exchange(member, outs[0], right, into[0], left)
        return works[:1], works[1:]
    return [member.irecv(x, left) for x in into], [member.isend(x, right) for x in outs]
