"""Exercise 2 of 06_ddp: a hook that all-reduces a bucket once it is full, and a finish that waits.

Whether a bucket leaves in time is an order, not a duration: it has to start between the beginning
and the end of the hook that filled it.
"""

import torch
from torch import Tensor

from course_lib.checks.ddp.overlap_steps import (
    BUCKETS,
    SIZES,
    bucket_bytes,
    disturbs_other_model,
    four_steps,
    has_fewer_digits,
    is_of_another,
    is_of_another_model,
    is_own,
    left_early,
    left_late,
    mean_of,
    own_of,
    parameters_of,
    rounding_of,
    times,
    total_of,
)
from course_lib.checks.ddp.parts import ONE_EACH, TOO_MUCH, Bag, one_a_bucket
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DIGITS_LOST, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks

OTHER_ORDER = (4, 0, 2, 1, 3)  # gradients become ready in another order on odd ranks

ORDER = Cause(
    "Gradients become ready in another order on another rank. Bucket i may be sent only after "
    "bucket i - 1: keep the number of the next bucket, and send while that one is full."
)
SOME_RANKS = Cause(
    "A bucket was sent on some ranks only. Every rank sends every bucket, whatever its gradients "
    "are, and in whatever order they are ready."
)
NEVER_LEFT = Cause(
    "A bucket was never sent. Is one full when all of its gradients are there, also the last one, "
    "which holds fewer bytes than the limit?"
)
NEXT_STAYS = Cause(
    "Reset every attribute to its value in __init__ at the end of finish (`next`, `in_flight`, "
    "...)."
)
OTHER_LENGTH = Cause(
    "in_flight and buckets differ in length: was every bucket sent, is everything reset in finish, "
    "and is it kept in self, not in the class?"
)
OTHER_MODEL = Cause(
    "What one model needs is changed by the other: keep it in self, not in the class."
)
HIDES = Cause(
    "inf and nan have to stay what they are: they tell that a step went wrong. Divide, and change "
    "nothing else."
)
HALF_DIGITS = Cause("Fewer bytes, and fewer digits: send in the dtype of the gradients.")
NO_DIMENSION = Cause("A parameter may be one number without a dimension: copy_ brings it back.")
IN_MEMORY_ORDER = Cause(
    "In memory order, ranks whose gradients have other strides add other elements: flatten() goes "
    "by index, whatever the strides."
)
NO_VIEW = Cause("A transposed gradient has no flat view: flatten() copies where it has to.")
NOT_RESET = Cause(
    "The first step was right: clear at the end of finish what was kept for one step."
)
DIGITS = Cause(
    "Which ranks are in it? Rank r's is 10**r times rank 0's. (Leave the bucket alone until "
    "wait().)"
)
FLATTEN = Cause(
    "Gradients have shapes: flatten each one before you put it into the bucket, and bring its part "
    "back with view_as(param)."
)
PAST_THE_END = Cause("Is `next` past the last bucket, or was a bucket never sent?")
EARLY = Cause(
    "A bucket was sent before all of its gradients were complete in this step: note in on_grad "
    "which parameters are, and clear that in finish. (`param.grad is not None` proves nothing: "
    "zero_grad(set_to_none=False) leaves zeros.)"
)
NOT_WAITED = Cause(
    "A bucket is read before the others' gradients are in it. Call wait() on what all_reduce "
    "returned, first."
)
NOT_WRITTEN = Cause(
    "That is this rank's own gradient: copy the mean back into param.grad itself. (flatten() of a "
    "transposed one is a copy.)"
)
SUMMED = Cause("{p} times too large: summed, not averaged.")
MEAN_TWICE = Cause("{p} times too small: the mean was taken twice.")
BY_FOUR = Cause("Divided by 4: divide by the number of ranks, whatever it is.")
ADDED = Cause("The mean was added to this rank's own gradient: put it in its place.")
REDUCES_PARAM = Cause("That is the parameter: a hook gets the parameter; reduce param.grad.")
CHANGES_PARAM = Cause("Leave the parameter as it is: read and write only param.grad.")
OTHER_GRADIENT = Cause(
    "Numbers of another gradient: split the bucket in the order in which it was filled."
)
NOT_ALL_WAITED = Cause(
    "Some were complete in time by luck. Call wait() on every handle: one says nothing about "
    "the others."
)
NO_OVERLAP = Cause("No overlap: send a bucket in on_grad, as soon as its last gradient is there.")
LATE = Cause(
    "It is sent later than it could be: send a bucket in the very call of on_grad that fills it, "
    "each of them, also the last one."
)
WAITS_IN_HOOK = Cause("Call wait() in finish, on what all_reduce(..., async_op=True) returns.")
KEEPS = Cause("Clear in finish what was in flight.")

