"""Watching ZeRO at work: what a rank owns, now and at every moment of a step; DeepSpeed beside it.

Notebook 09_zero.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.models import GPT, token_loss
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.sharded_optimizer import ShardedOptimizer
from course_lib.zero.zero import ZeRO1, ZeRO2, ZeRO3

if TYPE_CHECKING:
    from course_lib.frameworks import Engine

# Rajbhandari et al. 2020 (ZeRO), Table 1: GB a device for 7.5 billion parameters, by stage, on 1,
# 4, 16, 64, 256 and 1024 ranks
TABLE_1_GB = {
    1: (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    2: (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    3: (120, 30, 7.5, 1.88, 0.47, 0.12),
}

MOMENTS = (
    "gather",
    "free",
    "take",
    "send",
    "settle",
    "copy_grads_to_masters",
    "copy_masters_to_params",
    "clear_grads",
)


def owned_bytes(engine: ZeRO1) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank, each storage once."""
    seen: set[int] = set()
    flat_params, params = engine.all_flat_params, [*engine.module.parameters()]
    weights = [
        tensor for flat_param in flat_params for tensor in (flat_param.flat, flat_param.shard)
    ]
    grads = [param.grad for param in params]
    for flat_param in flat_params:
        under_way = (
            [flat_param.sending.leaving, flat_param.sending.arriving] if flat_param.sending else []
        )
        grads += [flat_param.grad_shard, flat_param.buffer, *under_way]
    state = [flat_param.master for flat_param in engine.flat_params]
    for values in engine.optimizer.inner.state.values():
        state += [value for value in values.values() if value.dim()]  # Adam's counter is a number
    return {
        "params": _bytes([*params, *weights], seen),
        "grads": _bytes(grads, seen),
        "optim_state": _bytes(state, seen),
    }


@contextmanager
def owned_over_time(engine: ZeRO1) -> Iterator[Ledger]:
    """Note what this rank owns whenever it changes: with owned_over_time(engine) as ledger: ..."""
    ledger, start_s = Ledger(dist.get_rank()), time.perf_counter()

    def note(*_: Any) -> None:
        ledger.add(time.perf_counter() - start_s, **owned_bytes(engine))

    with ExitStack() as stack:
        for name in MOMENTS:
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
    """What a rank owns when a backward pass has ended and its last gradients have arrived.

    A step goes ahead, because it makes the optimizer's moments.
    """
    loss().backward()
    engine.step()
    engine.zero_grad()
    loss().backward()
    if isinstance(engine, ZeRO2):
        engine.finish()
    return owned_bytes(engine)


def moment_bytes(optimizer: Any) -> int:
    """Bytes of the state on this rank, without what counts steps; ours or PyTorch's."""
    own = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer.optim
    state = [value for kept in own.state.values() for value in kept.values()]
    return _bytes([value for value in state if value.dim()], set())


def some_steps(
    rank: int, spec: ModelSpec, batch: tuple[Tensor, Tensor], zero: int, is_ours: bool
) -> tuple[float, float, float]:
    """On a rank: the third loss, the median ms of three steps, KiB of tensors that are alive.

    Raises: CourseError where DeepSpeed is asked for and not installed
    """
    from course_lib.frameworks import alive_bytes, deepspeed_engine  # slow to import

    before, adam = alive_bytes(), partial(torch.optim.AdamW, lr=1e-3)
    torch.manual_seed(0)
    model = GPT(spec)
    p, (inputs, targets) = dist.get_world_size(), batch
    engine = (
        _ours(model, zero)
        if is_ours
        else deepspeed_engine(model, adam, stage=zero, reduce_bucket_size=2**14)
    )
    times_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        loss = engine.step(token_loss(engine.model(inputs[rank::p]), targets[rank::p]))
        times_s.append(time.perf_counter() - start_s)
    return loss, median(times_s) * 1e3, (alive_bytes() - before) / 2**10


def _ours(model: GPT, zero: int) -> "Engine":
    """Our engine of a stage behind the handle of the frameworks."""
    from course_lib.frameworks import Engine

    stage = (ZeRO1, ZeRO2, ZeRO3)[zero - 1]
    engine = stage(model, torch.optim.AdamW, lr=1e-3, bucket_bytes=2**16)

    def update() -> None:
        engine.step()
        engine.zero_grad()

    return Engine(
        name=stage.__name__,
        model=engine,  # type: ignore[arg-type]
        backward=Tensor.backward,
        update=update,
        weights=lambda: engine.full_state_dict()["model"],
    )


def _then(method: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    """The method, and a note after it."""

    def noting(*args: Any) -> Any:
        result = method(*args)
        note()
        return result

    return noting


def _bytes(tensors: Iterable[Tensor | None], seen: set[int]) -> int:
    """Bytes of the storages that have not been seen yet."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    new = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in seen}
    seen.update(new)
    return sum(new.values())
