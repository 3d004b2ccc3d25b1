"""Observe an answer to exercise 2 of 06_ddp on ranks: four steps, and two models.

Step 1: the last rank is late. Step 2: another model has one gradient before it, the others after
it. Step 3: rank 0 has zeros, gradients are not None before it, and the other model is between its
backward and its finish. Step 4: rank 0 has inf or nan. Parameters are odd: one is transposed, one
has no dimension.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import (
    ROUNDING,
    Bag,
    come_late,
    copied_grads,
    digits,
    kept_bytes,
    watched_handles,
)
from course_lib.checks.on_ranks import At, calls_of
from course_lib.core import Event
from course_lib.ddp.buckets import make_buckets
from course_lib.ranks import record, span

SIZES, BUCKETS = (4, 2, 2, 1, 4), (5, 2, 4)  # numbers of each parameter, and of each bucket
OTHER_SCALE = 5.0


@dataclass
class Step:
    """One step on one rank.

    `stopped` is what a strict zip in finish said; `filled_s`: when the hook that filled a bucket
    began and ended.
    """

    stopped: str

    grads: list[Any]
    others_grads: list[Any]
    calls: list[Event]
    waits: list[Event]
    filled_s: list[tuple[float, float]]
    backward_end_s: float
    kept_bytes: int
    params_changed: bool
    never_waited: int


def four_steps(
    rank: int,
    answer: Callable[..., Any],
    order: Sequence[int] = (),
    dtype: torch.dtype = torch.float64,
) -> dict[str, Step]:
    """Run four steps of backward and finish, two of them beside those of another model."""
    module, other = (_model(rank, order, dtype) for _ in range(2))
    buckets, beside = (_buckets(each, dtype) for each in (module, other))
    began_s, ended_s = dict[Tensor, float](), dict[Tensor, float]()
    params = [param for bucket in buckets for param in bucket]
    note = [param.register_post_accumulate_grad_hook(_clock(began_s)) for param in params]
    model = answer(module, [list(bucket) for bucket in buckets])
    other_model = answer(other, [list(bucket) for bucket in beside])
    note += [param.register_post_accumulate_grad_hook(_clock(ended_s)) for param in params]
    steps = {}
    for number in range(4):
        module.zero_grad(set_to_none=number != 2)
        if number == 0:
            come_late(rank)
        aside = _beside(number, other(OTHER_SCALE * 10.0**rank), beside, other_model)
        with aside as failed, record() as log, watched_handles() as open_ones:
            stopped, since_s = "", time.perf_counter()
            loss = module(_scale(number, rank, dist.get_world_size()))
            with span("backward"):
                loss.backward()
            try:
                model.finish()
            except ValueError as error:
                if "shorter" not in (stopped := str(error)):
                    raise
        steps[f"step {number + 1}"] = Step(
            stopped=stopped,
            grads=copied_grads(module),
            others_grads=copied_grads(other),
            calls=[call for call in calls_of(log.events) if call.start_s > since_s],
            waits=[event for event in log.events if event.kind == "wait"],
            filled_s=_filled_s(buckets, began_s, ended_s),
            backward_end_s=next(e.end_s for e in log.events if e.kind == "backward"),
            kept_bytes=kept_bytes(model),
            params_changed=any(bool((param != 7.0).any()) for param in module.weights),
            never_waited=len(open_ones),
        )
        other.zero_grad()
        if stopped or failed:
            break
    return steps


@contextmanager
def _beside(number: int, loss: Tensor, buckets: list[list[Any]], model: Any) -> Iterator[list[Any]]:
    """Have another model's backward before a step: all of it in step 3, some of it in step 2.

    Yields the list of the errors of the rest, which shows in the other model's gradients.
    """
    failed = list[Any]()
    params = [param for bucket in buckets for param in bucket]
    if now := {1: params[:1], 2: params}.get(number, []):
        loss.backward(inputs=now, retain_graph=True)
    yield failed
    try:
        if number == 1:
            loss.backward(inputs=params[1:])
        if now:
            model.finish()
    except Exception as error:
        failed.append(error)


def _model(rank: int, order: Sequence[int], dtype: torch.dtype) -> Bag:
    """Return the model of a rank: on odd ones gradients come in another order, on 1 they lie so."""
    return Bag(SIZES, order=order if rank % 2 else (), odd=True, lies=rank != 1, dtype=dtype)


def _filled_s(
    buckets: list[list[Any]], began_s: dict[Tensor, float], ended_s: dict[Tensor, float]
) -> list[tuple[float, float]]:
    """Return the start and the end of the hook that filled each bucket."""
    return [
        (max(began_s[p] for p in bucket), max(ended_s[p] for b in buckets[: k + 1] for p in b))
        for k, bucket in enumerate(buckets)
    ]


def _buckets(module: Bag, dtype: torch.dtype) -> list[list[Any]]:
    return [bucket.params for bucket in make_buckets(module, BUCKETS[0] * dtype.itemsize)]


def _scale(number: int, rank: int, p: int) -> float:
    """Return what a rank's gradients are multiplied with: 0 and inf or nan on rank 0 in the end."""
    if rank == 0 and number > 1:
        return 0.0 if number == 2 else float("inf" if p % 2 else "nan")
    return (number + 1) / 3 * 10.0**rank


