"""Exercise 4 of 07_tensor_parallel: a loss over logits of which every rank has a part.

The planted mistakes are in `tensor_parallel_loss_mistakes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks import tensor_parallel_loss_mistakes as planted
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.tensor_parallel_loss_mistakes import VOCAB
from course_lib.checks.tensor_parallel_loss_parts import (
    ALIKE,
    ENOUGH,
    IN_GRAPH,
    STAY,
    TOKENS,
    WHOSE,
    WHOSE_LOSS,
    Case,
    cases,
    is_rows_of,
    loss_causes,
    through_maximum,
)
from course_lib.checks.tensor_parallel_parts import (
    OUTSIDE,
    WORLD_SIZES,
    calls_in,
    close_to,
    expect_close,
    is_outside,
    mine_of,
)
from course_lib.checks.tools import Cause, run
from course_lib.core import Event
from course_lib.ranks import Ranks, record

Loss = Callable[[Tensor, Tensor, int], Tensor]
BUDGET_CALLS, BUDGET_BYTES = 3, 3 * TOKENS * 8


@dataclass
class Used:
    """What one loss left on one rank."""

    loss: Any
    grad: Tensor | None
    forward: list[Event]
    backward: list[Event]
    same_targets: bool
    outside: bool


def _use(rank: int, answer: Loss) -> list[Used]:
    used = []
    for case in cases():
        mine = mine_of(VOCAB)
        logits = case.logits[:, mine].clone().requires_grad_()
        targets, outside = case.targets.clone(), False
        with record() as forward:
            loss = answer(logits, targets, int(mine[0]))
        with record() as backward:
            if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
                outside = is_outside((3 * loss).backward)
        kept = loss.detach().clone() if isinstance(loss, Tensor) else loss
        calls = calls_in(forward.events), calls_in(backward.events)
        same = torch.equal(targets, case.targets)
        used.append(Used(kept, logits.grad, *calls, same, outside))
    return used


def check_loss(answer: Loss) -> str:
    """1 to 4 ranks: the loss of one process, its gradient, and three numbers a token sent."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            found = run(ranks, _use, answer, on={"mismatch": ALIKE})
        for rank, uses in enumerate(found):
            for case, used in zip(cases(), uses, strict=True):
                _judge(used, case, rank, p)
    return f"The loss of one process on 1 to 4 ranks; {BUDGET_CALLS} numbers a token sent."


def _judge(used: Used, case: Case, rank: int, p: int) -> None:
    where = f"rank {rank} of {p}, {case.name}"
    whole = case.logits.clone().requires_grad_()
    need = F.cross_entropy(whole, case.targets)
    (3 * need).backward()
    _expect_few(used.forward, where)
    _expect_number(used.loss, where)
    expect_close(used.loss, need.detach(), f"{where}, the loss", loss_causes(case, rank, p), WHOSE)
    if used.grad is None:
        raise CheckFailed(
            f"{where}: no gradient arrives at the logits. What is summed has to stay in the "
            "graph: reduce_from_region hands the gradient back."
        )
    mine = torch.arange(VOCAB).tensor_split(p)[rank]
    grad = torch.empty(0) if whole.grad is None else whole.grad[:, mine]
    causes: list[Cause] = [
        (close_to(grad * p), f"{p} times too large: a sum in backward that nobody asked for."),
        (close_to(grad / p), f"{p} times too small."),
        (close_to(grad + through_maximum(case, mine)), IN_GRAPH),
        (lambda got: is_rows_of(got, grad, case.targets, mine), WHOSE_LOSS),
    ]
    look = "softmax - 1 at the target: does the gradient flow through the sum, and the logit?"
    expect_close(used.grad, grad, f"{where}, the gradient of the logits", causes, look)
    _expect_few([*used.forward, *used.backward], where)
    if not used.same_targets:
        raise CheckFailed(f"{where}: targets has changed. It is the caller's: work on a copy.")
    if used.outside:
        raise CheckFailed(f"{where}: {OUTSIDE}")


def _expect_number(loss: Any, where: str) -> None:
    if loss is not None and not isinstance(loss, Tensor):
        raise CheckFailed(
            f"{where}: need the loss as a tensor; got {loss!r}. Backward starts from it, so it has "
            "to keep its graph: no item() or float()."
        )
    if loss is not None and loss.numel() != 1:
        raise CheckFailed(
            f"{where}: need one number; got shape {list(loss.shape)}. Return the mean over tokens."
        )


def _expect_few(calls: list[Event], where: str) -> None:
    num_bytes = sum(call.num_bytes for call in calls)
    large = any(call.num_bytes > BUDGET_BYTES for call in calls)
    if len(calls) > BUDGET_CALLS or num_bytes > BUDGET_BYTES:
        raise CheckFailed(
            f"{where}: {len(calls)} calls of {num_bytes} bytes in all; the budget is "
            f"{BUDGET_CALLS} calls of {BUDGET_BYTES} bytes, {BUDGET_CALLS} numbers a token. "
            f"{STAY if large else ENOUGH}"
        )


LOSS = Exercise(
    key="tensor_parallel-4",
    title="a loss over split logits",
    check=check_loss,
    reference=planted.split_loss,
    mistakes=(
        Mistake("local vocabulary", planted.local, says="over this rank's own vocabulary"),
        Mistake("gathers the logits", planted.gathered, says="Logits stay where they are"),
        Mistake("no maximum", planted.no_maximum, says="exp overflows"),
        Mistake("own maximum", planted.own_maximum, says="subtract the same maximum"),
        Mistake("nearest logit", planted.nearest_logit, says="from the rank that has it"),
        Mistake("divides by all tokens", planted.all_tokens, says="divide by the others' number"),
        Mistake("-100 counts", planted.ignored_counts, says="-100 is no token"),
        Mistake("sum for mean", planted.summed_tokens, says="return their mean"),
        Mistake("sums back", planted.back_through_f, says="nobody asked for"),
        Mistake("left the graph", planted.left_the_graph, says="no gradient arrives"),
        Mistake("writes into targets", planted.writes_targets, says="work on a copy"),
        Mistake("logit not summed", planted.logit_not_summed, says="from the rank that has it"),
        Mistake("sum of maxima", planted.summed_maxima, says="all_reduce alone is a sum"),
        Mistake("one maximum", planted.one_maximum, says="for each token its own"),
        Mistake("rank 0's maximum", planted.first_maximum, says="the largest of all ranks"),
        Mistake("maximum from 0", planted.maximum_from_zero, says="is 0 everywhere"),
        Mistake("maximum in the graph", planted.maximum_in_graph, says="detach it"),
        Mistake("logit not shifted", planted.unshifted, says="or add it back"),
        Mistake("own tokens' loss", planted.own_tokens, says="of the tokens whose target is on"),
        Mistake("sums the losses", planted.summed_losses, says="each rank has the loss of each"),
        Mistake("a number", planted.a_number, says="no item() or float()"),
        Mistake("no mean", planted.no_mean, says="Return the mean over tokens"),
        Mistake("sums the mean, too", planted.summed_mean, says="no more sums"),
        Mistake("logits through f", planted.logits_through_f, says="one number a token"),
        Mistake("all_reduce in the graph", planted.in_the_graph, says="is not part of the graph"),
    ),
)
