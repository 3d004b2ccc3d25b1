"""The steps that the check of exercise 4 of 06_ddp runs and observes on each rank."""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import Bag, come_late, copied_grads, count_hooks, modes_of
from course_lib.checks.on_ranks import calls_of
from course_lib.core import Event
from course_lib.ddp.ddp import DDP
from course_lib.ranks import record

SIZES, LIMIT, BUCKET_BYTES = (4, 2, 2, 1, 4), 40, (40, 16, 32)
COUNTS, ITEMS = (4, 2, 1, 3), (2, 1, 3, 1)  # micro-batches, and how many items each one has
AGAIN, INFINITE = "3 micro-batches, the same model again", "rank 0's first x is inf"


@dataclass
class Step:
    """The accumulation of `count` micro-batches on one rank.

    `forwards` and `backwards` tell of each whether DDP would have synchronized; `most_alive` is
    how many micro-batches' graphs or outputs there were at once. `changed` says what in the
    batch is no longer as it was, `hooks` counts those that stayed on the model, and `unfinished`
    the buckets that are still in flight.
    """

    count: int
    grads: list[Any]
    calls: list[Event]
    frozen_grad: bool
    unfrozen: bool
    modes_after: bool
    syncs_after: bool
    changed: list[str]
    random_changed: bool
    hooks: int
    unfinished: int
    backward_end_s: float = 0.0
    most_alive: int = 0
    bypassed: int = 0
    other_modes: int = 0
    forwards: list[bool] = field(default_factory=list)
    backwards: list[bool] = field(default_factory=list)


def runs_of(_p: int) -> list[Mapping[str, Any]]:
    """Use one model several times only once single steps are right."""
    return [{"same_model": False}, {"same_model": True}]


def accumulate_on_rank(rank: int, answer: Callable[..., Any], same_model: bool) -> dict[str, Step]:
    """Return the result and the traffic of the answer for each number of micro-batches."""
    if same_model:
        model = _model()
        return {
            "2 micro-batches": _step(rank, answer, model, 2),
            AGAIN: _step(rank, answer, model, 3),
            INFINITE: _step(rank, answer, model, 2, first_x=float("inf") if rank == 0 else None),
        }
    steps: dict[str, Step] = {}
    for count in COUNTS:
        if not steps:
            come_late(rank)
        label = f"{count} micro-batch{'es' if count > 1 else ''}"
        steps[label] = _step(rank, answer, _model(), count)
    return steps


def _model() -> DDP:
    """Return a model in train mode, of which one part is in eval mode."""
    module = Bag(SIZES)
    module.weights.eval()
    return DDP(module, bucket_bytes=LIMIT)


def _step(
    rank: int, answer: Callable[..., Any], model: DDP, count: int, first_x: float | None = None
) -> Step:
    module: Any = model.module
    module.zero_grad()
    batch, fresh = (_micro_batches(rank, count, first_x) for _ in range(2))
    given, modes, hooks = list(batch), modes_of(model), count_hooks(model)
    random_state = torch.get_rng_state()
    with record() as log, _watched(model) as seen:
        answer(model, lambda output, y: (output * y).mean(), batch)
    frozen = module.weights[1]
    return Step(
        count,
        copied_grads(module),
        [call for call in calls_of(log.events) if call.kind != "broadcast"],
        frozen.grad is not None,
        frozen.requires_grad,
        modes_of(model) == modes,
        model._syncs,
        _changed(batch, given, fresh),
        not random_state.equal(torch.get_rng_state()),
        count_hooks(model) - hooks,
        len(model._works),
        **seen,
    )


def _micro_batches(
    rank: int, count: int, first_x: float | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of which the k-th has the gradient (k + 1) * 10**rank."""
    ones = [torch.ones(ITEMS[k]).double() for k in range(count)]
    batch = [(one * 10.0**rank, one * (k + 1)) for k, one in enumerate(ones)]
    if first_x is not None:
        batch[0][0].fill_(first_x)
    return batch


def _changed(batch: list[Any], given: list[Any], fresh: list[Any]) -> list[str]:
    """Say what has changed in the batch: the list, or a tensor in it."""
    if list(map(id, batch)) != list(map(id, given)):
        return ["the list of micro-batches has changed"]
    return [
        f"{name} of micro-batch {i} {'now requires a gradient' if asks else 'has changed'}"
        for i, (pair, old_pair) in enumerate(zip(given, fresh, strict=True))
        for name, now, old in zip("xy", pair, old_pair, strict=True)
        if (asks := now.requires_grad) or not torch.equal(now, old)
    ]


class _Saved:
    """Tensor that a graph saves for backward: as long as it is there, so is the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, Any]]:
    """Yield what the forwards and backwards of a model tell, under the names in `Step`."""
    seen: dict[str, Any] = {"forwards": [], "backwards": [], "bypassed": 0, "other_modes": 0}
    seen |= {"backward_end_s": 0.0, "most_alive": 0}
    saved, outputs, modes = list[tuple[int, Any]](), list[Any](), modes_of(model)

    def save(tensor: Tensor) -> _Saved:
        kept = _Saved(tensor)
        saved.append((seen["bypassed"], weakref.ref(kept)))
        return kept

    def begin(_module: Any, _inputs: Any) -> None:
        seen["bypassed"] += 1
        seen["other_modes"] += modes_of(model) != modes
        graphs = {number for number, kept in saved if kept() is not None}
        alive = sum(output() is not None for output in outputs)  # one may have a name still
        seen["most_alive"] = max(seen["most_alive"], 1 + len(graphs), alive)

    def enter(model: Any, _inputs: Any) -> None:
        seen["forwards"].append(model._syncs)

    def leave(_module: Any, _inputs: Any, output: Tensor) -> None:
        outputs.append(weakref.ref(output))

    def end(_param: Tensor) -> None:
        seen["backward_end_s"] = time.perf_counter()
        seen["backwards"].append(model._syncs)

    hooks = [
        model.module.register_forward_pre_hook(begin),
        model.module.register_forward_hook(leave),
        model.register_forward_pre_hook(enter),
        model.module.weights[0].register_post_accumulate_grad_hook(end),
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept.tensor):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()
        seen["bypassed"] -= len(seen["forwards"])
