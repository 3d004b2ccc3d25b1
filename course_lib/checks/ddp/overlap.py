"""Exercise 2 of 06_ddp: a hook that all-reduces a bucket once it is full, and a finish that waits.

The planted mistakes are in `overlap_answers.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp import overlap_answers as planted
from course_lib.checks.ddp.buckets import buckets_of
from course_lib.checks.ddp.parts import (
    LATE_S,
    NOT_WAITED,
    WORLD_SIZES,
    Bag,
    Step,
    close,
    come_late,
    digits,
    expect_all_reduces,
    kept_bytes,
    row,
    watched_handles,
)
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import told
from course_lib.core import COMMUNICATION_KINDS
from course_lib.ranks import RankError, Ranks, record, span

SIZES, LIMIT = (4, 2, 2, 1, 4), 40  # buckets of 40, 16 and 32 bytes
NUM_STEPS = 3

ORDER = (
    "Gradients become ready in another order on another rank. Bucket i may leave only after bucket "
    "i - 1 has: keep the number of the next bucket, and send while that one is full."
)
SOME_RANKS = (
    "A bucket was sent on some ranks only: the others never made that call. Every rank has to send "
    "every bucket, whatever its gradients are."
)
NEVER_LEFT = (
    "A bucket never left. Is one full when all of its gradients are there, also the last one, "
    "which holds fewer bytes than the limit?"
)
NOT_RESET = "The first step was right: clear at the end of finish what was kept for one step."
DIGITS = (
    "Which ranks are in it, and how often? Read digits. (Between all_reduce and wait() nobody may "
    "touch the bucket.)"
)
NOT_WRITTEN = "That is this rank's own gradient: copy the mean from the bucket into param.grad."


def _train(rank: int, answer: Callable[..., Any], order: Sequence[int] = ()) -> list[Step]:
    """Run three steps of backward and finish, on gradients 10**rank, 2 * 10**rank ..."""
    module = Bag(SIZES, order=order if rank % 2 else ())
    model = answer(module, buckets_of(module, LIMIT))
    steps = []
    for number in range(NUM_STEPS):
        module.zero_grad()
        if number == 0:
            come_late(rank)
        with record() as log, watched_handles() as open_ones:
            loss = module((number + 1.0) * 10**rank)
            with span("backward"):
                loss.backward()
            model.finish()
        steps.append(_seen(module, model, log.events))
        steps[-1].never_waited = len(open_ones)
    return steps


def _seen(module: Bag, model: Any, events: Sequence[Any]) -> Step:
    grads = [module.weights[i].grad for i in module.trained]
    return Step(
        grads=[grad.clone() if isinstance(grad, Tensor) else grad for grad in grads],
        calls=sorted((e for e in events if e.kind in COMMUNICATION_KINDS), key=lambda e: e.start_s),
        waits=[event for event in events if event.kind == "wait"],
        backward_end_s=next(event.end_s for event in events if event.kind == "backward"),
        kept_bytes=kept_bytes(model),
        params_changed=any(bool((param != 7.0).any()) for param in module.weights),
    )


def check_overlap(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, three steps: means, one all_reduce per bucket, during backward."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            _judge(_run(ranks, answer), p)
            _judge(_run(ranks, answer, order=(4, 0, 2, 1, 3)), p)
    return "Means on 1 to 4 ranks; one all_reduce a bucket, in order, while backward runs."


def _run(ranks: Ranks, answer: Callable[..., Any], **more: Any) -> list[list[Step]]:
    try:
        return ranks.run(_train, answer, **more)
    except RankError as error:
        says = {"hang": SOME_RANKS, "mismatch": ORDER}.get(error.kind, "")
        raised = " ".join(message for _, message in error.failures.values())
        if "shape" in raised or "dimensions" in raised or "size" in raised:
            says = (
                "Gradients have shapes: flatten each one before you put it into the bucket, and "
                "bring its part back with view_as(param)."
            )
        if "list index out of range" in raised:
            says = "After the last bucket there is no next one: stop there."
        if "NoneType" in raised:
            says = (
                "A bucket was sent before all of its gradients were there: wait until each has "
                "come, in every step anew (what does finish have to clear?)."
            )
        raise told(error, ranks.world_size, says) from None


def _judge(by_rank: Sequence[Sequence[Step]], p: int) -> None:
    module = Bag(SIZES)
    buckets = buckets_of(module, LIMIT)
    sizes = [sum(8 * param.numel() for param in bucket) for bucket in buckets]
    for number in range(NUM_STEPS):
        for rank, steps in enumerate(by_rank):
            step, where = steps[number], f"rank {rank} of {p}, step {number + 1}"
            _expect_means(step, where, module, p, rank, number, len(sizes))
            if step.never_waited:
                raise CheckFailed(
                    f"{where}: {step.never_waited} of {len(sizes)} all_reduces were never waited "
                    "for, and came in time by luck. Call wait() on every handle: one says nothing "
                    "about the others."
                )
            expect_all_reduces(where, step.calls, sizes)
            _expect_overlap(step, where)
            if step.kept_bytes > max(steps[0].kept_bytes, 0):
                raise CheckFailed(
                    f"{where}: it keeps {step.kept_bytes} bytes, after step 1 it kept "
                    f"{steps[0].kept_bytes}. Clear in finish what was in flight."
                )


def _expect_means(
    step: Step, where: str, module: Bag, p: int, rank: int, number: int, num_buckets: int
) -> None:
    if step.params_changed:
        raise CheckFailed(
            f"{where}: the parameters have changed. A hook gets the parameter: what has to be "
            "reduced is param.grad."
        )
    for i, got in zip(module.trained, step.grads, strict=True):
        one = module.slope(i) * (number + 1)
        mean = one * digits(p) / p
        if not close(got, mean):
            says = _why(step, got, one, p, rank, number, num_buckets)
            raise CheckFailed(
                f"{where}, parameter {i}: need the mean gradient {row(mean)}; got {row(got)}. "
                f"{says}"
            )


def _why(
    step: Step, got: Any, one: Tensor, p: int, rank: int, number: int, num_buckets: int
) -> str:
    """Return the misconception behind a wrong mean."""
    if not isinstance(got, Tensor):
        return "finish has to leave a gradient in every param.grad."
    own, total, left = one * 10**rank, one * digits(p), len(step.calls)
    seven = torch.full_like(one, 7.0)
    if left < num_buckets and close(got, own):
        return NOT_RESET if number else NEVER_LEFT
    causes = [
        (total, f"{p} times too large: summed, not averaged."),
        (total / p / p, f"{p} times too small: the mean was taken twice."),
        (total / 4, "Divided by 4: divide by the number of ranks, whatever it is."),
        (own / p, NOT_WAITED),
        (own, NOT_WRITTEN),
        (own + total / p, "The mean was added to this rank's own gradient: put it in its place."),
        (seven, "That is the parameter: a hook gets the parameter, and you want param.grad."),
        (seven * p, "That is the parameter, summed: a hook gets the parameter, take param.grad."),
    ]
    says = next((says for wrong, says in causes if close(got, wrong)), "")
    if not says and _of_another(got, (number + 1) * digits(p) / p):
        return "Numbers of another gradient: split the bucket in the order in which it was filled."
    return says or (NOT_RESET if number else DIGITS)


def _of_another(got: Tensor, unit: float) -> bool:
    """Return whether these are right numbers of other gradients: all slopes are whole numbers."""
    times = got / unit
    return bool(((times - times.round()).abs() < 1e-9).all() and (times > 0.5).all())


def _expect_overlap(step: Step, where: str) -> None:
    """Demand that the first bucket is sent during backward, and no wait before its end."""
    if step.calls[0].start_s > step.backward_end_s:
        raise CheckFailed(
            f"{where}: nothing left before backward had ended: no overlap. Send a bucket in "
            "on_grad, as soon as its last gradient is there."
        )
    waited_s = sum(e.duration_s for e in step.waits if e.end_s <= step.backward_end_s)
    if waited_s > LATE_S / 2:
        raise CheckFailed(
            f"{where}: {waited_s:.2f} s of waiting inside backward: no overlap. Start the "
            "all_reduce with async_op=True, and wait in finish."
        )


OVERLAP = Exercise(
    key="ddp-2",
    title="hook and finish",
    check=check_overlap,
    reference=planted.Overlapped,
    mistakes=(
        Mistake("not waiting", planted.NotWaiting, says="Call wait()"),
        Mistake("last bucket never leaves", planted.LastNeverLeaves, says="A bucket never left"),
        Mistake("sum for mean", planted.Summed, says="summed, not averaged"),
        Mistake("mean twice", planted.MeanTwice, says="the mean was taken twice"),
        Mistake("always by 4", planted.ByFour, says="Divided by 4"),
        Mistake("reduces the parameter", planted.ReducesParam, says="That is the parameter"),
        Mistake("changes the parameter", planted.ChangesParam, says="the parameters have changed"),
        Mistake("own order", planted.OwnOrder, says="in another order on another rank"),
        Mistake("some ranks only", planted.SomeRanks, says="sent on some ranks only"),
        Mistake("waits in the hook", planted.WaitsInHook, says="inside backward"),
        Mistake("all in finish", planted.AllInFinish, says="nothing left before backward"),
        Mistake("one a parameter", planted.OneEach, says="not one a parameter"),
        Mistake("not written back", planted.NotWritten, says="copy the mean"),
        Mistake("waits for the last", planted.WaitsForLast, says="Call wait() on"),
        Mistake("full by its last one", planted.FullByLast, says="before all of its gradients"),
        Mistake("no view_as", planted.NoViewAs, says="bring its part back with view_as"),
        Mistake("no flatten", planted.NoFlatten, says="flatten each one"),
        Mistake("past the end", planted.PastTheEnd, says="there is no next one"),
        Mistake("added", planted.Added, says="put it in its place"),
        Mistake("split in another order", planted.SplitReversed, says="order in which it was"),
        Mistake("works once", planted.WorksOnce, says="what does finish have to clear"),
        Mistake("next not reset", planted.NextNotReset, says="clear at the end of finish"),
        Mistake("keeps all", planted.KeepsAll, says="Clear in finish what was in flight"),
    ),
)
