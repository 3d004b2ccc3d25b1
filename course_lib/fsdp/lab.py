"""Watching FSDP at work: the bytes it holds at every moment, and steps on an emulated wire.

`resident_over_time` reads the storages themselves whenever something was gathered, freed, copied or
reduced, to hold them against `cost.fsdp_plan`. `measure_fsdp` times steps of layers that sleep, to
hold them against `cost.fsdp_overlap`. Notebook 10_fsdp.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.records import Event, Ledger
from course_lib.fsdp.cost import UnitSizes, UnitTimes
from course_lib.fsdp.fsdp import FSDP
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.models.emulated import EmulatedLayer
from course_lib.ranks import Ranks
from course_lib.ranks.timing import Measured, record_interleaved

MOMENTS = ("start_gather", "free", "collect", "drop_grads", "start_reduce", "wait_reduce")


@contextmanager
def resident_over_time(
    model: FSDP, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Ledger]:
    """Note what this rank holds whenever it changes: with resident_over_time(model) as ledger: ...

    params   bytes of the shards and of what is gathered
    grads    those of the parameters, in param_groups on their way, kept by no_sync, and of the shards
    """
    ledger, start_s = Ledger(dist.get_rank()), time.perf_counter()

    def note() -> None:
        state = optimizer.state.values() if optimizer else ()
        ledger.add(
            time.perf_counter() - start_s,
            params=sum(_param_bytes(param_group) for param_group in model.param_groups),
            grads=sum(_grad_bytes(param_group) for param_group in model.param_groups),
            optim_state=_bytes(value for kept in state for value in kept.values()),
        )

    with ExitStack() as stack:
        for param_group in model.param_groups:
            for name in MOMENTS:
                vars(param_group)[name] = partial(_then, getattr(param_group, name), note)
                stack.callback(vars(param_group).pop, name)
        if optimizer is not None:
            stack.callback(optimizer.register_step_post_hook(lambda *_: note()).remove)
        note()
        yield ledger
        note()


def sizes_of(model: FSDP) -> UnitSizes:
    """What `cost.fsdp_plan` has to know of a model whose units have a param_group each."""
    param_groups = {id(unit): unit.param_groups[0] for unit in model.units if unit.param_groups}
    first = model.param_groups[0]
    numels = [
        param_groups[id(unit)].layout.numel if unit.param_groups else 0 for unit in model.units
    ]
    return UnitSizes(
        numels=tuple(numels),
        p=first.member.size,
        param_bytes=first.shard.element_size(),
        compute_bytes=first.whole.element_size(),
        reduce_bytes=first.reduce_dtype.itemsize,
    )


class EmulatedModel(nn.Module):
    """A list of layers that take given seconds each, without a processor."""

    def __init__(
        self,
        num_layers: int = 6,
        layer_bytes: int = 2**18,
        forward_s: float = 0.01,
        backward_s: float = 0.02,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            EmulatedLayer(layer_bytes, forward_s, backward_s) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def emulated_times(model: EmulatedModel) -> UnitTimes:
    """The seconds that the layers have been given."""
    forward_s, backward_s = zip(*(block.seconds for block in model.blocks), strict=True)
    return UnitTimes(forward_s=forward_s, backward_s=backward_s)


def measure_fsdp(
    ranks: Ranks,
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    runs: Mapping[Any, Mapping[str, Any]],
    turns: int = 5,
) -> dict[Any, Measured]:
    """Time steps of FSDP(build(), **options), for each name and options of `runs`.

    Runs take turns, so that whatever else the machine does falls on all of them. Two steps go
    ahead of those that count: the first one learns the order of the units.
    """
    by_rank = ranks.run(_record_steps, build, loss_of, dict(runs), turns)
    return {name: measured_of([found[name] for found in by_rank]) for name in runs}


def _record_steps(
    rank: int,
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    runs: Mapping[Any, Mapping[str, Any]],
    turns: int,
) -> dict[Any, list[Any]]:
    """On a rank: the events of each turn of each run."""
    models = {name: FSDP(build(), **options) for name, options in runs.items()}
    return record_interleaved(rank, models, loss_of, turns, ahead=2)


def measured_of(by_rank: Sequence[Sequence[list[Event]]]) -> Measured:
    """All turns' seconds, and all ranks' events of the median turn, from 0 s on."""
    turns = [list(chain.from_iterable(events)) for events in zip(*by_rank, strict=True)]
    events = sorted(turns, key=_step_s)[len(turns) // 2]
    zero_s = min(event.start_s for event in events)
    shifted = [
        replace(event, start_s=event.start_s - zero_s, end_s=event.end_s - zero_s)
        for event in sorted(events, key=lambda event: event.start_s)
    ]
    return Measured(tuple(map(_step_s, turns)), shifted)


def _step_s(events: Sequence[Event]) -> float:
    """From when the last rank has begun until the last one has ended."""
    began_s = max(event.start_s for event in events if event.kind == "forward")
    return max(event.end_s for event in events if event.kind == "optimizer") - began_s


def _then(do: Callable[[], None], note: Callable[[], None]) -> None:
    do()
    note()


def _param_bytes(param_group: FSDPParamGroup) -> int:
    return _bytes([param_group.shard, param_group.whole])


def _grad_bytes(param_group: FSDPParamGroup) -> int:
    sent = param_group.reducing[1] if param_group.reducing else None
    own = [param.grad for param in param_group.params]
    return _bytes(
        [*own, param_group.flat_grad, param_group.kept_grad, sent, param_group.shard.grad]
    )


def _bytes(tensors: Any) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
