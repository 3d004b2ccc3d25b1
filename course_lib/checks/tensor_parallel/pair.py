"""Exercise 1 of 07_tensor_parallel: the pair f and g.

Rank r's part multiplies by 10**r, so that a wrong sum tells which ranks are in it. In bfloat16 it
multiplies by r: the sums are exact, and what rank 0 brings is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import come_late, watched_handles
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DTYPE, Demand, Numbers, Untouched
from course_lib.checks.on_ranks import At, OnRanks, calls_of, copied
from course_lib.checks.tensor_parallel.parts import (
    NOT_WAITED,
    OTHER_SIZE,
    OUTSIDE,
    ROUNDING,
    changed,
    is_outside,
    one_sum,
)
from course_lib.core import Event
from course_lib.ranks import record

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Use:
    """An x, the gradient from above, and what each rank's part multiplies by."""

    x: Tensor
    up: Tensor
    factor: Callable[[int], float]


USES = {
    "x of [2, 3]": Use(
        torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).double(),
        torch.tensor([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]]).double(),
        lambda rank: 10.0**rank,
    ),
    "x of [1, 3, 5] in bfloat16": Use(
        torch.arange(1, 16).view(1, 3, 5).bfloat16(),
        torch.arange(2, 17).view(1, 3, 5).bfloat16(),
        float,
    ),
}

F_COPIES = Cause("f sums in forward: it hands x on as it is, and sums in backward.")
NO_SUM = Cause("Does forward of g return the sum?")
OWN_SUM = Cause(
    "That is this rank's own part: g has to sum in forward. Do you return the tensor that was "
    "summed?"
)
NO_SUM_BACK = Cause(
    "That is this rank's own part of the gradient: x was used on every rank, so backward of f "
    "has to add up what all of them found. Nothing fails without it; the weights before x train "
    "on a part of their gradient. Do you return the tensor that was summed?"
)
DIGITS = Cause("Each rank brings its own digit: whose is missing, and whose is in it twice?")
MEAN = Cause("That is the mean: the parts are terms of one sum.")
BY_FOUR = Cause("Divided by 4: the parts are terms of one sum, on any number of ranks.")
TWICE = Cause("{p} times too large: summed twice.")
WHOLE_ALREADY = Cause(
    "{p} times too large: every rank has the whole gradient of the sum already, so g hands it on "
    "as it is."
)
HANDS_ON = Cause("Behind g, each rank's part gets the gradient of the sum, as it is.")
DIVIDED_BACK = Cause("A term of a sum has the gradient of the sum: nothing to divide by.")
MEAN_BACK = Cause("That is the mean: x was used {p} times, and the gradients add up.")
NO_GRADIENT = Cause(
    "Did something leave the graph, by detach or no_grad? What backward returns is the gradient."
)
KEEPS = Cause(
    "Somebody else may still need it. all_reduce, too, works in place: give it a clone, a new one "
    "each time."
)
SHARED = Cause(
    "Where x also goes around the part, as in x + part(x), both ways share one gradient tensor: "
    "it was changed in place. Sum a clone."
)
G_SUMS = Cause("g sums what part returned, with one all_reduce; f sends nothing in forward.")
F_SUMS = Cause("f sums the gradients of all ranks, with one all_reduce; g hands its own on.")
SOME_RANKS = Cause(
    "A sum was made on some ranks only: every rank has to call all_reduce, whatever it brings, "
    "and be it zeros."
)


@dataclass
class Used:
    """What one rank saw of one use; `around` is the gradient of x + together(x, nothing)."""

    inside: Any
    out: Any
    part_grad: Any
    x_grad: Any
    around: Any
    forward: list[Event]
    backward: list[Event]
    changed: tuple[str, ...]
    never_waited: int
    outside: bool