def _clock(times_s: dict[Tensor, float]) -> Callable[[Tensor], None]:
    return lambda param: times_s.__setitem__(param, time.perf_counter())


def bucket_bytes(at: At) -> list[int]:
    """Return the bytes of each bucket."""
    return [count * dtype_of(at).itemsize for count in BUCKETS]


def dtype_of(at: At) -> torch.dtype:
    """Return the dtype of the parameters in this run."""
    dtype: torch.dtype = at.options.get("dtype", torch.float64)
    return dtype


def ones_of(at: At) -> list[Tensor]:
    """Return the gradients for a scale of 1."""
    module = Bag(SIZES, odd=True)
    return [module.slope(i).to(dtype_of(at)) for i in module.trained]


def times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    """Return the function of the gradients for a scale that depends on the place."""
    return lambda at: [one * factor(at) for one in ones_of(at)]


def total_of(at: At) -> float:
    """Return the sum of all ranks' scales."""
    return sum(_scale(at.number, rank, at.world_size) for rank in range(at.world_size))


def mean_of(at: At) -> float:
    """Return the mean of all ranks' scales."""
    return total_of(at) / at.world_size


def own_of(at: At) -> float:
    """Return this rank's own scale."""
    return _scale(at.number, at.rank, at.world_size)


def is_of_another_model(at: At) -> bool:
    """Return whether all gradients are those of the other model."""
    return at.number == 2 and _are_of_other(at, at.seen.grads)


def disturbs_other_model(at: At) -> bool:
    """Return whether a step between the other model's gradients kept it from its mean."""
    return at.number in (1, 2) and not _are_of_other(at, at.seen.others_grads)


def _are_of_other(at: At, grads: list[Any]) -> bool:
    mean = OTHER_SCALE * digits(at.world_size) / at.world_size
    pairs = zip(grads, times(lambda _at: mean)(at), strict=True)
    return all(got is not None and torch.allclose(got, x) for got, x in pairs)


def parameters_of(at: At) -> list[Tensor]:
    """Return the parameters themselves."""
    return [torch.full_like(one, 7.0) for one in ones_of(at)]


def is_own(at: At, got: Tensor, item: int) -> bool:
    """Return whether this is the rank's own gradient, and not every bucket was sent."""
    fewer = len(at.seen.calls) < len(BUCKETS)
    return fewer and torch.allclose(got, times(own_of)(at)[item], rtol=rounding_of(at))


def rounding_of(at: At) -> float:
    """Return the relative difference that rounding explains."""
    return ROUNDING if dtype_of(at) == torch.float64 else 1e-6


def has_fewer_digits(at: At) -> bool:
    """Return whether every bucket travels in a dtype of half the size, or less."""
    sent = [call.num_bytes for call in at.seen.calls]
    return any(sent == [need // less for need in bucket_bytes(at)] for less in (2, 4, 8))


def is_of_another(at: At, got: Tensor, _item: int) -> bool:
    """Return whether these are right numbers of other gradients: all slopes are whole numbers."""
    slopes = got / mean_of(at)
    return bool(((slopes - slopes.round()).abs() < 1e-9).all() and (slopes > 0.5).all())


def left_early(at: At) -> bool:
    """Return whether a bucket started before the hook that filled it."""
    starts_s = [call.start_s for call in at.seen.calls]
    return len(starts_s) == len(at.seen.filled_s) and any(
        start_s < began_s for start_s, (began_s, _) in zip(starts_s, at.seen.filled_s, strict=True)
    )


def left_late(at: At) -> list[int]:
    """Return the numbers of the buckets that started after the hook that filled them."""
    pairs = zip(at.seen.calls, at.seen.filled_s, strict=True)
    return [number for number, (call, (_, end_s)) in enumerate(pairs) if call.start_s > end_s]
