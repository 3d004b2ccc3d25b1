"""Run fsdp-2 on a rank: forward and backward, three times, and once without autograd.

In other runs, a part of the module is a unit of its own, or two forwards come before two backwards.

The unit that the answer gets does not give its memory back when it is freed: it fills it with NaN,
so that whoever computes with it is noticed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.fsdp.parts import MODULES, TiedModel, batch, num_rows, pack, rows_of
from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.zero.parts import BESIDE, alive_bytes, only_new, telling, unwaited_calls
from course_lib.core import Event
from course_lib.ranks import record

# the backward passes that are in the gradients after each one; before the third they are cleared,
# and the shards have changed
ROUNDS = ((0,), (0, 1), (2,))
STEP = 0.5
EVALUATION = "without autograd"


class _Unit:
    """The unit that the answer is given."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.params, self.p = list(params), dist.get_world_size()
        rank = dist.get_rank()
        self.shards = [
            nn.Parameter(rows_of(param.detach(), rank, self.p).clone()) for param in self.params
        ]
        self.is_whole = True
        self.free()

    def gather(self) -> None:
        """Fill the parameters."""
        mine = self.pack_shards()
        whole = mine.new_empty(self.p * len(mine))
        dist.all_gather_single(whole, mine)
        split = self._split(whole.view(self.p, -1))
        for param, rows in zip(self.params, split, strict=True):
            param.data.copy_(rows.reshape(-1, *param.shape[1:])[: len(param)])
        self.is_whole = True

    def free(self) -> None:
        """Make the parameters useless."""
        for param in self.params:
            param.data.fill_(torch.nan)
        self.is_whole = False

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whole tensors as one [p, n]: row r has what rank r keeps of each, padded."""
        return pack(list(tensors), self.p)

    def unpack(self, mine: Tensor) -> list[Tensor]:
        """Return a row of `pack`, [n], as tensors of the shards' shapes."""
        parts = zip(self.shards, self._split(mine), strict=True)
        return [part[: shard.numel()].view_as(shard) for shard, part in parts]

    def pack_shards(self) -> Tensor:
        """Return this rank's rows of all parameters, padded: [n]."""
        n = sum(self._widths())
        mine = self.shards[0].new_zeros(n)
        for shard, part in zip(self.shards, self._split(mine), strict=True):
            part[: shard.numel()] = shard.detach().flatten()
        return mine

    def _widths(self) -> list[int]:
        return [num_rows(param, self.p) * param[:1].numel() for param in self.params]

    def _split(self, row: Tensor) -> Sequence[Tensor]:
        return row.split(self._widths(), dim=-1)


class _Model:
    """A module with the answer's hooks: one unit, or two, of which one is its last layer."""

    def __init__(self, answer: Callable[..., Any], module: nn.Module, nested: bool = False) -> None:
        self.module, self.params = module, list(module.parameters())
        inner = list(module.get_submodule("last").parameters()) if nested else []
        outer = [param for param in self.params if not any(param is each for each in inner)]
        self.units = [_Unit(params) for params in (outer, inner) if params]
        modules = [module, module.get_submodule("last")] if nested else [module]
        self.hooks = [answer(*pair) for pair in zip(modules, self.units, strict=True)]
        pairs = [pair for unit in self.units for pair in zip(unit.params, unit.shards, strict=True)]
        shard_of = dict(pairs)
        self.shards = [shard_of[param] for param in self.params]

    @property
    def is_whole(self) -> bool:
        """Return whether a unit is gathered."""
        return any(unit.is_whole for unit in self.units)


@dataclass
class UnitPass:
    """Forward and backward on one rank; in evaluation there is no backward."""

    out: Any
    x_grad: Any
    grads: Any  # of the shards, in order
    forward: list[Event]
    backward: list[Event]
    unwaited: list[str]
    whole_between: bool
    whole_after: bool
    with_grad: int = 0  # parameters that still have one
    alive_bytes: int = 0
    grad_bytes: int = 0  # that the gradients of the shards keep alive
    beside_sent: bool = True  # the object beside has gradients, too


