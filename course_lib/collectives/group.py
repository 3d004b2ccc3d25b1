"""Shared parts of the collectives: a rank within its process group, point-to-point messages.

Ranks within a group are 0 .. p-1 and are taken modulo p, so that rank p is rank 0 and rank -1 is
the last one: a ring needs no special case. An exchange posts its receive and its send before it
waits for either; if all ranks sent first and received later, they would deadlock. Notebook
04_collectives.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from course_lib.core import MeshError, ShapeError

Group = dist.ProcessGroup | None
OPS = ("sum", "mean", "max")
# experts: fewer ranks hold a parameter than the rest of its model
_OWN_GROUPS: MutableMapping[Tensor, tuple[Group, int]] = WeakIdKeyDictionary()


@dataclass(frozen=True)
class GroupMember:
    """This process in a group: its `rank` within the group, and the global `ranks` of all."""

    rank: int
    ranks: tuple[int, ...]
    group: Group

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank within the group, taken modulo its size."""
        return self.ranks[rank % self.size]

    def rank_of(self, root: int, where: str) -> int:
        """Return the rank within the group of a global rank. Raises: MeshError if it has none."""
        if root not in self.ranks:
            raise MeshError(
                f"rank {self.global_rank(self.rank)}, {where}: need a root out of the group's "
                f"ranks {list(self.ranks)} (a root is a global rank); got {root!r}. "
                f"Try root={self.ranks[0]}."
            )
        return self.ranks.index(root)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work:
        """Start to send to rank `to` of the group; `.wait()` blocks until it is sent."""
        return _started(dist.isend(tensor, self.global_rank(to), self.group, tag))

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> dist.Work:
        """Start to receive from rank `source` of the group; `.wait()` blocks until it is here."""
        return _started(dist.irecv(tensor, self.global_rank(source), self.group, tag))


def average_over(param: Tensor, group: Group, sources: int) -> None:
    """Note that a parameter's gradient is averaged over a group of its own, by every wrapper.

    sources   ranks that share the parameters of that kind: the rest is averaged over so many times
              the ranks of the group
    """
    _OWN_GROUPS[param] = group, sources


def group_of(param: Tensor, group: Group) -> Group:
    """Return the group over which a parameter is averaged: its own, if it has one, or this one."""
    return _OWN_GROUPS.get(param, (group, 1))[0]


def sources_of(param: Tensor) -> int | None:
    """Return the `sources` of a parameter with a group of its own; None for one without."""
    return _OWN_GROUPS[param][1] if param in _OWN_GROUPS else None


def member_of(group: Group, where: str) -> GroupMember:
    """Return this rank as a member of a group (None: all ranks). Raises: MeshError."""
    rank = dist.get_rank()
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, TypeError):  # no group at all
        ranks = ()
    if rank not in ranks:
        raise MeshError(
            f"rank {rank}, {where}: need a group that holds this rank; got "
            f"{f'one of ranks {list(ranks)}' if ranks else type(group).__name__}. "
            "Try group=dist.new_group([...]) with this rank in it, or call it on members only."
        )
    return GroupMember(ranks.index(rank), ranks, group)


def exchange(member: GroupMember, out: Tensor, to: int, into: Tensor, source: int) -> None:
    """Send `out` to rank `to` of the group, receive `into` from rank `source`; wait for both."""
    for work in start_exchange(member, out, to, into, source):
        work.wait()


def start_exchange(
    member: GroupMember, out: Tensor, to: int, into: Tensor, source: int
) -> list[dist.Work]:
    """Start an exchange; return its handles, the receive's first. NCCL has one for both."""
    messages = [
        dist.P2POp(dist.irecv, into, member.global_rank(source), member.group),
        dist.P2POp(dist.isend, out, member.global_rank(to), member.group),
    ]
    return dist.batch_isend_irecv(messages)


def needs_pairs(tensor: Tensor) -> bool:
    """Tell whether a receive has to start together with a send: NCCL may deadlock otherwise."""
    return tensor.is_cuda


@contextmanager
def flat_view(tensor: Tensor) -> Iterator[Tensor]:
    """Give a tensor as a flat, contiguous one; what is written there ends up in the tensor."""
    flat = tensor.detach().contiguous().view(-1)  # [numel]
    yield flat
    if flat.data_ptr() != tensor.data_ptr():  # the flat tensor had to be a copy
        tensor.detach().copy_(flat.view(tensor.shape))


def check_op(op: str, tensor: Tensor, where: str) -> None:
    """Check that `op` is known and fits the dtype. Raises: ValueError, also for a mean of ints."""
    if op not in OPS:
        raise ValueError(
            f"rank {dist.get_rank()}, {where}: need op out of {', '.join(OPS)}; got {op!r}."
        )
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"rank {dist.get_rank()}, {where}: need a floating dtype for op='mean'; got "
            f'{tensor.dtype}. Try tensor.float(), or op="sum".'
        )


def combine(mine: Tensor, theirs: Tensor, op: str, out: Tensor | None = None) -> Tensor:
    """Add `theirs` to `mine`, in place or in `out`, or take the maximum. `finish` makes a mean."""
    operator = torch.maximum if op == "max" else torch.add
    return operator(mine, theirs, out=mine if out is None else out)


def finish(total: Tensor, op: str, p: int) -> Tensor:
    """Divide the sum over p ranks by p, in place, if the mean is asked for."""
    return total.div_(p) if op == "mean" else total


def whole_for(shard: Tensor, out: Tensor | None, member: GroupMember, where: str) -> Tensor:
    """Return the tensor that holds the shards of all ranks: `out`, or a new one.

    Shapes:  shard [n/p, ...] -> [n, ...]
    Raises:  ShapeError if this rank's shard of `out` has another shape or dtype than `shard`
    """
    if out is None:
        _need_a_dim(shard, where)
        return shard.new_empty(member.size * len(shard), *shard.shape[1:])
    mine = shard_of(out, member, member.rank, where)
    if (mine.shape, mine.dtype) != (shard.shape, shard.dtype):
        raise ShapeError(
            f"rank {member.global_rank(member.rank)}, {where}: need a shard like shard "
            f"{member.rank} of {member.size} of out, {describe(mine)}; got {describe(shard)}. "
            f"Try out.tensor_split({member.size})[{member.rank}]."
        )
    return out


def shards_of(tensor: Tensor, member: GroupMember, where: str) -> tuple[Tensor, ...]:
    """Split a tensor along its first dim into a shard for each rank; the first ones may be longer.

    Shapes:  [n, ...] -> p views of [n/p, ...]: lengths 3, 3, 2, 2 for n = 10 and p = 4
    Raises:  ShapeError if the tensor has no dim
    """
    _need_a_dim(tensor, where)
    return tensor.detach().tensor_split(member.size)


def shard_of(tensor: Tensor, member: GroupMember, rank: int, where: str) -> Tensor:
    """Return the shard of one rank of the group, a view."""
    return shards_of(tensor, member, where)[rank]


def describe(tensor: Any) -> str:
    """Describe a tensor for an error message: `[3, 2] float32`."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch's answer to a rank outside the group, which member_of refuses
        raise MeshError(f"rank {dist.get_rank()}: need a group that holds this rank.")
    return work


def _need_a_dim(tensor: Tensor, where: str) -> None:
    if tensor.dim() == 0:
        raise ShapeError(
            f"rank {dist.get_rank()}, {where}: need a tensor with at least one dim, to split it "
            "along the first; got one with no dims. Try tensor.view(1)."
        )
