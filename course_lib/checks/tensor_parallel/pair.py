"""Exercise 1 of 07_tensor_parallel: the pair f and g.

Rank r's part multiplies by 10**r, so a wrong sum tells which ranks are in it. The planted mistakes
are in `pair_answers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import come_late
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, run
from course_lib.checks.tensor_parallel import pair_answers as planted
from course_lib.checks.tensor_parallel.parts import (
    WORLD_SIZES,
    calls_in,
    close_to,
    expect_close,
    expect_one_sum,
)
from course_lib.core import Event
from course_lib.ranks import Ranks, record

Part = Callable[[Tensor], Tensor]
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).double()
UP = torch.tensor([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]]).double()  # the gradient from above
NUM_BYTES = 8 * X.numel()

OWN_SUM = (
    "That is this rank's own part: g has to sum in forward. Do you return the tensor that was "
    "summed? (With async_op: did you wait?)"
)
NO_SUM_BACK = (
    "That is this rank's own part of the gradient: x was used on every rank, so backward of f "
    "has to add up what all of them found. Nothing fails without it; the weights before x train "
    "on a part of their gradient. Do you return the tensor that was summed? (With async_op: did "
    "you wait?)"
)
DIGITS = "Each rank brings its own digit: whose is missing? (With async_op: did you wait?)"
KEEPS = "all_reduce works in place. Clone the tensor first: somebody else may still need it."
SHARED = (
    "Where x also goes around the part, as in x + part(x), both ways share one gradient tensor: "
    "all_reduce has changed it in place. Sum a clone."
)


@dataclass
class Used:
    """The results of one use on one rank."""

    inside: Tensor
    out: Tensor
    part_after: Tensor
    x_after: Tensor
    part_grad: Tensor | None
    x_grad: Tensor | None
    forward: list[Event]
    backward: list[Event]
    around: Tensor | None


def _use(rank: int, answer: Callable[[Tensor, Part], Tensor]) -> Used:
    x, seen = X.clone().requires_grad_(), dict[str, Tensor]()

    def keep(grad: Tensor | None) -> None:
        if grad is not None:
            seen["grad"] = grad.clone()

    def part(inside: Tensor) -> Tensor:
        seen["inside"] = inside.detach().clone()
        seen["out"] = inside * 10.0**rank
        if seen["out"].requires_grad:
            seen["out"].register_hook(keep)
        return seen["out"]

    come_late(rank)
    with record() as forward:
        out = answer(x, part)
    if not isinstance(out, Tensor):
        raise CheckFailed(f"need a tensor; got {out!r}. Does forward of g return the sum?")
    kept = out.detach().clone()
    come_late(rank)
    with record() as backward:
        if out.requires_grad:
            out.backward(UP.clone())
    return Used(
        inside=seen["inside"],
        out=kept,
        part_after=seen["out"].detach(),
        x_after=x.detach(),
        part_grad=seen.get("grad"),
        x_grad=x.grad,
        forward=calls_in(forward.events),
        backward=calls_in(backward.events),
        around=_around(answer),
    )


def _around(answer: Callable[[Tensor, Part], Tensor]) -> Tensor | None:
    """Return the gradient of x + together(x, nothing), where both ways share their tensors."""
    x = X.clone().requires_grad_()
    (x + answer(x, lambda inside: inside.view_as(inside))).backward(UP.clone())
    return x.grad


def check_pair(answer: Callable[[Tensor, Part], Tensor]) -> str:
    """Check 1 to 4 ranks: values and gradients on both sides, one all_reduce each way."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            for rank, used in enumerate(run(ranks, _use, answer)):
                _judge(used, rank, p)
    return "Sums and gradients on 1 to 4 ranks; one all_reduce in forward, one in backward."


