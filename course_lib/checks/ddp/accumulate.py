"""Exercise 4 of 06_ddp: micro-batches with one synchronization."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
COUNTS = (4, 2, 1, 3)

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
SUMMED = Cause("Summed over the micro-batches, not averaged: divide each loss.")
BY_RANKS = Cause("Divided by the number of ranks once more: finish() has done that.")
TWICE = Cause("Divided by the number of micro-batches twice.")
NO_OVERLAP = Cause("No overlap: call the last backward outside of no_sync().")


@dataclass
class Step:
    """The accumulation of `count` micro-batches on one rank; `most_alive` graphs at once."""

    count: int
    grads: list[Any]
    calls: list[Event]
    backward_end_s: float
    most_alive: int


def _accumulate(rank: int, answer: Callable[..., Any]) -> dict[str, Step]:
    """Return the result and the traffic of the answer for each number of micro-batches."""
    steps: dict[str, Step] = {}
    for count in COUNTS:
        module = Bag(SIZES)
        model = DDP(module, bucket_bytes=LIMIT)
        with _watched(module) as seen, record() as log:
            if not steps:
                come_late(rank)
            answer(model, lambda output, target: output * target, _micro_batches(rank, count))
        label = f"{count} micro-batch{'es' if count > 1 else ''}"
        calls = calls_of(log.events)
        steps[label] = Step(count, copied_grads(module), calls, seen["end_s"], seen["most"])
    return steps


@contextmanager
def _watched(module: Bag) -> Iterator[dict[str, Any]]:
    """Yield when the last parameter got its gradient, and how many graphs were alive at most."""
    seen: dict[str, Any] = {"end_s": 0.0, "alive": 0, "most": 0}

    def begin(*_args: Any) -> None:
        seen["alive"] += 1
        seen["most"] = max(seen["most"], seen["alive"])

    def end(_param: Tensor) -> None:
        seen["end_s"] = time.perf_counter()
        seen["alive"] -= 1

    hooks = [
        module.register_forward_pre_hook(begin),
        module.weights[0].register_post_accumulate_grad_hook(end),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _micro_batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of which the k-th has the gradient (k + 1) * 10**rank."""
    return [
        (torch.tensor(10.0**rank).double(), torch.tensor(k + 1.0).double()) for k in range(count)
    ]


def _times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    module = Bag(SIZES)
    return lambda at: [module.slope(i) * factor(at) for i in module.trained]


def _total(at: At) -> float:
    """Return the mean over the ranks of the sum over the micro-batches."""
    return digits(at.world_size) / at.world_size * sum(range(1, at.seen.count + 1))


def _mean(at: At) -> float:
    return _total(at) / at.seen.count


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
            one_a_bucket(BUCKET_BYTES),
            Demand(
                lambda at: at.seen.calls[0].start_s < at.seen.backward_end_s,
                "the numbers are right, but nothing left before the last backward had ended",
                NO_OVERLAP,
            ),
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
        _scaled("* len(micro_batches)", SUMMED),
        _scaled("/ len(micro_batches)", TWICE),
        _scaled("/ dist.get_world_size()", BY_RANKS),
    ),
)