def _use(rank: int, answer: Callable[[Tensor, Part], Any]) -> dict[str, Used]:
    """Run each use forward and backward; in both of the first one, the last rank comes late."""
    used, outside = dict[str, Used](), False
    for name, use in USES.items():
        x, up, seen = use.x.clone().requires_grad_(), use.up.clone(), dict[str, Any]()
        part = _watched_part(use.factor(rank), seen)
        with watched_handles() as open_ones:
            if not used:
                come_late(rank)
            with record() as forward:
                out = answer(x, part)
            kept = copied(out)
            if not used:
                come_late(rank)
            with record() as backward:
                if isinstance(out, Tensor) and out.requires_grad:
                    outside = is_outside(partial(out.backward, up))
        around = _around(answer, use) if isinstance(out, Tensor) else None
        returned = seen.get("out", use.x), use.x * (use.factor(rank) if "out" in seen else 1)
        used[name] = Used(
            inside=seen.get("inside"),
            out=kept,
            part_grad=seen.get("grad"),
            x_grad=x.grad,
            around=around,
            forward=calls_of(forward.events),
            backward=calls_of(backward.events),
            changed=changed(
                x=(x, use.x),
                what_part_returned=returned,
                the_gradient_from_above=(up, use.up),
                the_sum_returned_before=(out, kept) if isinstance(out, Tensor) else (x, use.x),
            ),
            never_waited=len(open_ones),
            outside=outside,
        )
    return used


def _watched_part(factor: float, seen: dict[str, Any]) -> Part:
    """Return a part that notes what it gets, what it returns, and the gradient of that."""

    def part(inside: Tensor) -> Tensor:
        seen["inside"], seen["out"] = copied(inside), inside * factor
        if seen["out"].requires_grad:
            seen["out"].register_hook(lambda grad: seen.__setitem__("grad", copied(grad)))
        return seen["out"]

    return part


def _around(answer: Callable[[Tensor, Part], Tensor], use: Use) -> Tensor | None:
    """Return the gradient of x + together(x, nothing), where both ways share their tensors."""
    x = use.x.clone().requires_grad_()
    out = x + answer(x, lambda inside: inside.view_as(inside))
    is_outside(partial(out.backward, use.up.clone()))  # PyTorch's warning is told elsewhere
    return x.grad


