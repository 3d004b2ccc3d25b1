"""Run fsdp-2 on a rank: forward and backward, three times, and once without autograd.

The unit that the answer gets does not give its memory back when it is freed: it fills it with NaN,
so that whoever computes with it is noticed.
"""

from collections.abc import Callable, Sequence
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

    def __init__(self, module: nn.Module) -> None:
        self.params, self.p = list(module.parameters()), dist.get_world_size()
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


def passes(
    rank: int, answer: Callable[..., Any], kind: str, beside: bool = False
) -> dict[str, UnitPass]:
    """Run three passes that train and one that does not; another unit may be alive beside."""
    with telling(BESIDE if beside else kind), only_new():
        module = MODULES[kind]()
        unit = _Unit(module)
        hooks, found = [answer(module, unit)], dict[str, UnitPass]()
        other = TiedModel() if beside else None
        if other is not None:
            hooks.append(answer(other, _Unit(other)))
        for number in range(len(ROUNDS)):
            if number == 2:
                for shard in unit.shards:
                    shard.data.add_(STEP)
                    shard.grad = None
            with telling(label := f"pass {number + 1}"):
                found[label] = _pass(rank, module, unit, number, other, found)
        with torch.no_grad(), record() as log, unwaited_calls() as unwaited:
            out = module(batch(rank, 2)[0])
        calls, waits = calls_of(log.events), list(unwaited.values())
        found[EVALUATION] = UnitPass(out, None, [], calls, [], waits, unit.is_whole, False)
        del hooks
    return found


def _pass(
    rank: int,
    module: nn.Module,
    unit: _Unit,
    number: int,
    between: nn.Module | None,
    before: dict[str, UnitPass],
) -> UnitPass:
    x, above = batch(rank, number)
    with unwaited_calls() as unwaited:
        with record() as forward:
            out = module(x.requires_grad_())
        whole_between, result = unit.is_whole, out.detach().clone()
        if between is not None:
            between(x.detach()).sum().backward()
        with record() as backward:
            out.backward(above[:, : out.shape[1]])
    grads = [shard.grad for shard in unit.shards]
    seen = UnitPass(
        result, x.grad, copied(grads), calls_of(forward.events), calls_of(backward.events),
        list(unwaited.values()), whole_between, unit.is_whole,
        with_grad=sum(param.grad is not None for param in unit.params),
    )  # fmt: skip
    if not seen.with_grad and between is None:
        own = [x, above, out, result, x.grad, *unit.params, *unit.shards, *grads, *seen.grads]
        for one in before.values():
            own += [one.out, one.x_grad, *one.grads]
        seen.alive_bytes = alive_bytes(*[t for t in own if isinstance(t, Tensor)], enough=0)
    return seen


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
