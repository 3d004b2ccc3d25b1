"""Run fsdp-1 on a rank: every parameter is sharded, gathered, changed, gathered again.

Beside each of them a second one of the same shape is alive, whose numbers are below zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.zero.parts import alive_bytes, named, only_new, unwaited_calls
from course_lib.core import Event
from course_lib.ranks import record

WORLDS = (3, 2, 5, 1)  # five: more than the text shows, and more than there are rows
CHANGE = 3  # what rank r adds to its shard between the two gathers: this plus r


@dataclass(frozen=True)
class Sharding:
    """A parameter: what has to come of it on p ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    trained: bool = True
    transposed: bool = False

    def numbers(self) -> Tensor:
        """Return its numbers, all different and above zero."""
        return (1 + torch.arange(math.prod(self.shape))).view(self.shape).to(self.dtype)

    def param(self, sign: int = 1) -> nn.Parameter:
        """Return the parameter, or the one beside it, whose sign is -1."""
        numbers = sign * self.numbers()
        lies = numbers.t().contiguous().t() if self.transposed else numbers
        return nn.Parameter(lies, self.trained)

    def num_rows(self, p: int) -> int:
        """Return the rows of a full shard."""
        return -(-self.shape[0] // p)

    def rows_of(self, rank: int, p: int) -> slice:
        """Return the rows that a rank keeps."""
        rows = self.num_rows(p)
        return slice(rank * rows, min((rank + 1) * rows, self.shape[0]))

    def padded_bytes(self, p: int) -> int:
        """Return the bytes of p full shards."""
        return p * self.num_rows(p) * math.prod(self.shape[1:]) * self.dtype.itemsize

    def __str__(self) -> str:
        odd = [word for word, holds in (("transposed", self.transposed),) if holds]
        kind = "trained" if self.trained else "frozen"
        return ", ".join([f"{list(self.shape)} in {named(self.dtype)}", kind, *odd])


PARAMS = (
    Sharding((5, 3)),  # 2, 2, 1 rows on three ranks, 1 on each of five
    Sharding((6, 2), torch.float32),  # 2, 2, 2, 0, 0 rows on five ranks
    Sharding((7,)),
    Sharding((1, 4)),
    Sharding((3, 2, 2), torch.float16, trained=False),
    Sharding((4, 3), transposed=True),
    Sharding((2, 3), torch.bfloat16, trained=False),
)


@dataclass
class Sharded:
    """One parameter on one rank; `again`: gathered after the shard has changed."""

    sharding: Sharding
    shard: Any
    is_param: bool
    trained: bool
    shard_bytes: int  # that the shard keeps alive
    shares: bool  # the memory of the parameter
    changed: tuple[str, ...]
    value: Any = None
    again: Any = None
    at_the_end: Any = None
    calls: list[Event] = field(default_factory=list)
    unwaited: list[str] = field(default_factory=list)
    contiguous: bool = True
    followed: bool = False
    left_bytes: int = 0


def use_params(rank: int, answer: Callable[..., Any]) -> dict[str, Sharded]:
    """Shard and gather every parameter; note what comes, and what is alive afterwards."""
    return {str(sharding): _watched(rank, answer, sharding) for sharding in PARAMS}


def _watched(rank: int, answer: Callable[..., Any], sharding: Sharding) -> Sharded:
    with only_new(), unwaited_calls() as unwaited:
        param, beside_param = sharding.param(), sharding.param(-1)
        before = param.detach().clone()
        sharded, beside = answer(param), answer(beside_param)
        intact = torch.equal(param, before) and param.requires_grad == sharding.trained
        shard: Any = getattr(sharded, "shard", None)
        seen = _seen(sharding, shard, param, intact)
        del param, beside_param, before
        if not _everywhere(seen.shard, sharding):
            return seen  # with such a shard, gather() raises an error that tells less
        shard.grad = shard.detach().clone() if sharding.trained else None
        with record() as log:
            value = sharded.gather()
        seen.calls, seen.value = calls_of(log.events), copied(value)
        if sharding.trained and (shard.grad is None or not torch.equal(shard.grad, shard.detach())):
            seen.changed += ("the shard's gradient",)
        shard.grad = None
        beside.gather()
        shard.data = shard.data + (CHANGE + rank)  # as of a checkpoint: in other memory
        seen.again = copied(sharded.gather())
        if isinstance(value, Tensor):
            seen.at_the_end, seen.followed = value.detach(), value.requires_grad
            seen.contiguous = value.is_contiguous()
        others = (seen.shard, seen.value, seen.again, value, shard, beside.shard)
        known = [each for each in others if isinstance(each, Tensor)]
        seen.left_bytes = alive_bytes(*known, enough=0)
        seen.unwaited = list(unwaited.values())
    return seen


def _seen(sharding: Sharding, shard: Any, param: Tensor, intact: bool) -> Sharded:
    """Return what is there before anything is gathered."""
    is_tensor = isinstance(shard, Tensor)
    place = shard.untyped_storage().data_ptr() if is_tensor and shard.numel() else None
    return Sharded(
        sharding=sharding,
        shard=copied(shard),
        is_param=isinstance(shard, nn.Parameter),
        trained=bool(getattr(shard, "requires_grad", False)),
        shard_bytes=shard.untyped_storage().nbytes() if is_tensor else 0,
        shares=place == param.untyped_storage().data_ptr(),
        changed=() if intact else ("the parameter",),
    )


def _everywhere(shard: Any, sharding: Sharding) -> bool:
    """Return whether the shards of all ranks have the right shapes."""
    whole, rank, p = sharding.numbers(), dist.get_rank(), dist.get_world_size()
    fits = isinstance(shard, Tensor) and shard.shape == whole[sharding.rows_of(rank, p)].shape
    all_fit = torch.tensor(float(fits))
    dist.all_reduce(all_fit, op=dist.ReduceOp.MIN)
    return bool(all_fit)
