"""Exercise 2 of 06_ddp: a hook that all-reduces a full bucket, and a finish that waits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import Bag, grads_of
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import (
    AT_ONCE,
    DIGITS,
    HAS_STATE,
    KEEPS_DTYPE,
    REDUCES,
    SHARED,
)
from course_lib.checks.watch import ALWAYS, ORDER, Watch, kept_bytes

SIZES, BUCKETS = (4, 2, 2, 1, 4), ((4, 3), (2,), (0,))  # numbers, and the parameters of a bucket

ORDER_OF_BUCKETS = Cause(
    "Gradients become ready in another order on another rank. Bucket i may be sent only after "
    "bucket i - 1: keep the number of the next bucket, and send while that one is full."
)
NEVER_LEFT = Cause("A bucket was never sent. When is the last one full, which holds fewer bytes?")
NOT_RESET = Cause(
    "The first step was right: at the end of finish, reset every attribute to its value in "
    "__init__ (`next`, `in_flight`, ...)."
)
EARLY = Cause(
    "A bucket was sent before all of its gradients were complete in this step: note in on_grad "
    "which parameters are, and clear that in finish. (`param.grad is not None` proves nothing: "
    "zero_grad(set_to_none=False) leaves zeros.)"
)
LATE = Cause("Send a bucket in the very call of on_grad that fills it, each of them.")
FLATTEN = Cause(
    "Gradients have shapes: flatten each one before you put it into the bucket, and bring its part "
    "back with view_as(param)."
)
NO_VIEW = Cause("A transposed gradient has no flat view: flatten() copies where it has to.")
ONE_NUMBER = Cause("A parameter may be one number without a dimension: copy_ brings it back.")
PAST_THE_END = Cause("Is `next` past the last bucket? Then there is nothing left to send.")
NOT_WRITTEN = Cause(
    "That is this rank's own gradient: copy the mean back into param.grad itself. (flatten() of a "
    "transposed one is a copy.)"
)
SUMMED = Cause("{p} times too large: summed, not averaged.")
MEAN_TWICE = Cause("{p} times too small: the mean was taken twice.")
ADDED = Cause("The mean was added to this rank's own gradient: put it in its place.")
REDUCES_PARAM = Cause("That is the parameter: a hook gets the parameter; reduce param.grad.")
OTHER_GRADIENT = Cause(
    "Numbers of another gradient: split the bucket in the order in which it was filled, by index, "
    "whatever the strides of a gradient."
)
KEEPS = Cause("Clear in finish what was in flight.")


def train(
    rank: int,
    answer: Callable[..., Any],
    order: Sequence[int] = (),
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Run four steps, two of them while another model is between its backward and its finish.

    Step 3: rank 0 has zeros, and gradients are not None before it. Step 4: it has inf or nan.
    """
    order = order if rank % 2 else ()  # on odd ranks, gradients are ready in another order
    module, other = (Bag(SIZES, order=order, odd=True, lies=rank != 1, dtype=dtype) for _ in "ab")
    watch, (buckets, beside) = Watch(), map(_buckets, (module, other))
    for number, bucket in enumerate(buckets):
        _mark_when_full(watch, f"bucket {number} full", bucket)
    model, other_model = answer(module, [[*one] for one in buckets]), answer(other, beside)
    kept, last = 0, torch.inf if dist.get_world_size() % 2 else torch.nan
    for number, factor in enumerate((1, 2, 3, 4) if rank else (1, 2, 0, last)):
        module.zero_grad(set_to_none=number != 2)
        early = {1: [*beside[0][:1]], 2: [p for one in beside for p in one]}.get(number, [])
        others_loss = other(5 * 10.0**rank)
        if early:
            others_loss.backward(inputs=early, retain_graph=True)
        loss = module(factor / 3 * 10.0**rank)
        with watch.step(f"step {number + 1}", module=module) as step:
            loss.backward()
            watch.mark("backward ends")
            model.finish()
        kept = kept or kept_bytes(model)
        step.show(gradients=grads_of(module), kept=max(0, kept_bytes(model) - kept))
        if early:
            with watch.step(f"step {number + 1}, the other model") as step:
                rest = [p for one in beside for p in one if all(p is not e for e in early)]
                if rest:
                    others_loss.backward(inputs=rest)
                other_model.finish()
            step.show(gradients=grads_of(other))
            other.zero_grad()
    return watch.seen


def _buckets(module: Bag) -> list[list[Any]]:
    return [[module.weights[i] for i in bucket] for bucket in BUCKETS]


