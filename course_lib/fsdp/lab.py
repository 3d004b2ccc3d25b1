"""Measure FSDP: its bytes on a rank over time, and the seconds of its steps on an emulated link.

`resident_over_time` reads the storages after every gather, free, copy and reduction, to compare
them with `cost.fsdp_ledger`; `one_step` records a whole step so. `measure_fsdp` times steps of
layers that sleep, to compare them with `cost.fsdp_step`. Notebook 10_fsdp.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.records import COMMUNICATION_KINDS, Event, Ledger
from course_lib.core.specs import ModelSpec
from course_lib.fsdp.cost import UnitTimes
from course_lib.fsdp.fsdp import FSDP
from course_lib.fsdp.moves import UnitSizes
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.models import GPT, token_loss
from course_lib.models.emulated import EmulatedLayer
from course_lib.models.storages import storage_bytes
from course_lib.ranks import Ranks, record
from course_lib.ranks.timing import Measured, measured_of, record_interleaved

CHANGES = (
    *("start_gather", "copy_out", "wait_gather", "keep_part", "free"),
    *("collect", "drop_grads", "start_reduce", "wait_reduce", "finish_reduce"),
)


@contextmanager
def resident_over_time(
    model: FSDP, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Ledger]:
    """Record this rank's bytes whenever they change: `with resident_over_time(model) as ledger:`.

    params   bytes of the shards, of gathered parameters and of their all_gather
    grads    of the parameters, in a reduce_scatter, kept by no_sync, and of the shards
    """
    ledger, start_s = Ledger(dist.get_rank()), time.perf_counter()

    def note() -> None:
        state = optimizer.state.values() if optimizer else ()
        ledger.add(
            time.perf_counter() - start_s,
            params=sum(_param_bytes(param_group) for param_group in model.param_groups),
            grads=sum(_grad_bytes(param_group) for param_group in model.param_groups),
            optim_state=storage_bytes(value for kept in state for value in kept.values()),
        )

    with ExitStack() as stack:
        for param_group in model.param_groups:
            for name in CHANGES:
                vars(param_group)[name] = partial(_then, getattr(param_group, name), note)
                stack.callback(vars(param_group).pop, name)
        if optimizer is not None:
            stack.callback(optimizer.register_step_post_hook(lambda *_: note()).remove)
        note()
        yield ledger
        note()


def one_step(
    rank: int,
    spec: ModelSpec,
    batch: tuple[Tensor, Tensor],
    num_micro_batches: int = 1,
    sync: bool = True,
    **options: Any,
) -> tuple[Ledger, list[Event], UnitSizes]:
    """On a rank: train a GPT under FSDP(**options); return the second step, recorded.

    Its bytes over time, its messages, and the sizes of the units. (The first step learns the order
    of the units.) This rank has every p-th sequence of the batch, in each micro-batch.

    sync   whether every backward reduces the gradients, or only the last
    """
    model, p = FSDP(GPT(spec), **options), dist.get_world_size()
    for _ in range(2):
        model.zero_grad()
        with resident_over_time(model) as ledger, record() as log:
            for n in range(num_micro_batches):
                last = n == num_micro_batches - 1
                with nullcontext() if sync or last else model.no_sync():
                    loss = token_loss(model(batch[0][rank::p]), batch[1][rank::p])
                    (loss / num_micro_batches).backward()
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    return ledger, calls, sizes_of(model)


def sizes_of(model: FSDP) -> UnitSizes:
    """Return the sizes of a model whose units have parameters of one dtype, all trained."""
    groups = [unit.param_group for unit in model.units]
    first = model.param_groups[0]
    return UnitSizes(
        numels=tuple(sum(one.numel for one in group.layouts) if group else 0 for group in groups),
        slots=tuple(
            sum(one.slot_numel for one in group.layouts) if group else 0 for group in groups
        ),
        p=first.member.size,
        param_bytes=first.shards[0].element_size(),
        compute_bytes=first.params[0].element_size(),
        reduce_bytes=first.reduce_dtype.itemsize,
        replicas=first.groups.replicas.size if first.groups.replicas else 1,
    )


class EmulatedModel(nn.Module):
    """A list of layers that sleep for given seconds instead of computing."""

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
    """Return the seconds that the layers were given."""
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

    Runs are interleaved, so that other load on the machine affects all of them alike. Two steps
    before the measured ones are not counted: the first one records the order of the units.
    """
    by_rank = ranks.run(_record_steps, build, loss_of, dict(runs), turns)
    return {name: measured_of([found[name] for found in by_rank]) for name in runs}


def ring_sum_error_percent(p: int, numel: int = 4096, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return how far a sum of p ranks is off if each hop of a ring rounds it to a dtype.

    The ranks' numbers are random and normal, rounded to the dtype first; the error is the length of
    the difference to the sum in float64, relative to that sum.
    """
    numbers = torch.randn(p, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, total = numbers.double().sum(0), numbers[0]
    for one in numbers[1:]:
        total = total + one
    return 100 * ((total.double() - exact).norm() / exact.norm()).item()


def _record_steps(
    rank: int,
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    runs: Mapping[Any, Mapping[str, Any]],
    turns: int,
) -> dict[Any, list[Any]]:
    """On a rank: return the events of each turn of each run."""
    models = {name: FSDP(build(), **options) for name, options in runs.items()}
    return record_interleaved(rank, models, loss_of, turns, ahead=2)


def _then(do: Callable[[], None], note: Callable[[], None]) -> None:
    do()
    note()


def _param_bytes(group: FSDPParamGroup) -> int:
    return storage_bytes([*group.shards, group.whole, group.gathered, group.kept_part])


def _grad_bytes(group: FSDPParamGroup) -> int:
    own = [param.grad for param in (*group.params, *group.shards)]
    return storage_bytes([*own, *group.kept_grads.values(), group.flat_grad, group.reduced])
