"""Exercise 4 of 06_ddp, with its planted mistakes: micro-batches with one synchronization."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp_parts import (
    WORLD_SIZES,
    Bag,
    Step,
    close,
    come_late,
    digits,
    expect_all_reduces,
    row,
)
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.tools import run
from course_lib.core import COMMUNICATION_KINDS
from course_lib.ddp import DDP
from course_lib.ranks import Ranks, record

SIZES, LIMIT = (4, 2, 2, 1, 4), 40
BUCKET_BYTES = (40, 16, 32)
COUNTS = (5, 2, 1)
Loss = Callable[[Tensor, Tensor], Tensor]
MicroBatches = Sequence[tuple[Tensor, Tensor]]

ONCE = (
    "Only the last backward may send: put all the others inside `with model.no_sync():`, and call "
    "finish() once, after the last one."
)
LOST = (
    "The ranks were never brought together: the last backward belongs outside of no_sync(), and "
    "model.finish() after it."
)


def accumulate(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    """The right answer: everything but the last micro-batch inside no_sync."""
    *early, last = micro_batches
    with model.no_sync():
        for x, y in early:
            (loss_fn(model(x), y) / len(micro_batches)).backward()
    x, y = last
    (loss_fn(model(x), y) / len(micro_batches)).backward()
    model.finish()


# --- the check


def _accumulate(rank: int, answer: Callable[..., Any]) -> list[Step]:
    """For each number of micro-batches: what the answer left and sent."""
    steps: list[Step] = []
    for count in COUNTS:
        module = Bag(SIZES)
        model, moments = DDP(module, bucket_bytes=LIMIT), list[float]()
        with _watched(module, moments), record() as log:
            if not steps:
                come_late(rank)
            answer(model, _loss, _micro_batches(rank, count))
        grads = [module.weights[i].grad for i in module.trained]
        steps.append(
            Step(
                grads=[grad.clone() if isinstance(grad, Tensor) else grad for grad in grads],
                calls=sorted(
                    (e for e in log.events if e.kind in COMMUNICATION_KINDS),
                    key=lambda e: e.start_s,
                ),
                backward_end_s=max(moments, default=0.0),
            )
        )
    return steps


@contextmanager
def _watched(module: Bag, moments: list[float]) -> Iterator[None]:
    """Note when the parameter that is ready last has its gradient."""

    def note(_param: Tensor) -> None:
        moments.append(time.perf_counter())

    handle = module.weights[0].register_post_accumulate_grad_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _micro_batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batch k has the gradient (k + 1) * 10**rank."""
    return [
        (torch.tensor(10.0**rank).double(), torch.tensor(k + 1.0).double()) for k in range(count)
    ]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output * target


def check_accumulate(answer: Callable[..., Any]) -> str:
    """1 to 4 ranks, 1 to 5 micro-batches: the mean over all, each bucket sent once."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            by_rank = run(ranks, _accumulate, answer, on={"hang": LOST})
        for at, count in enumerate(COUNTS):
            for rank, steps in enumerate(by_rank):
                _judge(steps[at], rank, p, count)
    return "The mean over ranks and micro-batches, each bucket sent once, in the last backward."


def _judge(step: Step, rank: int, p: int, count: int) -> None:
    where = f"rank {rank} of {p}, {count} micro-batch{'es' if count > 1 else ''}"
    if len(step.calls) > len(BUCKET_BYTES):
        got, need = (sum(sizes) for sizes in ([c.num_bytes for c in step.calls], BUCKET_BYTES))
        raise CheckFailed(
            f"{where}: {len(step.calls)} all_reduces of {got} bytes; need {len(BUCKET_BYTES)} of "
            f"{need} bytes. {ONCE}"
        )
    module = Bag(SIZES)
    for i, got in zip(module.trained, step.grads, strict=True):
        one = module.slope(i)
        mean = one * digits(p) / p * sum(range(1, count + 1)) / count
        if not close(got, mean):
            raise CheckFailed(
                f"{where}, parameter {i}: need the mean gradient {row(mean)}; got {row(got)}. "
                f"{_why(got, step, one, rank, p, count)}"
            )
    expect_all_reduces(where, step.calls, BUCKET_BYTES)
    if step.calls[0].start_s > step.backward_end_s:
        raise CheckFailed(
            f"{where}: the numbers are right, but nothing left before the last backward had "
            "ended: no overlap. Call the last backward outside of no_sync()."
        )


def _why(got: Any, step: Step, one: Tensor, rank: int, p: int, count: int) -> str:
    if not isinstance(got, Tensor):
        return "No gradient is left: who clears it?"
    total = sum(range(1, count + 1))
    mean, own = one * digits(p) / p * total / count, one * 10**rank * total / count
    causes = [
        (mean * count, "Summed over the micro-batches, not averaged: divide each loss."),
        (mean / p, "Divided by the number of ranks once more: finish() has done that."),
        (mean / count, "Divided by the number of micro-batches twice."),
        (own, LOST),
        (own * p, LOST),
    ]
    for k in range(1, count + 1):
        alone = one * digits(p) / p * k / count
        causes.append((alone, f"Only micro-batch {k} was added up over the ranks. {ONCE}"))
    if step.calls and not any(close(got, wrong) for wrong, _ in causes):
        return f"Some micro-batches are this rank's own only. {ONCE}"
    return next((says for wrong, says in causes if close(got, wrong)), LOST)


# --- planted mistakes


def _parts(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> Iterator[Tensor]:
    for x, y in micro_batches:
        yield loss_fn(model(x), y) / len(micro_batches)


def _every_time(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    for loss in _parts(model, loss_fn, micro_batches):
        loss.backward()
        model.finish()


def _last_sync_lost(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    with model.no_sync():
        for loss in _parts(model, loss_fn, micro_batches):
            loss.backward()


def _no_finish(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    *early, last = micro_batches
    with model.no_sync():
        for loss in _parts(model, loss_fn, early):
            (loss * len(early) / len(micro_batches)).backward()
    (loss_fn(model(last[0]), last[1]) / len(micro_batches)).backward()


def _all_inside(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    _last_sync_lost(model, loss_fn, micro_batches)
    model.finish()


def _first_one_synced(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    for number, (x, y) in enumerate(micro_batches):
        loss = loss_fn(model(x), y) / len(micro_batches)
        if number == 0:
            loss.backward()
            model.finish()
        else:
            with model.no_sync():
                loss.backward()


def _times(factor: Callable[[int], float]) -> Callable[..., None]:
    """The right answer, with a loss that is scaled by a function of the number of parts."""

    def scaled(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
        by = factor(len(micro_batches))
        accumulate(model, lambda output, y: loss_fn(output, y) * by, micro_batches)

    return scaled


ACCUMULATE = Exercise(
    key="ddp-4",
    title="accumulate, then synchronize once",
    check=check_accumulate,
    reference=accumulate,
    mistakes=(
        Mistake("synchronizes every time", _every_time, says="Only the last backward may send"),
        Mistake("last sync lost", _last_sync_lost, says="never brought together"),
        Mistake("no finish", _no_finish, says="model.finish() after it"),
        Mistake("finish only", _all_inside, says="outside of no_sync()"),
        Mistake("first one synced", _first_one_synced, says="this rank's own only"),
        Mistake("not divided", _times(lambda m: m), says="Summed over the micro-batches"),
        Mistake("divided twice", _times(lambda m: 1 / m), says="micro-batches twice"),
        Mistake(
            "divided by ranks",
            _times(lambda m: 1 / dist.get_world_size()),
            says="finish() has done that",
        ),
    ),
)
