"""Exercise 4 of 06_ddp: micro-batches with one synchronization.

The planted mistakes are in `accumulate_answers.py`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp import accumulate_answers as planted
from course_lib.checks.ddp.parts import (
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
from course_lib.checks.expect import run
from course_lib.core import COMMUNICATION_KINDS
from course_lib.ddp.ddp import DDP
from course_lib.ranks import Ranks, record

SIZES, LIMIT = (4, 2, 2, 1, 4), 40
BUCKET_BYTES = (40, 16, 32)
COUNTS = (4, 2, 1)

ONCE = (
    "Only the last backward may send: put all the others inside `with model.no_sync():`, and call "
    "finish() once, after the last one."
)
LOST = (
    "The ranks were never brought together: the last backward belongs outside of no_sync(), and "
    "model.finish() after it."
)


# --- the check


def _accumulate(rank: int, answer: Callable[..., Any]) -> list[Step]:
    """Return the result and the traffic of the answer for each number of micro-batches."""
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
    """Record when the last parameter has its gradient; each forward must have one."""
    waiting = [0, 0]  # forward passes without a backward: now, and at most

    def begin(*_args: Any) -> None:
        waiting[:] = waiting[0] + 1, max(waiting[1], waiting[0] + 1)

    def note(_param: Tensor) -> None:
        moments.append(time.perf_counter())
        waiting[0] -= 1

    handles = [
        module.register_forward_pre_hook(begin),
        module.weights[0].register_post_accumulate_grad_hook(note),
    ]
    try:
        yield
        if waiting[1] > 1:
            raise CheckFailed(
                f"The graphs of {waiting[1]} micro-batches are alive at once: no memory is saved "
                "(lesson 02). Forward and backward for one, then for the next."
            )
    finally:
        for handle in handles:
            handle.remove()


def _micro_batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of which the k-th has the gradient (k + 1) * 10**rank."""
    return [
        (torch.tensor(10.0**rank).double(), torch.tensor(k + 1.0).double()) for k in range(count)
    ]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output * target


def check_accumulate(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, 1 to 4 micro-batches: the mean over all, each bucket sent once."""
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
        causes.append((alone, f"Only micro-batch {k} is in it: who cleared the others? {ONCE}"))
    times = (got / (one * digits(p) / p)).flatten()[0].item() * count * max(1, count - 1)
    if step.calls and not any(close(got, wrong) for wrong, _ in causes):
        if abs(times - round(times)) < 1e-9:
            return "All ranks are in it; but each loss has to be divided by the number of parts."
        return f"Some micro-batches are this rank's own only. {ONCE}"
    return next((says for wrong, says in causes if close(got, wrong)), LOST)


ACCUMULATE = Exercise(
    key="ddp-4",
    title="accumulate, then synchronize once",
    check=check_accumulate,
    reference=planted.accumulate,
    mistakes=(
        Mistake(
            "synchronizes every time", planted.every_time, says="Only the last backward may send"
        ),
        Mistake("last sync lost", planted.last_sync_lost, says="never brought together"),
        Mistake("no finish", planted.no_finish, says="model.finish() after it"),
        Mistake("finish only", planted.all_inside, says="outside of no_sync()"),
        Mistake("first one synced", planted.first_one_synced, says="this rank's own only"),
        Mistake("one backward", planted.one_backward, says="alive at once"),
        Mistake("cleared in between", planted.cleared, says="who cleared the others"),
        Mistake("last not divided", planted.last_not_divided, says="All ranks are in it"),
        Mistake("not divided", planted.times(lambda m: m), says="Summed over the micro-batches"),
        Mistake("divided twice", planted.times(lambda m: 1 / m), says="micro-batches twice"),
        Mistake(
            "divided by ranks",
            planted.times(lambda m: 1 / dist.get_world_size()),
            says="finish() has done that",
        ),
    ),
)