def passes(
    rank: int,
    answer: Callable[..., Any],
    kind: str,
    beside: bool = False,
    nested: bool = False,
    twice: bool = False,
) -> dict[str, UnitPass]:
    """Run three passes that train and one that does not; another unit may be alive beside.

    `twice`: run two forwards, then two backwards.
    """
    with telling(BESIDE if beside else kind), only_new():
        model, found = _Model(answer, MODULES[kind](), nested), dict[str, UnitPass]()
        other = _Model(answer, TiedModel()) if beside else None
        if twice:
            with telling("pass 2 after two forwards"):
                return {"two forwards, two backwards": _pass(rank, model, (0, 1), None, found)}
        for number in range(len(ROUNDS)):
            if number == 2:
                for shard in model.shards:
                    shard.data.add_(STEP)
                    shard.grad = None
            with telling(label := f"pass {number + 1}"):
                found[label] = _pass(rank, model, (number,), other, found)
        with torch.no_grad(), record() as log, unwaited_calls() as unwaited:
            out = model.module(batch(rank, 2)[0])
        calls, waits = calls_of(log.events), list(unwaited.values())
        found[EVALUATION] = UnitPass(out, None, [], calls, [], waits, model.is_whole, False)
    return found


def _pass(
    rank: int,
    model: _Model,
    numbers: Sequence[int],
    between: _Model | None,
    before: dict[str, UnitPass],
) -> UnitPass:
    """Run a forward for each of these batches, then their backwards; tell the last one's."""
    batches = [batch(rank, number) for number in numbers]
    with unwaited_calls() as unwaited:
        with record() as forward:
            outs = [model.module(x.requires_grad_()) for x, _ in batches]
        whole_between, result = model.is_whole, outs[-1].detach().clone()
        if between is not None:
            between.module(batches[0][0].detach()).sum().backward()
        with record() as backward:
            for out, (_, above) in zip(outs, batches, strict=True):
                out.backward(above[:, : out.shape[1]])
    grads, x = [shard.grad for shard in model.shards], batches[-1][0]
    seen = UnitPass(
        result, x.grad, copied(grads), calls_of(forward.events), calls_of(backward.events),
        list(unwaited.values()), whole_between, model.is_whole,
        with_grad=sum(param.grad is not None for param in model.params),
        grad_bytes=_storage_bytes(grads),
        beside_sent=all(s.grad is not None for s in between.shards) if between else True,
    )  # fmt: skip
    if not seen.with_grad and between is None:
        own = [*outs, result, *model.params, *model.shards, *grads, *seen.grads]
        own += [t for x, above in batches for t in (x, above, x.grad)]
        for one in before.values():
            own += [one.out, one.x_grad, *one.grads]
        seen.alive_bytes = alive_bytes(*[t for t in own if isinstance(t, Tensor)], enough=0)
    return seen


def _storage_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Return the bytes that these tensors keep alive, which may be more than their own."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True)
class WholePasses:
    """What each rank gets from the whole module, computed in one process."""

    outs: list[Tensor]
    x_grads: list[Tensor]
    grads: list[list[Tensor]]  # by rank, of the whole parameters


@cache
def whole_passes(kind: str, number: int, p: int) -> WholePasses:
    """Return the right numbers of all ranks in a pass."""
    whole = WholePasses([], [], [])
    for rank in range(p):
        module, (x, above) = MODULES[kind](), batch(rank, number)
        with torch.no_grad():
            for param in module.parameters():
                param.add_(STEP if number == 2 else 0)
        out = module(x.requires_grad_())
        out.backward(above[:, : out.shape[1]])
        whole.outs.append(out.detach())
        whole.x_grads.append(copied(x.grad))
        whole.grads.append([copied(param.grad) for param in module.parameters()])
    return whole
