"""Exercise 4 of 06_ddp: micro-batches with one synchronization."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import (
    ROUNDING,
    Bag,
    come_late,
    copied_grads,
    digits,
    one_a_bucket,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
from course_lib.ddp.ddp import DDP
from course_lib.ranks import record

Loss = Callable[[Tensor, Tensor], Tensor]
MicroBatches = Sequence[tuple[Tensor, Tensor]]
SIZES, LIMIT, BUCKET_BYTES = (4, 2, 2, 1, 4), 40, (40, 16, 32)
COUNTS, ITEMS = (4, 2, 1, 3), (2, 1, 3, 1)  # micro-batches, and how many items each one has

ONCE = Cause(
    "Only the last backward may send: put all the others inside `with model.no_sync():`, and call "
    "finish() once, after the last one."
)
LOST = Cause(
    "The ranks were never brought together: the last backward belongs outside of no_sync(), and "
    "model.finish() after it."
)
ALIVE = Cause(
    "No memory is saved (lesson 02): forward and backward for one micro-batch, then for the next."
)
CLEARED = Cause("Only one micro-batch is in it: who cleared the others?")
SOME_OWN = Cause(
    "Some micro-batches are this rank's own only. Only the last backward may send, and it sends "
    "what all of them have left in param.grad."
)
ONE_NOT_DIVIDED = Cause(
    "All ranks are in it; but each loss has to be divided by the number of micro-batches."
)
WEIGHTED = Cause(
    "A micro-batch with more items weighs more: the mean over micro-batches counts each one once."
)
FROZEN = Cause("A frozen parameter got a gradient: leave requires_grad as it is.")
BYPASSED = Cause(
    "Call model(x): model.module(x) goes past DDP, which sends the buffers before a forward."
)
FORWARD_OUTSIDE = Cause(
    "The forward belongs into no_sync(), too: outside of it, ours sends the buffers, and PyTorch's "
    "the gradients."
)
LAST_INSIDE = Cause(
    "The last forward belongs outside of no_sync(), like its backward: it notes that buffers have "
    "to be sent in the next step."
)
MODE = Cause("eval() switches dropout and BatchNorm off: leave the mode as it is.")
STAYS_ON = Cause("Use no_sync() in a `with` block: it ends with the block.")
SUMMED = Cause("Summed over the micro-batches, not averaged: divide each loss.")
BY_RANKS = Cause("Divided by the number of ranks once more: finish() has done that.")
TWICE = Cause("Divided by the number of micro-batches twice.")
NO_OVERLAP = Cause("No overlap: call the last backward outside of no_sync().")


@dataclass
class Step:
    """The accumulation of `count` micro-batches on one rank.

    `forwards` and `backwards` tell of each whether DDP would have synchronized; `most_alive` is
    how many micro-batches' graphs or outputs there were at once.
    """

    count: int
    grads: list[Any]
    calls: list[Event]
    frozen_changed: bool
    training_after: bool
    syncs_after: bool
    backward_end_s: float = 0.0
    most_alive: int = 0
    bypassed: int = 0
    in_eval: int = 0
    forwards: list[bool] = field(default_factory=list)
    backwards: list[bool] = field(default_factory=list)


def _accumulate(rank: int, answer: Callable[..., Any]) -> dict[str, Step]:
    """Return the result and the traffic of the answer for each number of micro-batches."""
    steps: dict[str, Step] = {}
    for count in COUNTS:
        module = Bag(SIZES)
        model = DDP(module, bucket_bytes=LIMIT)
        with record() as log, _watched(model) as seen:
            if not steps:
                come_late(rank)
            answer(model, lambda output, y: (output * y).mean(), _micro_batches(rank, count))
        frozen = module.weights[1]
        steps[f"{count} micro-batch{'es' if count > 1 else ''}"] = Step(
            count,
            copied_grads(module),
            [call for call in calls_of(log.events) if call.kind != "broadcast"],
            frozen.requires_grad or frozen.grad is not None,
            model.training,
            model._syncs,
            **seen,
        )
    return steps


class _Saved:
    """Tensor that a graph saves for backward: as long as it is there, so is the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, Any]]:
    """Yield what the forwards and backwards of a model tell, under the names in `Step`."""
    seen: dict[str, Any] = {"forwards": [], "backwards": [], "bypassed": 0, "in_eval": 0}
    seen |= {"backward_end_s": 0.0, "most_alive": 0}
    saved, outputs = list[tuple[int, Any]](), list[Any]()

    def save(tensor: Tensor) -> _Saved:
        kept = _Saved(tensor)
        saved.append((seen["bypassed"], weakref.ref(kept)))
        return kept

    def begin(module: Any, _inputs: Any) -> None:
        seen["bypassed"] += 1
        seen["in_eval"] += not module.training
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


