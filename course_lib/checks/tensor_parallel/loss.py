"""Exercise 4 of 07_tensor_parallel: a loss over logits that are split over the ranks.

The planted mistakes are in `loss_answers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, run
from course_lib.checks.tensor_parallel import loss_answers as planted
from course_lib.checks.tensor_parallel.loss_answers import VOCAB, own_logit
from course_lib.checks.tensor_parallel.parts import (
    OUTSIDE,
    WORLD_SIZES,
    calls_in,
    close_to,
    expect_close,
    is_outside,
    mine_of,
)
from course_lib.core import Event
from course_lib.models import IGNORED
from course_lib.ranks import Ranks, record

Loss = Callable[[Tensor, Tensor, int], Tensor]
TOKENS = 6


BUDGET_CALLS, BUDGET_BYTES = 3, 3 * TOKENS * 8
LOCAL = (
    "That is the loss over this rank's own vocabulary: the softmax divides by the sum over all "
    "tokens, and the target may be on another rank."
)
OVERFLOW = (
    "exp overflows, or is 0 everywhere: subtract the largest logit first, for each token its own, "
    "the largest of all ranks (with ReduceOp.MAX; all_reduce alone is a sum)."
)
IN_GRAPH = (
    "The maximum is in the graph, and each rank follows it into its own logits: detach it. It "
    "cancels out, so it needs no gradient."
)
WHOSE_LOSS = (
    "That is the loss of the tokens whose target is on this rank. But every rank's logits are in "
    "every token's loss: sum the logits of the targets, and each rank has the loss of each token."
)
STAY = "Logits stay where they are: only sums and maxima over the vocabulary travel."
ENOUGH = (
    "What has to travel: the largest, the sum of exponentials, the target's logit. From them every "
    "rank has the whole loss, and targets are the same on all: no more sums."
)
ALIKE = (
    "What is summed has the same shape on every rank: one number a token. The parts of the "
    "vocabulary have not."
)
WHOSE = (
    "Is each target's logit in it once, from the rank that has it? Is the sum of exponentials "
    "that of all ranks? And does every rank subtract the same maximum?"
)


@dataclass
class Used:
    """The results of one loss on one rank."""

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
    """Check 1 to 4 ranks: the loss of one process, its gradient, three numbers sent per token."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            found = run(ranks, _use, answer, on={"mismatch": ALIKE})
        for rank, uses in enumerate(found):
            for case, used in zip(cases(), uses, strict=True):
                _judge(used, case, rank, p)
    return f"The loss of one process on 1 to 4 ranks; {BUDGET_CALLS} numbers a token sent."


@dataclass(frozen=True)
class Case:
    """Whole logits and targets; the same on every rank."""

    name: str
    logits: Tensor
    targets: Tensor


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


def cases() -> list[Case]:
    random = torch.Generator().manual_seed(7)
    logits = torch.randn(TOKENS, VOCAB, generator=random, dtype=torch.double) * 3
    targets = torch.tensor([0, 22, 8, 12, 5, 17])
    ignored = targets.clone()
    ignored[[1, 4]] = IGNORED
    tall = logits.clone()
    tall[:, 20] += 900.0  # no exponential of it fits, and rank 0 knows nothing of it
    apart = logits + torch.tensor([-900.0, 0.0, 900.0]).double().repeat(2)[:, None]
    return [
        Case("plain logits", logits, targets),
        Case("two targets of -100", logits, ignored),
        Case("a logit of 900", tall, targets),
        Case("a token near 900, one near -900", apart, targets),
    ]


def loss_causes(case: Case, rank: int, p: int) -> list[Cause]:
    mine = torch.arange(VOCAB).tensor_split(p)[rank]
    own, targets = case.logits[:, mine], case.targets
    counted = targets != IGNORED
    need = F.cross_entropy(case.logits, targets)
    right = own_logit(own, targets, int(mine[0]))
    local = torch.where(counted, own.logsumexp(-1) - right, 0.0).sum() / counted.sum()
    inside = targets - int(mine[0])
    here = (inside >= 0) & (inside < len(mine))
    each = F.cross_entropy(case.logits, targets, reduction="none")
    few = F.cross_entropy(own[here], inside[here]) if here.any() else local
    top = case.logits.max(-1).values[counted].mean()
    of_all = counted.double().mean()
    return [
        (close_to(local), LOCAL),
        (close_to(few), LOCAL),
        (close_to(each[here].sum() / counted.sum()), WHOSE_LOSS),
        (close_to(each[here].sum() / here.sum()), WHOSE_LOSS),
        (
            close_to(need - top),
            "Subtract the largest from the target's logit, too, or add it back.",
        ),
        (close_to(need * of_all), "A target of -100 has no loss: divide by the others' number."),
        (close_to(need * counted.sum()), "That is the sum over the tokens: return their mean."),
        (lambda got: not bool(got.isfinite()), OVERFLOW),
        (close_to(need * p), f"{p} times too large: all ranks have the same loss, do not sum it."),
        (lambda got: IGNORED in targets, "-100 is no token: leave those targets out."),
    ]


def through_maximum(case: Case, mine: Tensor) -> Tensor:
    """Return the gradient that a maximum which is not detached adds on its rank."""
    counted, own = case.targets != IGNORED, case.logits[:, mine]
    here = torch.isin(case.targets, mine).double()
    share = case.logits.softmax(-1)[:, mine].sum(-1)
    at = F.one_hot(own.argmax(-1), len(mine))
    return 3 * ((here - share) * counted / counted.sum())[:, None] * at


def is_rows_of(got: Tensor, grad: Tensor, targets: Tensor, mine: Tensor) -> bool:
    """Return whether the sums have their gradient only where the target is on this rank."""
    here = torch.isin(targets, mine)
    return not here.all() and not got[~here].any() and close_to(grad[here])(got[here])