def _mark_when_full(watch: Watch, text: str, bucket: list[Any]) -> None:
    missing = {*bucket}

    def note(param: Tensor) -> None:
        missing.discard(param)
        if not missing:
            watch.mark(text)
            missing.update(bucket)

    for param in bucket:
        param.register_post_accumulate_grad_hook(note)


NEXT_FULL = "self.ready.issuperset(self.buckets[self.next])"
LOOP = f"while self.next < len(self.buckets) and {NEXT_FULL}:"
DIVIDES, COPIES = "flat / dist.get_world_size()", "param.grad.copy_(part.view_as(param))"
PARTS = "torch.cat([param.grad.flatten() for param in self.buckets[self.next]])"
IN_MEMORY = "(param.grad if param.grad.is_contiguous() else param.grad.t())"
ALL_READY = "len(self.ready) == sum(map(len, self.buckets))"
LENIENT = ("self.in_flight, strict=True", "self.in_flight, strict=False")
IN_THE_CLASS = ("def __init__(self, module,", "in_flight = []\n\ndef __init__(self, module,")
IN_SELF = ("self.ready, self.in_flight = set(), []", "self.ready = set()")

OVERLAP = Exercise(
    key="ddp-2",
    title="hook and finish",
    check=ByExample(
        observe_on_rank=train,
        runs=lambda _p: ({}, {"order": (4, 0, 2, 1, 3), "dtype": torch.float32}),
        facets=(*ALWAYS, ORDER, "gradients", "kept"),
        looks=(("mismatch", ORDER_OF_BUCKETS),),
        success="Means on 1 to 4 ranks; one all_reduce a bucket, in order, while backward runs.",
    ),
    wrong=(
        Edit("len(self.buckets) and", "len(self.buckets) - 1 and", NEVER_LEFT, also=(LENIENT,)),
        Edit("len(self.buckets) and", "len(self.buckets) - 1 and", NEVER_LEFT),
        Edit(DIVIDES, "flat", SUMMED),
        Edit(DIVIDES, f"{DIVIDES} ** 2", MEAN_TWICE),
        Edit("param.grad.flatten()", "param.detach().flatten()", REDUCES_PARAM),
        Edit(
            LOOP,
            "full = [b for b in self.buckets if self.ready.issuperset(b)]\n"
            "for bucket in [b for b in full if any(param is p for p in b)]:",
            ORDER_OF_BUCKETS,
            also=(("for param in self.buckets[self.next]]", "for param in bucket]"),),
        ),
        Edit("dist.all_reduce(flat, async_op=True)", "dist.all_reduce(flat)", AT_ONCE),
        Edit(
            "def on_grad(self, param):",
            "def on_grad(self, param):\n    self.ready.add(param)\n\ndef leave(self):",
            LATE,
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
        Edit(NEXT_FULL, "self.buckets[self.next][-1] in self.ready", EARLY),
        Edit("self.ready.clear()", "pass", EARLY),
        Edit(COPIES, "part.view_as(param)", NOT_WRITTEN),
        Edit(COPIES, "param.grad.flatten().copy_(part)", NOT_WRITTEN),
        Edit(COPIES, "param.grad = part", FLATTEN),
        Edit("param.grad.flatten()", "param.grad", FLATTEN),
        Edit("param.grad.flatten()", "param.grad.view(-1)", NO_VIEW),
        Edit(COPIES, "param.grad[:] = part.view_as(param)", ONE_NUMBER),
        Edit(PARTS, f"{PARTS}.bfloat16()", DIGITS),
        Edit(PARTS, f"{PARTS}.double()", DIGITS),
        Edit(
            "param.grad.flatten()",
            f"{IN_MEMORY}.flatten()",
            OTHER_GRADIENT,
            also=((COPIES, COPIES.replace("param.grad", IN_MEMORY)),),
        ),
        Edit(*IN_THE_CLASS, SHARED, also=(IN_SELF,)),
        Edit(*IN_THE_CLASS, SHARED, also=(IN_SELF, LENIENT)),
        Edit("self.next < len(self.buckets) and ", "", PAST_THE_END),
        Edit("param.grad.copy_(", "param.grad.add_(", ADDED),
        Edit("zip(self.buckets,", "zip([b[::-1] for b in self.buckets],", OTHER_GRADIENT),
        Edit("self.next = 0", "pass", NOT_RESET, also=(LENIENT,)),
        Edit("self.next = 0", "pass", NOT_RESET),
        Edit("self.in_flight.clear()", "pass", NOT_RESET),
        Edit(
            "self.in_flight.clear()",
            "pass",
            KEEPS,
            also=(("self.in_flight, strict", "self.in_flight[-self.next :], strict"),),
        ),
        *(*REDUCES, *KEEPS_DTYPE, *HAS_STATE),
    ),
)