def _micro_batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of which the k-th has the gradient (k + 1) * 10**rank."""
    ones = [torch.ones(ITEMS[k]).double() for k in range(count)]
    return [(one * 10.0**rank, one * (k + 1)) for k, one in enumerate(ones)]


def _times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    module = Bag(SIZES)
    return lambda at: [module.slope(i) * factor(at) for i in module.trained]


def _total(at: At) -> float:
    """Return the mean over the ranks of the sum over the micro-batches."""
    return digits(at.world_size) / at.world_size * sum(range(1, at.seen.count + 1))


def _mean(at: At) -> float:
    return _total(at) / at.seen.count


def _weighted(at: At) -> float:
    """Return the mean over all items."""
    items = ITEMS[: at.seen.count]
    total = sum(n * (k + 1) for k, n in enumerate(items)) / sum(items)
    return digits(at.world_size) / at.world_size * total


def _own(at: At) -> float:
    return 10.0**at.rank * sum(range(1, at.seen.count + 1)) / at.seen.count


def _one_only(at: At, got: Tensor, item: int) -> bool:
    """Return whether the gradient is that of one micro-batch alone: the k-th gives k."""
    one = _times(lambda at: digits(at.world_size) / at.world_size / at.seen.count)(at)[item]
    k = (got / one).flatten()[0]
    return bool(1 <= k <= at.seen.count) and torch.allclose(got, one * k.round(), rtol=ROUNDING)


def _all_ranks_are_in_it(at: At, got: Tensor, item: int) -> bool:
    if not at.seen.calls:
        return False
    times = (got / _times(_mean)(at)[item]).flatten()[0] * sum(range(1, at.seen.count + 1))
    return bool(abs(times - times.round()) < 1e-9)


def _first_one_synced(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    for number, (x, y) in enumerate(micro_batches):
        loss = loss_fn(model(x), y) / len(micro_batches)
        if number == 0:
            loss.backward()
            model.finish()
        else:
            with model.no_sync():
                loss.backward()


def _one_backward(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    losses = [loss_fn(model(x), y) / len(micro_batches) for x, y in micro_batches]
    torch.stack(losses).sum().backward()
    model.finish()


def _forwards_outside(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    for left, (x, y) in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
        loss = loss_fn(model(x), y) / len(micro_batches)
        with model.no_sync() if left else nullcontext():
            loss.backward()
    model.finish()


def _by_items(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    items = sum(len(x) for x, _ in micro_batches)
    for left, (x, y) in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
        with model.no_sync() if left else nullcontext():
            (loss_fn(model(x), y) * len(x) / items).backward()
    model.finish()


EARLY, LAST = "in early:\n            (loss_fn(model(x), y)", "= last\n    (loss_fn(model(x), y)"
INSIDE = (LAST, "= last\n    with model.no_sync():\n        (loss_fn(model(x), y)")


def _scaled(by: str, cause: Cause) -> Edit:
    """Return the right answer with every loss scaled once more."""
    return Edit(EARLY, f"{EARLY} {by}", cause, also=((LAST, f"{LAST} {by}"),))


ACCUMULATE = Exercise(
    key="ddp-4",
    title="accumulate, then synchronize once",
    check=OnRanks(
        observe_on_rank=_accumulate,
        trouble=(("hang", "", LOST),),
        expect=(
            Demand(lambda at: not at.seen.in_eval, "a forward in eval mode", MODE),
            Demand(
                lambda at: not at.seen.bypassed,
                lambda at: f"{at.seen.bypassed} forwards past DDP",
                BYPASSED,
            ),
            Demand(
                lambda at: not at.seen.frozen_changed,
                "parameter 1 is no longer frozen",
                FROZEN,
            ),
            Demand(
                lambda at: at.seen.most_alive <= 1,
                lambda at: f"the graphs of {at.seen.most_alive} micro-batches are alive at once",
                ALIVE,
            ),
            Demand(
                lambda at: len(at.seen.calls) <= len(BUCKET_BYTES),
                lambda at: (
                    f"{len(at.seen.calls)} all_reduces of "
                    f"{sum(call.num_bytes for call in at.seen.calls)} bytes; need "
                    f"{len(BUCKET_BYTES)} of {sum(BUCKET_BYTES)} bytes"
                ),
                ONCE,
            ),
            Numbers(
                "grads",
                _times(_mean),
                rtol=ROUNDING,
                what="the mean gradient",
                names=lambda _at: [f"parameter {i}" for i in Bag(SIZES).trained],
                causes=(
                    (SUMMED, _times(_total)),
                    (WEIGHTED, _times(_weighted)),
                    (BY_RANKS, _times(lambda at: _mean(at) / at.world_size)),
                    (TWICE, _times(lambda at: _mean(at) / at.seen.count)),
                    (LOST, _times(_own)),
                ),
                otherwise=(
                    (_one_only, CLEARED),
                    (_all_ranks_are_in_it, ONE_NOT_DIVIDED),
                    (lambda at, _got, _i: bool(at.seen.calls), SOME_OWN),
                ),
                look=LOST,
            ),
            one_a_bucket(lambda _at: BUCKET_BYTES),
            Demand(
                lambda at: at.seen.calls[0].start_s < at.seen.backward_end_s,
                "the numbers are right, but nothing left before the last backward had ended",
                NO_OVERLAP,
            ),
            Demand(
                lambda at: at.seen.forwards.count(False) >= at.seen.backwards.count(False),
                "the numbers are right, but forwards were outside of no_sync()",
                FORWARD_OUTSIDE,
            ),
            Demand(
                lambda at: at.seen.forwards[-1],
                "the numbers are right, but the last forward was inside no_sync()",
                LAST_INSIDE,
            ),
            Demand(lambda at: at.seen.training_after, "the model is left in eval mode", MODE),
            Demand(lambda at: at.seen.syncs_after, "no_sync() is still on afterwards", STAYS_ON),
        ),
        success=(
            "The mean over ranks and micro-batches, each bucket sent once, in the last backward."
        ),
    ),
    wrong=(
        Edit(
            "with model.no_sync():",
            "if True:",
            ONCE,
            also=((").backward()\n    x", ").backward()\n            model.finish()\n    x"),),
        ),
        Edit(*INSIDE, LOST, also=(("model.finish()", "pass"),)),
        Edit("model.finish()", "pass", LOST),
        Edit(*INSIDE, NO_OVERLAP),
        Own(_first_one_synced, SOME_OWN),
        Own(_one_backward, ALIVE),
        Edit("x, y = last", "model.zero_grad()\nx, y = last", CLEARED),
        Edit(LAST + " / len(micro_batches)", LAST, ONE_NOT_DIVIDED),
        Own(_forwards_outside, FORWARD_OUTSIDE),
        Own(_by_items, WEIGHTED),
        Edit(
            LAST + " / len(micro_batches)).backward()",
            "= last\n    with model.no_sync():\n        loss = loss_fn(model(x), y)\n"
            "    (loss / len(micro_batches)).backward()",
            LAST_INSIDE,
        ),
        Edit(LAST, LAST.replace("model", "model.module"), BYPASSED),
        Edit(
            "*early, last",
            "graphs = []\n*early, last",
            ALIVE,
            also=(
                (
                    EARLY + " / len(micro_batches)).backward()",
                    EARLY.replace("(loss", "graphs.append(loss")
                    + " / len(micro_batches))\n            graphs[-1].backward(retain_graph=True)",
                ),
            ),
        ),
        Edit(
            "*early, last",
            "outputs = []\n*early, last",
            ALIVE,
            also=(
                (
                    EARLY,
                    "in early:\n            outputs.append(model(x))\n"
                    "            (loss_fn(outputs[-1], y)",
                ),
            ),
        ),
        Edit("*early, last", "model.eval()\n*early, last", MODE),
        Edit("model.finish()", "model.finish()\nmodel.eval()", MODE),
        Edit(
            "model.finish()",
            "model.finish()\nmodel.on = model.no_sync()\nmodel.on.__enter__()",
            STAYS_ON,
        ),
        Edit("*early, last", "model.requires_grad_()\n*early, last", FROZEN),
        _scaled("* len(micro_batches)", SUMMED),
        _scaled("/ len(micro_batches)", TWICE),
        _scaled("/ dist.get_world_size()", BY_RANKS),
    ),
)
