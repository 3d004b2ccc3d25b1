"""What every collective stands on: where a rank stands in its group, and one exchange.

Ranks of a group are counted 0 .. p-1 along a circle, so number p is number 0 again and number -1 is
the last. An exchange posts its receive and its send before it waits for either; ranks that all send
first and receive later would wait for ever. Notebook 04_collectives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core import MeshError, ShapeError

Group = dist.ProcessGroup | None
OPS = ("sum", "mean", "max")


@dataclass(frozen=True)
class GroupMember:
    """This rank as a member of a process group: its `rank` there, and the global `ranks` of all."""

    rank: int
    ranks: tuple[int, ...]
    group: Group

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def global_rank(self, number: int) -> int:
        """The global rank of a number on the circle."""
        return self.ranks[number % self.size]

    def rank_of(self, root: int, where: str) -> int:
        """The number of a global rank. Raises: MeshError if the group does not hold it."""
        if root not in self.ranks:
            raise MeshError(
                f"rank {self.global_rank(self.rank)}, {where}: need a root out of the group's "
                f"ranks {list(self.ranks)} (roots are global ranks); got {root!r}. "
                f"Try root={self.ranks[0]}."
            )
        return self.ranks.index(root)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work:
        """Start to send to number `to` of the circle; `.wait()` for the end."""
        return _started(dist.isend(tensor, self.global_rank(to), self.group, tag))

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> dist.Work:
        """Start to receive from number `source` of the circle; `.wait()` for the end."""
        return _started(dist.irecv(tensor, self.global_rank(source), self.group, tag))


def member_of(group: Group, where: str) -> GroupMember:
    """This rank's place in a group (None: all ranks). Raises: MeshError if it has none."""
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
    """Send `out` to number `to` while `into` is filled by number `source`; wait for both."""
    moves = [
        dist.P2POp(dist.irecv, into, member.global_rank(source), member.group),
        dist.P2POp(dist.isend, out, member.global_rank(to), member.group),
    ]
    for work in dist.batch_isend_irecv(moves):
        work.wait()


@contextmanager
def flat_view(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's numbers in one contiguous row; what is written there ends up in the tensor."""
    flat = tensor.detach().contiguous().view(-1)
    yield flat
    if flat.data_ptr() != tensor.data_ptr():  # the row had to be a copy
        tensor.detach().copy_(flat.view(tensor.shape))


def check_op(op: str, tensor: Tensor, where: str) -> None:
    """Raises: ValueError for an unknown op, and for the mean of whole numbers."""
    if op not in OPS:
        raise ValueError(
            f"rank {dist.get_rank()}, {where}: need op out of {', '.join(OPS)}; got {op!r}."
        )
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"rank {dist.get_rank()}, {where}: need a floating dtype for op='mean'; got "
            f'{tensor.dtype}. Try tensor.float(), or op="sum".'
        )


def combine(mine: Tensor, theirs: Tensor, op: str) -> Tensor:
    """Add (or take the larger of) two tensors into the first. A mean is a sum until the end."""
    return torch.maximum(mine, theirs, out=mine) if op == "max" else mine.add_(theirs)


def finish(total: Tensor, op: str, p: int) -> Tensor:
    """Turn the sum over p ranks into the mean, if that is asked for: one division, at the end."""
    return total.div_(p) if op == "mean" else total


def whole_for(shard: Tensor, out: Tensor | None, member: GroupMember, where: str) -> Tensor:
    """Where p shards are put together: `out`, or a new tensor of p times this shard.

    Raises: ShapeError if this rank's shard of `out` has another shape or dtype than `shard`
    """
    if out is None:
        _need_rows(shard, where)
        return shard.new_empty(member.size * len(shard), *shard.shape[1:])
    mine = shard_of(out, member, member.rank, where)
    if (mine.shape, mine.dtype) != (shard.shape, shard.dtype):
        raise ShapeError(
            f"rank {member.global_rank(member.rank)}, {where}: need a shard of {describe(mine)}, "
            f"number {member.rank} of {member.size} of out's; got {describe(shard)}. "
            f"Try out.tensor_split({member.size})[{member.rank}]."
        )
    return out


def shard_of(tensor: Tensor, member: GroupMember, number: int, where: str) -> Tensor:
    """Shard `number` of p along the first dim: of 10 rows over 4 ranks 3, 3, 2, 2."""
    _need_rows(tensor, where)
    return tensor.detach().tensor_split(member.size)[number]


def describe(tensor: Any) -> str:
    """`[3, 2] float32`, for an error's sentence."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch's answer to a rank outside the group, which member_of has refused
        raise MeshError(f"rank {dist.get_rank()}: need a group that holds this rank.")
    return work


def _need_rows(tensor: Tensor, where: str) -> None:
    if tensor.dim() == 0:
        raise ShapeError(
            f"rank {dist.get_rank()}, {where}: need a tensor with at least one dim, to split it "
            "along the first; got a single number. Try tensor.view(1)."
        )