NEXT_FULL = "self.ready.issuperset(self.buckets[self.next])"
LOOP = f"while self.next < len(self.buckets) and {NEXT_FULL}:"
SENDS = "self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))"
DIVIDES = "flat / dist.get_world_size()"
LENIENT = ("self.in_flight, strict=True", "self.in_flight, strict=False")
SWAPPED = (
    "bucket, (work, flat) in zip(self.buckets, self.in_flight,",
    "(work, flat), bucket in zip(self.in_flight, self.buckets,",
)
CLOSES = ("for param in self.buckets[self.next]])", "for param in self.buckets[self.next]]))")
ALL_READY = "len(self.ready) == sum(map(len, self.buckets))"


def _is_right_on_the_diagonal(at: At, got: Tensor, item: int) -> bool:
    need = times(mean_of)(at)[item]
    return got.shape == need.shape == (2, 2) and torch.allclose(got.diag(), need.diag())


AS_IT_LIES = "(param.grad if param.grad.is_contiguous() else param.grad.t())"

OVERLAP = Exercise(
    key="ddp-2",
    title="hook and finish",
    check=OnRanks(
        observe_on_rank=four_steps,
        runs=lambda _p: ({}, {"order": OTHER_ORDER, "dtype": torch.float32}),
        trouble=(
            ("hang", "", SOME_RANKS),
            ("mismatch", "", ORDER),
            ("raised", "'wait'", WAITS_IN_HOOK),
            ("raised", "NoneType.*(flatten|view|reshape|ravel)|got NoneType", EARLY),
            ("raised", "argument 2 is longer", OTHER_LENGTH),
            ("raised", "0-dim", NO_DIMENSION),
            ("raised", "view size", NO_VIEW),
            ("raised", "list index out of range", PAST_THE_END),
            ("raised", "^(?!NameError|AttributeError).*(shape|dimension|size)", FLATTEN),
        ),
        expect=(
            Demand(
                lambda at: not at.seen.params_changed, "the parameters have changed", CHANGES_PARAM
            ),
            Demand(
                lambda at: not at.seen.stopped or at.number != 1,
                lambda at: f"zip in finish failed in {at.label}: {at.seen.stopped}",
                NEXT_STAYS,
            ),
            Demand(
                lambda at: (
                    not at.seen.stopped or at.number > 0 or len(at.seen.calls) == len(BUCKETS)
                ),
                lambda at: f"fewer buckets were sent than there are: {at.seen.stopped}",
                NEVER_LEFT,
            ),
            Demand(
                lambda at: not at.seen.stopped,
                lambda at: f"zip in finish failed in {at.label}: {at.seen.stopped}",
                OTHER_LENGTH,
            ),
            Demand(
                lambda at: not is_of_another_model(at),
                "two models are trained at the same time, and the first one gets the other's mean",
                OTHER_MODEL,
            ),
            Demand(lambda at: not left_early(at), "a bucket was sent too early", EARLY),
            Demand(
                lambda at: at.seen.never_waited < len(bucket_bytes(at)),
                "no all_reduce was waited for",
                NOT_WAITED,
            ),
            Demand(
                lambda at: not at.seen.never_waited,
                lambda at: f"{at.seen.never_waited} all_reduces were never waited for",
                NOT_ALL_WAITED,
            ),
            Demand(
                lambda at: not has_fewer_digits(at),
                lambda at: f"it sends {at.seen.calls[0].num_bytes} bytes of {bucket_bytes(at)[0]}",
                HALF_DIGITS,
            ),
            Numbers(
                "grads",
                times(mean_of),
                rtol=rounding_of,
                what="the mean gradient",
                names=lambda _at: [f"parameter {i}" for i in Bag(SIZES).trained],
                predicates=(
                    (lambda at, got, i: at.number > 0 and is_own(at, got, i), NOT_RESET),
                    (is_own, NEVER_LEFT),
                    (lambda at, got, _i: at.number == 3 and bool(got.isfinite().all()), HIDES),
                ),
                causes=(
                    (SUMMED, times(total_of)),
                    (MEAN_TWICE, times(lambda at: mean_of(at) / at.world_size)),
                    (BY_FOUR, times(lambda at: total_of(at) / 4)),
                    (NOT_WRITTEN, times(own_of)),
                    (ADDED, times(lambda at: own_of(at) + mean_of(at))),
                    (REDUCES_PARAM, parameters_of),
                ),
                otherwise=(
                    (_is_right_on_the_diagonal, IN_MEMORY_ORDER),
                    (is_of_another, OTHER_GRADIENT),
                ),
                look=lambda at: NOT_RESET if at.number else DIGITS,
            ),
            Demand(
                lambda at: not disturbs_other_model(at),
                "a step of one model was between the gradients of another, which now has no mean",
                OTHER_MODEL,
            ),
            one_a_bucket(bucket_bytes),
            Demand(
                lambda at: at.seen.calls[0].start_s < at.seen.backward_end_s,
                "nothing was sent before backward ended",
                NO_OVERLAP,
            ),
            Demand(
                lambda at: not left_late(at),
                lambda at: f"bucket {left_late(at)[0]} was sent after the hook that filled it",
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
        Edit("self.next = 0", "pass", NEXT_STAYS),
        Edit("self.in_flight.clear()", "pass", NEXT_STAYS, also=(SWAPPED,)),
        Edit("self.in_flight.clear()", "pass", OTHER_LENGTH),
        Edit("len(self.buckets) and", "len(self.buckets) - 1 and", NEVER_LEFT),
        Edit("len(self.buckets) and", "len(self.buckets) - 1 and", OTHER_LENGTH, also=(SWAPPED,)),
        Edit(
            "def __init__(self, module, buckets):",
            "in_flight = []\n\ndef __init__(self, module, buckets):",
            OTHER_LENGTH,
            also=(("self.ready, self.in_flight = set(), []", "self.ready = set()"),),
        ),
        Edit(
            "def __init__(self, module, buckets):",
            "in_flight = []\n\ndef __init__(self, module, buckets):",
            OTHER_MODEL,
            also=(
                ("self.ready, self.in_flight = set(), []", "self.ready = set()"),
                LENIENT,
            ),
        ),
        Edit(
            "self.ready, self.in_flight = set(), []",
            "pass",
            OTHER_MODEL,
            also=(
                (
                    "def __init__(self, module, buckets):",
                    "ready, in_flight = set(), []\n\ndef __init__(self, module, buckets):",
                ),
            ),
        ),
        Edit(SENDS, f"if flat.any():\n    {SENDS}", SOME_RANKS, also=(LENIENT,)),
        Edit(DIVIDES, f"({DIVIDES}).clamp(-1e6, 1e6)", HIDES),
        Edit("flat = torch.cat(", "flat = torch.nan_to_num(torch.cat(", HIDES, also=(CLOSES,)),
        Edit(DIVIDES, "(flat.float() / dist.get_world_size()).to(flat.dtype)", DIGITS_LOST),
        Edit(
            "flat = torch.cat(", "flat = torch.Tensor.bfloat16(torch.cat(", HALF_DIGITS, (CLOSES,)
        ),
        Edit("flat = torch.cat(", "flat = torch.Tensor.double(torch.cat(", TOO_MUCH, (CLOSES,)),
        Edit(
            "param.grad.copy_(part.view_as(param))", "param.grad.flatten().copy_(part)", NOT_WRITTEN
        ),
        Edit("param.grad.copy_(part", "param.grad[:] = (part", NO_DIMENSION),
        Edit("param.grad.flatten()", "param.grad.view(-1)", NO_VIEW),
        Edit(
            "param.grad.flatten()",
            f"{AS_IT_LIES}.flatten()",
            IN_MEMORY_ORDER,
            also=(
                (
                    "param.grad.copy_(part.view_as(param))",
                    f"{AS_IT_LIES}.copy_(part.view_as(param))",
                ),
            ),
        ),
        Edit(
            "self.in_flight.clear()",
            "pass",
            KEEPS,
            also=(("self.in_flight, strict", "self.in_flight[-self.next :], strict"),),
        ),
    ),
)