def _x(times: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: USES[at.label].x * times(at)


def _up(times: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: USES[at.label].up * times(at)


def _own(at: At) -> float:
    return USES[at.label].factor(at.rank)


def _total(at: At) -> float:
    return sum(map(USES[at.label].factor, range(at.world_size)))


def _one(_at: At) -> float:
    return 1.0


def _p(at: At) -> float:
    return at.world_size


def _num_bytes(at: At) -> int:
    return USES[at.label].x.nbytes


LATE = ((lambda at, *_: at.seen.never_waited > 0, NOT_WAITED),)
F, G = "total = grad.clone()", "total = x.clone()"  # backward of f, forward of g
NOT_WAITING = "dist.all_reduce(total, async_op=True)\nreturn total.clone()"
ONLY_ON_SOME = "if not total.any():\n    return total"

PAIR = Exercise(
    key="tensor_parallel-1",
    title="f and g",
    check=OnRanks(
        observe_on_rank=_use,
        trouble=(("hang", "", SOME_RANKS), ("mismatch", "", SOME_RANKS)),
        expect=(
            Numbers("inside", _x(_one), ((F_COPIES, _x(_p)),), what="what part gets"),
            Numbers(
                "out",
                _x(_total),
                what="the sum",
                rtol=ROUNDING,
                predicates=((lambda _at, got, _: got is None, NO_SUM), *LATE),
                causes=(
                    (OWN_SUM, _x(_own)),
                    (MEAN, _x(lambda at: _total(at) / at.world_size)),
                    (BY_FOUR, _x(lambda at: _total(at) / 4)),
                    (TWICE, _x(lambda at: _total(at) * at.world_size)),
                ),
                look=DIGITS,
            ),
            Untouched(KEEPS),
            one_sum("forward", _num_bytes, G_SUMS),
            Demand(
                lambda at: at.seen.part_grad is not None and at.seen.x_grad is not None,
                "no gradient arrives",
                NO_GRADIENT,
            ),
            Numbers(
                "part_grad",
                _up(_one),
                what="the gradient that part gets",
                rtol=ROUNDING,
                causes=(
                    (WHOLE_ALREADY, _up(_p)),
                    (DIVIDED_BACK, _up(lambda at: 1 / at.world_size)),
                ),
                look=HANDS_ON,
            ),
            Numbers(
                "x_grad",
                _up(_total),
                what="the gradient of x",
                rtol=ROUNDING,
                predicates=LATE,
                causes=(
                    (NO_SUM_BACK, _up(_own)),
                    (MEAN_BACK, _up(lambda at: _total(at) / at.world_size)),
                    (TWICE, _up(lambda at: _total(at) * at.world_size)),
                ),
                look=DIGITS,
            ),
            one_sum("backward", _num_bytes, F_SUMS),
            Numbers(
                "around",
                _up(lambda at: at.world_size + 1),
                what="the gradient of x + part(x)",
                rtol=ROUNDING,
                look=SHARED,
            ),
            Demand(
                lambda at: not at.seen.outside,
                "all_reduce got a tensor that requires a gradient",
                OUTSIDE,
            ),
        ),
        success=("Sums and gradients on 1 to 4 ranks; one all_reduce in forward, one in backward."),
    ),
    wrong=(
        Edit(F, "return grad", NO_SUM_BACK),
        Edit("part(CopyToRegion.apply(x))", "part(x)", NO_SUM_BACK),
        Edit(
            "return grad",
            "total = grad.clone()\ndist.all_reduce(total)\nreturn total",
            WHOLE_ALREADY,
        ),
        Edit("return grad", "return grad / dist.get_world_size()", DIVIDED_BACK),
        Edit(G, "total = x / dist.get_world_size()", MEAN),
        Edit(G, "total = x / 4", BY_FOUR),
        Edit(F, "total = grad / dist.get_world_size()", MEAN_BACK),
        Edit(G, "return x.clone()", OWN_SUM),
        Edit(G, f"{G}\n{NOT_WAITING}", NOT_WAITED),
        Edit(F, f"{F}\n{NOT_WAITING}", NOT_WAITED),
        Edit(
            "ReduceFromRegion.apply(part(CopyToRegion.apply(x)))",
            "CopyToRegion.apply(part(ReduceFromRegion.apply(x)))",
            F_COPIES,
        ),
        Edit(G, "total = x", KEEPS),
        Edit(
            G,
            "sums = together.__dict__\n"
            "total = sums.setdefault(str(x.shape), torch.empty_like(x)).copy_(x)",
            KEEPS,
        ),
        Edit(F, "total = grad", SHARED),
        Edit("return grad", "kept = grad.clone()\ngrad.zero_()\nreturn kept", KEEPS),
        Edit(
            G,
            "parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
            "dist.all_gather(parts, x.contiguous())\nreturn torch.stack(parts).sum(0)",
            G_SUMS,
        ),
        Edit(G, "total = x.clone()\ndist.all_reduce(total)\nreturn None", NO_SUM),
        Edit("return grad", "pass", NO_GRADIENT),
        Edit(G, "total = x.clone()\ndist.all_reduce(total)\nreturn x.clone()", OWN_SUM),
        Edit(
            "ReduceFromRegion.apply(part(CopyToRegion.apply(x)))",
            "ReduceFromRegion.forward(None, part(x).detach())",
            NO_GRADIENT,
        ),
        Edit(
            "ReduceFromRegion.apply(part(",
            "ReduceFromRegion.forward(None, part(",
            OUTSIDE,
        ),
        Edit(G, "total = x.float()", DTYPE),
        Edit(G, "total = x.clone().double()", DTYPE),
        Edit(F, "total = grad.float()", OTHER_SIZE),
        Edit(G, f"{G}\n{ONLY_ON_SOME}", SOME_RANKS),
        Edit(F, f"{F}\n{ONLY_ON_SOME}", SOME_RANKS),
    ),
)
