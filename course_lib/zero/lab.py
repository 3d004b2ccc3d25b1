"""Measure ZeRO on a rank: the bytes of its state, over a step too, and what a step communicates.

Notebook 09_zero.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from course_lib.core.records import COMMUNICATION_KINDS, Event, Ledger
from course_lib.cost import published
from course_lib.models.storages import storage_bytes
from course_lib.ranks import record
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.sharded_optimizer import ShardedOptimizer
from course_lib.zero.zero import ZeRO1, ZeRO2

TABLE_1_SOURCE = "Rajbhandari et al. 2020 (ZeRO), Table 1"
# GB per device for 7.5 billion parameters, by stage, on 1, 4, 16, 64, 256 and 1024 ranks
TABLE_1_GB = {
    zero: tuple(
        float(row["value_GB_per_device_or_max_params"])
        for row in published.rows("zero_table1")
        if (row["model"], row["zero_stage"]) == ("7.5B", str(zero))
    )
    for zero in (1, 2, 3)
}
# peak GiB of a rank by ZeRO stage and number of H100 GPUs, all of them data parallel; 16 layers of
# width 2048, 131,072 words, tied: 1,342,177,280 parameters; 256 sequences of 4096 tokens per step
H100_NUM_PARAMS = 1_342_177_280
H100_PEAK_GIB = {
    0: {8: 36.7, 16: 36.7, 32: 36.7, 64: 36.7, 128: 36.7, 256: 36.6},
    1: {8: 24.2, 16: 24.0, 32: 23.8, 64: 23.8, 128: 23.7, 256: 21.7},
}
H100_SOURCE = (
    "Tazi et al. 2025, The Ultra-Scale Playbook, benchmark runs: data parallelism, 1.3 billion "
    "parameters, micro-batches of one sequence of 4096 tokens"
)

CHANGES = (  # the methods of a flat parameter after which a rank may own other bytes
    *("gather", "free", "_open_buffer", "accumulate"),
    *("launch_reduce_scatter", "wait_reduce_scatter"),
    *("copy_grads_to_masters", "copy_masters_to_params", "clear_grads"),
)


def owned_bytes(engine: ZeRO1) -> dict[str, int]:
    """Return this rank's bytes of parameters, gradients and optimizer state, each storage once."""
    seen: set[int] = set()
    flat_params, params = engine.all_flat_params, [*engine.module.parameters()]
    weights = [
        tensor for flat_param in flat_params for tensor in (flat_param.flat, flat_param.shard)
    ]
    grads = [param.grad for param in params]
    for flat_param in flat_params:
        pending = flat_param.pending
        in_flight = [pending.input, pending.output] if pending else []
        grads += [flat_param.grad_shard, flat_param.buffer, *in_flight]
    state = [flat_param.master for flat_param in engine.flat_params]
    for values in engine.optimizer.inner.state.values():
        state += [value for value in values.values() if value.dim()]  # Adam's counter is a number
    return {
        "params": storage_bytes([*params, *weights], seen),
        "grads": storage_bytes(grads, seen),
        "optim_state": storage_bytes(state, seen),
    }


@contextmanager
def owned_over_time(engine: ZeRO1) -> Iterator[Ledger]:
    """Record what this rank owns whenever it changes: `with owned_over_time(engine) as ledger:`."""
    ledger, start_s = Ledger(dist.get_rank()), time.perf_counter()

    def note(*_: Any) -> None:
        ledger.add(time.perf_counter() - start_s, **owned_bytes(engine))

    with ExitStack() as stack:
        for name in CHANGES:
            stack.enter_context(
                patch.object(FlatParam, name, _then(getattr(FlatParam, name), note))
            )
        for param in engine.module.parameters():
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(note)
                stack.callback(hook.remove)
        note()
        yield ledger
        note()


def owned_after_backward(engine: ZeRO1, loss: Callable[[], Tensor]) -> dict[str, int]:
    """Return what a rank owns after a backward pass whose reduce-scatters are complete.

    A step is made before, because the first one allocates the optimizer's moments.
    """
    loss().backward()
    engine.step()
    engine.zero_grad()
    loss().backward()
    if isinstance(engine, ZeRO2):
        engine.finish()
    return owned_bytes(engine)


def moment_bytes(optimizer: Any) -> int:
    """Return this rank's bytes of an optimizer's state (ours or PyTorch's), without counters."""
    own = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer.optim
    state = [value for kept in own.state.values() for value in kept.values()]
    return storage_bytes(value for value in state if value.dim())


def _then(method: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    """Return the method followed by a note."""

    def noting(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        note()
        return result

    return noting


def step_calls(engine: ZeRO1, losses: Iterable[Callable[[], Tensor]]) -> list[Event]:
    """Take one step, with a backward for each loss; return the collectives that this rank called.

    `cost.zero_traffic` predicts them.
    """
    with record() as log:
        for loss in losses:
            loss().backward()
        engine.step()
    return [event for event in log.events if event.kind in COMMUNICATION_KINDS]
