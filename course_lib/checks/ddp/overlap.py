"""Exercise 2 of 06_ddp: a hook that all-reduces a bucket once it is full, and a finish that waits.

Whether a bucket leaves in time is an order, not a duration: it has to start between the beginning
and the end of the hook that filled it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import (
    ONE_EACH,
    ROUNDING,
    Bag,
    come_late,
    copied_grads,
    digits,
    kept_bytes,
    one_a_bucket,
    watched_handles,
)
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
from course_lib.ddp.buckets import make_buckets
from course_lib.ranks import record, span

SIZES, LIMIT, BUCKET_BYTES = (4, 2, 2, 1, 4), 40, (40, 16, 32)
OTHER_ORDER = (4, 0, 2, 1, 3)  # gradients become ready in another order on odd ranks

ORDER = Cause(
    "Gradients become ready in another order on another rank. Bucket i may leave only after bucket "
    "i - 1 has: keep the number of the next bucket, and send while that one is full."
)
SOME_RANKS = Cause(
    "A bucket was sent on some ranks only: the others never made that call. Every rank has to send "
    "every bucket, whatever its gradients are."
)
NEVER_LEFT = Cause(
    "A bucket never left. Is one full when all of its gradients are there, also the last one, "
    "which holds fewer bytes than the limit?"
)
NOT_RESET = Cause(
    "The first step was right: clear at the end of finish what was kept for one step."
)
DIGITS = Cause(
    "Which ranks are in it, and how often? Read digits. (Between all_reduce and wait() nobody may "
    "touch the bucket.)"
)
FLATTEN = Cause(
    "Gradients have shapes: flatten each one before you put it into the bucket, and bring its part "
    "back with view_as(param)."
)
PAST_THE_END = Cause("After the last bucket there is no next one: stop there.")
EARLY = Cause(
    "A bucket was sent before all of its gradients had come, in this step: note in on_grad which "
    "parameters have come, and clear that in finish. (`param.grad is not None` proves nothing: "
    "zero_grad(set_to_none=False) leaves zeros.)"
)
NOT_WAITED = Cause(
    "A bucket is read before the others' gradients are in it. Call wait() on what all_reduce "
    "returned, first."
)
NOT_WRITTEN = Cause("That is this rank's own gradient: copy the mean back into param.grad.")
SUMMED = Cause("{p} times too large: summed, not averaged.")
MEAN_TWICE = Cause("{p} times too small: the mean was taken twice.")
BY_FOUR = Cause("Divided by 4: divide by the number of ranks, whatever it is.")
ADDED = Cause("The mean was added to this rank's own gradient: put it in its place.")
REDUCES_PARAM = Cause("That is the parameter: a hook gets the parameter; reduce param.grad.")
CHANGES_PARAM = Cause("A hook gets the parameter: what has to be reduced is param.grad.")
OTHER_GRADIENT = Cause(
    "Numbers of another gradient: split the bucket in the order in which it was filled."
)
NOT_ALL_WAITED = Cause(
    "Some came in time by luck. Call wait() on every handle: one says nothing about the others."
)
NO_OVERLAP = Cause("No overlap: send a bucket in on_grad, as soon as its last gradient is there.")
LATE = Cause(
    "It leaves later than it could: send a bucket in the very call of on_grad that fills it, each "
    "of them, also the last one."
)
WAITS_IN_HOOK = Cause("No overlap: start the all_reduce with async_op=True, and wait in finish.")
KEEPS = Cause("Clear in finish what was in flight.")


@dataclass
class Step:
    """One step on one rank; `filled_s`: when the hook that filled a bucket began and ended."""

    grads: list[Any]
    calls: list[Event]
    waits: list[Event]
    filled_s: list[tuple[float, float]]
    backward_end_s: float
    kept_bytes: int
    params_changed: bool
    never_waited: int


def _train(rank: int, answer: Callable[..., Any], order: Sequence[int] = ()) -> dict[str, Step]:
    """Run three steps of backward and finish, on gradients 10**rank, 2 * 10**rank ..."""
    module = Bag(SIZES, order=order if rank % 2 else ())
    buckets = [bucket.params for bucket in make_buckets(module, LIMIT)]
    began_s, ended_s = dict[Tensor, float](), dict[Tensor, float]()
    params = [param for bucket in buckets for param in bucket]
    note = [param.register_post_accumulate_grad_hook(_clock(began_s)) for param in params]
    model = answer(module, [list(bucket) for bucket in buckets])
    note += [param.register_post_accumulate_grad_hook(_clock(ended_s)) for param in params]
    steps = {}
    for number in (1, 2, 3):
        module.zero_grad(set_to_none=number != 3)
        if number == 1:
            come_late(rank)
        with record() as log, watched_handles() as open_ones:
            loss = module(number * 10.0**rank)
            with span("backward"):
                loss.backward()
            model.finish()
        steps[f"step {number}"] = Step(
            grads=copied_grads(module),
            calls=calls_of(log.events),
            waits=[event for event in log.events if event.kind == "wait"],
            filled_s=[
                (
                    max(began_s[p] for p in buckets[k]),
                    max(ended_s[p] for b in buckets[: k + 1] for p in b),
                )
                for k in range(len(buckets))
            ],
            backward_end_s=next(e.end_s for e in log.events if e.kind == "backward"),
            kept_bytes=kept_bytes(model),
            params_changed=any(bool((param != 7.0).any()) for param in module.weights),
            never_waited=len(open_ones),
        )
    return steps


def _clock(times_s: dict[Tensor, float]) -> Callable[[Tensor], None]:
    return lambda param: times_s.__setitem__(param, time.perf_counter())


def _ones(at: At) -> list[Tensor]:
    """Return the gradients for a scale of 1 in this step."""
    module = Bag(SIZES)
    return [module.slope(i) * (at.number + 1) for i in module.trained]


def _times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    return lambda at: [one * factor(at) for one in _ones(at)]


def _mean(at: At) -> float:
    return digits(at.world_size) / at.world_size


def _own(at: At) -> float:
    return 10.0**at.rank


def _param(at: At) -> list[Tensor]:
    return [torch.full_like(one, 7.0) for one in _ones(at)]


def _is_own(at: At, got: Tensor, item: int) -> bool:
    fewer = len(at.seen.calls) < len(BUCKET_BYTES)
    return fewer and torch.allclose(got, _times(_own)(at)[item], rtol=ROUNDING)


def _of_another(at: At, got: Tensor, _item: int) -> bool:
    """Return whether these are right numbers of other gradients: all slopes are whole numbers."""
    times = got / (_mean(at) * (at.number + 1))
    return bool(((times - times.round()).abs() < 1e-9).all() and (times > 0.5).all())


def _early(at: At) -> bool:
    """Return whether a bucket started before the hook that filled it."""
    starts_s = [call.start_s for call in at.seen.calls]
    return len(starts_s) == len(at.seen.filled_s) and any(
        start_s < began_s for start_s, (began_s, _) in zip(starts_s, at.seen.filled_s, strict=True)
    )


def _late(at: At) -> list[int]:
    """Return the numbers of the buckets that started after the hook that filled them."""
    pairs = zip(at.seen.calls, at.seen.filled_s, strict=True)
    return [number for number, (call, (_, end_s)) in enumerate(pairs) if call.start_s > end_s]


NEXT_FULL = "self.ready.issuperset(self.buckets[self.next])"
LOOP = f"while self.next < len(self.buckets) and {NEXT_FULL}:"
SENDS = "self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))"
DIVIDES = "flat / dist.get_world_size()"
LENIENT = ("self.in_flight, strict=True", "self.in_flight, strict=False")
ALL_READY = "len(self.ready) == sum(map(len, self.buckets))"

OVERLAP = Exercise(
    key="ddp-2",
    title="hook and finish",
    check=OnRanks(
        observe_on_rank=_train,
        runs=lambda _p: ({}, {"order": OTHER_ORDER}),
        trouble=(
            ("hang", "", SOME_RANKS),
            ("mismatch", "", ORDER),
            ("raised", "NoneType", EARLY),
            ("raised", "list index out of range", PAST_THE_END),
            ("raised", "shape|dimensions|size", FLATTEN),
        ),
        expect=(
            Demand(
                lambda at: not at.seen.params_changed, "the parameters have changed", CHANGES_PARAM
            ),
            Demand(lambda at: not _early(at), "a bucket left too early", EARLY),
            Demand(
                lambda at: not at.seen.never_waited or at.seen.never_waited < len(at.seen.calls),
                "no all_reduce was waited for",
                NOT_WAITED,
            ),
            Demand(
                lambda at: not at.seen.never_waited,
                lambda at: f"{at.seen.never_waited} all_reduces were never waited for",
                NOT_ALL_WAITED,
            ),
            Numbers(
                "grads",
                _times(_mean),
                rtol=ROUNDING,
                what="the mean gradient",
                names=lambda _at: [f"parameter {i}" for i in Bag(SIZES).trained],
                predicates=(
                    (lambda at, got, i: at.number > 0 and _is_own(at, got, i), NOT_RESET),
                    (_is_own, NEVER_LEFT),
                ),
                causes=(
                    (SUMMED, _times(lambda at: digits(at.world_size))),
                    (MEAN_TWICE, _times(lambda at: _mean(at) / at.world_size)),
                    (BY_FOUR, _times(lambda at: digits(at.world_size) / 4)),
                    (NOT_WRITTEN, _times(_own)),
                    (ADDED, _times(lambda at: _own(at) + _mean(at))),
                    (REDUCES_PARAM, _param),
                ),
                otherwise=((_of_another, OTHER_GRADIENT),),
                look=lambda at: NOT_RESET if at.number else DIGITS,
            ),
            one_a_bucket(BUCKET_BYTES),
            Demand(
                lambda at: at.seen.calls[0].start_s < at.seen.backward_end_s,
                "nothing left before backward had ended",
                NO_OVERLAP,
            ),
            Demand(
                lambda at: not _late(at),
                lambda at: f"bucket {_late(at)[0]} left after the hook that filled it",
                LATE,
            ),
            Demand(
                lambda at: all(w.start_s > at.seen.backward_end_s for w in at.seen.waits),
                "it waits inside backward",
                WAITS_IN_HOOK,
            ),
            Demand(
                lambda at: at.seen.kept_bytes <= at.run.by_rank[at.rank]["step 1"].kept_bytes,
                lambda at: f"it keeps {at.seen.kept_bytes} bytes, more than after step 1",
                KEEPS,
            ),
        ),
        success="Means on 1 to 4 ranks; one all_reduce a bucket, in order, while backward runs.",
    ),
    wrong=(
        Edit("work.wait()", "pass", NOT_WAITED),
        Edit("len(self.buckets) and", "len(self.buckets) - 1 and", NEVER_LEFT, also=(LENIENT,)),
        Edit(DIVIDES, "flat", SUMMED),
        Edit(DIVIDES, "flat / dist.get_world_size() ** 2", MEAN_TWICE),
        Edit(DIVIDES, "flat / 4", BY_FOUR),
        Edit("param.grad.flatten()", "param.detach().flatten()", REDUCES_PARAM),
        Edit("param.grad.copy_(", "param.data.copy_(", CHANGES_PARAM),
        Edit(
            LOOP,
            "full = [b for b in self.buckets if self.ready.issuperset(b)]\n"
            "for bucket in [b for b in full if any(param is p for p in b)]:",
            ORDER,
            also=(("for param in self.buckets[self.next]]", "for param in bucket]"),),
        ),
        Edit(SENDS, f"if dist.get_rank() == 0:\n    {SENDS}", SOME_RANKS, also=(LENIENT,)),
        Edit("self.next += 1", "self.in_flight[-1][0].wait()\nself.next += 1", WAITS_IN_HOOK),
        Edit(
            "def on_grad(self, param):",
            "def on_grad(self, param):\n    self.ready.add(param)\n\ndef leave(self):",
            NO_OVERLAP,
            also=(
                ("self.ready.add(param)\n        while", "while"),
                ("for bucket, (work", "self.leave()\nfor bucket, (work"),
            ),
        ),
        Edit(LOOP, f"while {ALL_READY} and self.next < len(self.buckets):", LATE),
        Edit(NEXT_FULL, f"({NEXT_FULL} if self.next == 0 else {ALL_READY})", LATE),
        Edit(
            NEXT_FULL,
            "self.ready.issuperset(p for b in self.buckets[: self.next + 2] for p in b)",
            LATE,
        ),
        Edit(NEXT_FULL, "all(p.grad is not None for p in self.buckets[self.next])", EARLY),
        Edit(
            SENDS,
            "works = [dist.all_reduce(part, async_op=True) for part in flat.split(1)]\n"
            "for work in works[:-1]:\n    work.wait()\nself.in_flight.append((works[-1], flat))",
            ONE_EACH,
        ),
        Edit("param.grad.copy_(part.view_as(param))", "part.view_as(param)", NOT_WRITTEN),
        Edit("work.wait()", "self.in_flight[-1][0].wait()", NOT_ALL_WAITED),
        Edit(NEXT_FULL, "self.buckets[self.next][-1] in self.ready", EARLY),
        Edit("param.grad.copy_(part.view_as(param))", "param.grad = part", FLATTEN),
        Edit("param.grad.flatten()", "param.grad", FLATTEN),
        Edit("self.next < len(self.buckets) and ", "", PAST_THE_END),
        Edit("param.grad.copy_(", "param.grad.add_(", ADDED),
        Edit("zip(self.buckets,", "zip([b[::-1] for b in self.buckets],", OTHER_GRADIENT),
        Edit("self.ready.clear()", "pass", EARLY),
        Edit("self.next = 0", "pass", NOT_RESET, also=(LENIENT,)),
        Edit(
            "self.in_flight.clear()",
            "pass",
            KEEPS,
            also=(("self.in_flight, strict", "self.in_flight[-self.next :], strict"),),
        ),
    ),
)