def _judge(used: Used, rank: int, p: int) -> None:
    where, total = f"rank {rank} of {p}", float(sum(10**other for other in range(p)))
    inside = [(close_to(X * p), "f sums in forward: it hands x on, and sums in backward.")]
    expect_close(used.inside, X, f"{where}, what part gets", inside, "f hands x on as it is.")
    expect_close(used.out, X * total, f"{where}, the sum", _sum_causes(rank, p, total), DIGITS)
    expect_close(used.x_after, X, f"{where}, x afterwards", look=KEEPS)
    expect_close(used.part_after, X * 10.0**rank, f"{where}, what part returned", look=KEEPS)
    expect_one_sum(f"{where}, forward", used.forward, NUM_BYTES, "g sums what part returned.")
    if used.part_grad is None or used.x_grad is None:
        raise CheckFailed(
            f"{where}: no gradient arrives. Did something leave the graph, by detach or no_grad? "
            "What backward returns is the gradient."
        )
    expect_close(used.part_grad, UP, f"{where}, the gradient that part gets", _above_causes(p))
    below = _below_causes(rank, p, total)
    expect_close(used.x_grad, UP * total, f"{where}, the gradient of x", below, DIGITS)
    says = "f sums the gradients of all ranks; g hands its own on."
    expect_one_sum(f"{where}, backward", used.backward, NUM_BYTES, says)
    expect_close(used.around, UP * (p + 1), f"{where}, the gradient of x + part(x)", look=SHARED)


def _sum_causes(rank: int, p: int, total: float) -> list[Cause]:
    return [
        (close_to(X * 10.0**rank), OWN_SUM),
        (close_to(X * total / p), "That is the mean: the parts are terms of one sum."),
        (close_to(X * total / 4), "Divided by 4: the parts are terms of one sum."),
        (close_to(X * total * p), "Summed twice."),
    ]


def _above_causes(p: int) -> list[Cause]:
    return [
        (
            close_to(UP * p),
            f"{p} times too large: every rank has the whole gradient of the sum already, so g "
            "hands it on as it is.",
        ),
        (close_to(UP / p), "A term of a sum has the gradient of the sum: nothing to divide by."),
    ]


def _below_causes(rank: int, p: int, total: float) -> list[Cause]:
    return [
        (close_to(UP * 10.0**rank), NO_SUM_BACK),
        (close_to(UP * total / p), "That is the mean: x was used p times, the gradients add up."),
        (close_to(UP * total * p), f"{p} times too large: summed twice."),
    ]


PAIR = Exercise(
    key="tensor_parallel-1",
    title="f and g",
    check=check_pair,
    reference=planted.together,
    mistakes=(
        Mistake("no all_reduce in backward", planted.pair(lambda grad: grad), says="has to add up"),
        Mistake("no f at all", planted.without_f, says="has to add up"),
        Mistake(
            "g sums back, too",
            planted.pair(g_backward=planted.summed),
            says="g hands it on as it is",
        ),
        Mistake(
            "g divides back",
            planted.pair(g_backward=planted.mean_of_own),
            says="nothing to divide by",
        ),
        Mistake("mean in forward", planted.pair(g_forward=planted.mean), says="terms of one sum"),
        Mistake("mean in backward", planted.pair(planted.mean), says="the gradients add up"),
        Mistake(
            "g does not sum", planted.pair(g_forward=lambda x: x.clone()), says="sum in forward"
        ),
        Mistake(
            "g does not wait", planted.pair(g_forward=planted.not_waiting), says="did you wait"
        ),
        Mistake("f does not wait", planted.pair(planted.not_waiting), says="did you wait"),
        Mistake("f and g swapped", planted.swapped, says="f sums in forward"),
        Mistake(
            "sums part's own tensor",
            planted.pair(g_forward=planted.in_place),
            says="works in place",
        ),
        Mistake(
            "sums a shared gradient",
            planted.pair(planted.in_place),
            says="share one gradient tensor",
        ),
        Mistake(
            "gathers all", planted.pair(g_forward=planted.gathered), says="need one all_reduce"
        ),
        Mistake(
            "returns no sum", planted.pair(g_forward=planted.no_return), says="forward of g re"
        ),
        Mistake(
            "returns no gradient",
            planted.pair(g_backward=planted.no_return),
            says="What backward returns is the gradient",
        ),
        Mistake(
            "returns what it did not sum",
            planted.pair(g_forward=planted.unsummed),
            says="Do you return the tensor that was summed",
        ),
        Mistake("left the graph", planted.left_the_graph, says="no gradient arrives"),
    ),
)
