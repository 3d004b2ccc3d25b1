"""Exercise 1 of 10_fsdp: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from course_lib.zero.flat_layout import FlatLayout


class FlatUnit:
    """The right answer, in parts that mistakes replace."""

    def __init__(self, module: nn.Module) -> None:
        self.params = list(module.parameters())
        self.layout = FlatLayout.of(self.params, dist.get_world_size())
        self.row = self.layout.flatten(self.params)
        self.row_bytes = self.row.nbytes
        self.shard = self.cut()
        self.free()

    def cut(self) -> Tensor:
        return self.row[self.layout.shard_slice(dist.get_rank())].clone()

    def gather(self) -> None:
        self.row.untyped_storage().resize_(self.row_bytes)
        self.fill()
        self.show()

    def fill(self) -> None:
        dist.all_gather_single(self.row, self.shard)

    def show(self) -> None:
        for param, view in zip(self.params, self.layout.views(self.row), strict=True):
            param.data = view

    def free(self) -> None:
        for param in self.params:
            param.data = self.row.new_empty(0)
        self.row.untyped_storage().resize_(0)


class _View(FlatUnit):
    def cut(self) -> Tensor:
        return self.row[self.layout.shard_slice(dist.get_rank())]


class _NeverFreed(FlatUnit):
    def free(self) -> None:
        self.show()


class _RowKept(FlatUnit):
    def free(self) -> None:
        for param in self.params:
            param.data = self.row.new_empty(0)


class _NewRow(FlatUnit):
    def gather(self) -> None:
        self.row = self.shard.new_empty(self.layout.padded_numel)
        self.fill()
        self.show()

    def free(self) -> None:
        for param in self.params:
            param.data = self.row.new_empty(0)
        self.row = self.row.new_empty(0)


class _OriginalsKept(FlatUnit):
    def __init__(self, module: nn.Module) -> None:
        self.whole = [param.detach() for param in module.parameters()]
        super().__init__(module)


class _ParamsKept(FlatUnit):
    def free(self) -> None:
        self.row.untyped_storage().resize_(0)


class _NotFilledUp(FlatUnit):
    def cut(self) -> Tensor:
        n = self.layout.numel // dist.get_world_size()
        return self.row[dist.get_rank() * n : (dist.get_rank() + 1) * n].clone()


class _WrongRank(FlatUnit):
    def cut(self) -> Tensor:
        other = (dist.get_rank() + 1) % dist.get_world_size()
        return self.row[self.layout.shard_slice(other)].clone()


class _FirstShard(FlatUnit):
    def cut(self) -> Tensor:
        return self.row[self.layout.shard_slice(0)].clone()


class _Stale(FlatUnit):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.start = self.shard.clone()

    def fill(self) -> None:
        dist.all_gather_single(self.row, self.start)


class _Broadcasts(FlatUnit):
    def fill(self) -> None:
        for rank in range(dist.get_world_size()):
            part = self.row[self.layout.shard_slice(rank)]
            if rank == dist.get_rank():
                part.copy_(self.shard)
            dist.broadcast(part, rank)


class _Copies(FlatUnit):
    def show(self) -> None:
        for param, view in zip(self.params, self.layout.views(self.row), strict=True):
            param.data = view.clone()


class _OnlyMine(FlatUnit):
    def fill(self) -> None:
        self.row.zero_()
        self.row[self.layout.shard_slice(dist.get_rank())] = self.shard


class _Summed(FlatUnit):
    def fill(self) -> None:
        self.row.zero_()
        self.row[self.layout.shard_slice(dist.get_rank())] = self.shard
        dist.all_reduce(self.row)


class _SendsTheRow(FlatUnit):
    def fill(self) -> None:
        mine = self.row[self.layout.shard_slice(dist.get_rank())]
        dist.all_gather_single(self.row, mine.clone())


class _NumbersNotBytes(FlatUnit):
    def gather(self) -> None:
        self.row.untyped_storage().resize_(self.layout.padded_numel)
        self.fill()
        self.show()


class _Float32(FlatUnit):
    def cut(self) -> Tensor:
        return super().cut().float()


class _Followed(FlatUnit):
    def cut(self) -> Tensor:
        return nn.Parameter(super().cut())


class _NotWaited(FlatUnit):
    def fill(self) -> None:
        dist.all_gather_single(self.row, self.shard, async_op=True)


class _NotShown(FlatUnit):
    def show(self) -> None:
        pass


class _WrongShapes(FlatUnit):
    def show(self) -> None:
        for param, view in zip(self.params, self.layout.views(self.row), strict=True):
            param.data = view.flatten()


WRONG: tuple[tuple[str, type[FlatUnit], str], ...] = (
    ("the shard is a view", _View, "clone()"),
    ("never freed", _NeverFreed, "Never freed"),
    ("the flat parameter keeps its bytes", _RowKept, "Never freed"),
    ("a new tensor each time", _NewRow, "the same tensor"),
    ("originals kept", _OriginalsKept, "Somebody holds"),
    ("parameters keep their own", _ParamsKept, "Somebody holds"),
    ("not filled up", _NotFilledUp, "rounds up"),
    ("another's shard", _WrongRank, "shard_slice"),
    ("always the first shard", _FirstShard, "shard_slice"),
    ("stale", _Stale, "Somebody holds"),
    ("a broadcast a rank", _Broadcasts, "One all_gather"),
    ("copies of the views", _Copies, "Views of the flat parameter"),
    ("only its own part", _OnlyMine, "Only this rank's own part"),
    ("summed up", _Summed, "One all_gather"),
    ("the freed flat parameter is sent", _SendsTheRow, "has lost its numbers"),
    ("numbers, not bytes", _NumbersNotBytes, "in bytes"),
    ("a shard in fp32", _Float32, "need torch.float64"),
    ("sent with autograd", _Followed, "self.shard.detach()"),
    ("not waited for", _NotWaited, "call wait()"),
    ("parameters not shown", _NotShown, "param.data = view"),
    ("flat parameters", _WrongShapes, "in its own shape"),
)


def mistakes(make: Callable[..., Any]) -> tuple[Any, ...]:
    """Return all wrong answers, as `make(name, answer, says)`."""
    return tuple(make(name, answer, says) for name, answer, says in WRONG)
