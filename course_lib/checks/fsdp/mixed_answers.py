"""Exercise 4 of 10_fsdp: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course_lib.zero.flat_layout import FlatLayout


class Mixed:
    """The right answer, in parts that mistakes replace."""

    def __init__(self, shard: Tensor, layout: FlatLayout) -> None:
        self.shard, self.layout = shard, layout

    def gather(self) -> list[Tensor]:
        mine = self.shard.detach().bfloat16()
        row = mine.new_empty(self.layout.padded_numel)
        dist.all_gather_single(row, mine)
        return self.layout.views(row)

    def reduce(self, grads: Sequence[Tensor]) -> None:
        self.keep(self.mean(self.row(grads)))

    def row(self, grads: Sequence[Tensor]) -> Tensor:
        return self.layout.flatten([grad.float() for grad in grads])

    def mean(self, row: Tensor) -> Tensor:
        mean = row.new_empty(self.layout.shard_numel)
        dist.reduce_scatter_single(mean, row)
        return mean / dist.get_world_size()

    def keep(self, mean: Tensor) -> None:
        self.shard.grad = mean


class _GathersFp32(Mixed):
    def gather(self) -> list[Tensor]:
        row = self.shard.new_empty(self.layout.padded_numel)
        dist.all_gather_single(row, self.shard.detach())
        return self.layout.views(row.bfloat16())


class _ReturnsFp32(Mixed):
    def gather(self) -> list[Tensor]:
        return [view.float() for view in super().gather()]


class _Fp16(Mixed):
    def gather(self) -> list[Tensor]:
        mine = self.shard.detach().half()
        row = mine.new_empty(self.layout.padded_numel)
        dist.all_gather_single(row, mine)
        return self.layout.views(row)


class _MasterRounded(Mixed):
    def gather(self) -> list[Tensor]:
        self.shard.data.copy_(self.shard.data.bfloat16())
        return super().gather()


class _MasterBf16(Mixed):
    def __init__(self, shard: Tensor, layout: FlatLayout) -> None:
        shard.data = shard.data.bfloat16()
        super().__init__(shard, layout)

    def row(self, grads: Sequence[Tensor]) -> Tensor:
        return self.layout.flatten(grads)


class _ReducesBf16(Mixed):
    def row(self, grads: Sequence[Tensor]) -> Tensor:
        return self.layout.flatten(grads)

    def keep(self, mean: Tensor) -> None:
        self.shard.grad = mean.float()


class _DividesFirst(Mixed):
    def row(self, grads: Sequence[Tensor]) -> Tensor:
        return self.layout.flatten([(grad / dist.get_world_size()).float() for grad in grads])

    def mean(self, row: Tensor) -> Tensor:
        return super().mean(row) * dist.get_world_size()


class _RoundedAfter(Mixed):
    def keep(self, mean: Tensor) -> None:
        self.shard.grad = mean.bfloat16().float()


class _Summed(Mixed):
    def mean(self, row: Tensor) -> Tensor:
        return super().mean(row) * dist.get_world_size()


class _OwnOnly(Mixed):
    def mean(self, row: Tensor) -> Tensor:
        return row[self.layout.shard_slice(dist.get_rank())].clone()


class _AllReduce(Mixed):
    def mean(self, row: Tensor) -> Tensor:
        dist.all_reduce(row)
        mine = row[self.layout.shard_slice(dist.get_rank())]
        return mine / dist.get_world_size()


class _Cached(Mixed):
    def __init__(self, shard: Tensor, layout: FlatLayout) -> None:
        super().__init__(shard, layout)
        self.small = shard.detach().bfloat16()

    def gather(self) -> list[Tensor]:
        row = self.small.new_empty(self.layout.padded_numel)
        dist.all_gather_single(row, self.small)
        return self.layout.views(row)


class _Reversed(Mixed):
    def row(self, grads: Sequence[Tensor]) -> Tensor:
        row = torch.cat([grad.float().flatten() for grad in reversed(grads)])
        return F.pad(row, (0, self.layout.padded_numel - row.numel()))


class _PaddedTail(Mixed):
    def row(self, grads: Sequence[Tensor]) -> Tensor:
        row = super().row(grads)
        row[self.layout.numel :] = 7.0  # whatever was in the memory
        return row


class _NotFilledUp(Mixed):
    def row(self, grads: Sequence[Tensor]) -> Tensor:
        return torch.cat([grad.float().flatten() for grad in grads])


class _KeptBf16(_ReducesBf16):
    def keep(self, mean: Tensor) -> None:
        self.shard.grad = mean


class _Followed(Mixed):
    def gather(self) -> list[Tensor]:
        mine = self.shard.bfloat16()
        row = mine.new_empty(self.layout.padded_numel)
        dist.all_gather_single(row, mine)
        return self.layout.views(row)


class _TheRow(Mixed):
    def gather(self) -> Any:
        mine = self.shard.detach().bfloat16()
        row = mine.new_empty(self.layout.padded_numel)
        dist.all_gather_single(row, mine)
        return row


class _KeepsFp32(Mixed):
    def gather(self) -> list[Tensor]:
        views = super().gather()
        self.whole = [view.float() for view in views]
        return views


class _KeepsFlatGradient(Mixed):
    def mean(self, row: Tensor) -> Tensor:
        mean = row[self.layout.shard_slice(dist.get_rank())]
        dist.reduce_scatter_single(mean, row.clone())
        return mean.div_(dist.get_world_size())


class _CachedUntilReduce(Mixed):
    views: list[Tensor] | None = None

    def gather(self) -> list[Tensor]:
        self.views = self.views or super().gather()
        return self.views

    def reduce(self, grads: Sequence[Tensor]) -> None:
        self.views = None
        super().reduce(grads)


class _SharedBuffer(Mixed):
    buffer: Tensor

    def gather(self) -> list[Tensor]:
        buffer = vars(type(self)).get("buffer")
        if buffer is None:
            buffer = self.shard.new_empty(self.layout.padded_numel, dtype=torch.bfloat16)
            _SharedBuffer.buffer = buffer
        buffer.untyped_storage().resize_(2 * self.layout.padded_numel)
        dist.all_gather_single(buffer, self.shard.detach().bfloat16())
        return self.layout.views(buffer)

    def reduce(self, grads: Sequence[Tensor]) -> None:
        super().reduce(grads)
        _SharedBuffer.buffer.untyped_storage().resize_(0)


class _SharedGradient(Mixed):
    kept: Tensor

    def keep(self, mean: Tensor) -> None:
        _SharedGradient.kept = vars(_SharedGradient).get("kept", mean)
        self.shard.grad = _SharedGradient.kept.copy_(mean)


class _Adds(Mixed):
    def keep(self, mean: Tensor) -> None:
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


class _HidesNan(Mixed):
    def row(self, grads: Sequence[Tensor]) -> Tensor:
        return super().row(grads).nan_to_num()


class _Lost(Mixed):
    def keep(self, mean: Tensor) -> None:
        self.grad = mean


WRONG: tuple[tuple[str, type[Mixed], str], ...] = (
    ("gathers in fp32", _GathersFp32, "Convert first, then send"),
    ("returns fp32", _ReturnsFp32, "computes in bfloat16"),
    ("gathers in fp16", _Fp16, "computes in bfloat16"),
    ("rounds the master", _MasterRounded, "small steps are lost"),
    ("a bf16 master", _MasterBf16, "small steps are lost"),
    ("reduces in bf16", _ReducesBf16, "before it is sent"),
    ("divides in bf16", _DividesFirst, "Divide in fp32"),
    ("rounds afterwards", _RoundedAfter, "rounded to bfloat16 again"),
    ("summed", _Summed, "Summed, not averaged"),
    ("own gradient only", _OwnOnly, "Only this rank's own"),
    ("all_reduce", _AllReduce, "reduce_scatter leaves"),
    ("stale copy", _Cached, "as it is now"),
    ("in another order", _Reversed, "Each gradient in its place"),
    ("gradient of the padded tail", _PaddedTail, "zeros behind them"),
    ("not filled up", _NotFilledUp, "layout.padded_numel"),
    ("a gradient in bf16", _KeptBf16, "in fp32"),
    ("sent with autograd", _Followed, "self.shard.detach()"),
    ("the flat tensor itself", _TheRow, "return layout.views(flat)"),
    ("fp32 parameters kept", _KeepsFp32, "who keeps an fp32 copy"),
    ("a view of the flat gradient", _KeepsFlatGradient, "or a view of it"),
    ("kept until reduce", _CachedUntilReduce, "as it is now"),
    ("a buffer of all units", _SharedBuffer, "another unit"),
    ("a gradient of all units", _SharedGradient, "another unit"),
    ("adds to the gradient", _Adds, "do not add"),
    ("hides a nan", _HidesNan, "A nan has to stay"),
    ("gradient lost", _Lost, "self.shard.grad"),
)


def mistakes(make: Callable[..., Any]) -> tuple[Any, ...]:
    """Return all wrong answers, as `make(name, answer, says)`."""
    return tuple(make(name, answer, says) for name, answer, says in WRONG)
