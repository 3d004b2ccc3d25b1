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
from course_lib.checks.tensor_parallel_parts import (
    WORLD_SIZES,
    calls_in,
    close_to,
    expect_close,
    mine_of,
)
from course_lib.checks.tools import Cause, run
from course_lib.core import Event
from course_lib.models import IGNORED
from course_lib.ranks import Ranks, record

Loss = Callable[[Tensor, Tensor, int], Tensor]
TOKENS = 6
BUDGET_CALLS, BUDGET_BYTES = 3, 3 * TOKENS * 8


@dataclass(frozen=True)
class Case:
    """Whole logits and targets; the same on every rank."""

    name: str
    logits: Tensor
    targets: Tensor


def _cases() -> list[Case]:
    random = torch.Generator().manual_seed(7)
    logits = torch.randn(TOKENS, planted.VOCAB, generator=random, dtype=torch.double) * 3
    targets = torch.tensor([0, 22, 8, 12, 5, 17])
    ignored = targets.clone()
    ignored[[1, 4]] = IGNORED
    tall = logits.clone()
    tall[:, 3] += 900.0  # no exponential of it fits, and the other ranks' maxima are far below
    return [
        Case("plain logits", logits, targets),
        Case("two targets of -100", logits, ignored),
        Case("a logit of 900", tall, targets),
    ]


@dataclass
class Used:
    """What one loss left on one rank."""

    loss: Any
    grad: Tensor | None
    forward: list[Event]
    backward: list[Event]
    same_targets: bool


def _use(rank: int, answer: Loss) -> list[Used]:
    used = []
    for case in _cases():
        mine = mine_of(planted.VOCAB)
        logits = case.logits[:, mine].clone().requires_grad_()
        targets = case.targets.clone()
        with record() as forward:
            loss = answer(logits, targets, int(mine[0]))
        with record() as backward:
            if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
                (3 * loss).backward()
        kept = loss.detach().clone() if isinstance(loss, Tensor) else loss
        calls = calls_in(forward.events), calls_in(backward.events)
        used.append(Used(kept, logits.grad, *calls, torch.equal(targets, case.targets)))
    return used


def check_loss(answer: Loss) -> str:
    """1 to 4 ranks: the loss of one process, its gradient, and three numbers a token sent."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            found = run(ranks, _use, answer)
        for rank, uses in enumerate(found):
            for case, used in zip(_cases(), uses, strict=True):
                _judge(used, case, rank, p)
    return f"The loss of one process on 1 to 4 ranks; {BUDGET_CALLS} numbers a token sent."


def _judge(used: Used, case: Case, rank: int, p: int) -> None:
    where = f"rank {rank} of {p}, {case.name}"
    whole = case.logits.clone().requires_grad_()
    need = F.cross_entropy(whole, case.targets)
    (3 * need).backward()
    _expect_few(used.forward, where)
    expect_close(used.loss, need.detach(), f"{where}, the loss", _causes(case, rank, p), WHOSE)
    if used.grad is None:
        raise CheckFailed(
            f"{where}: no gradient arrives at the logits. What is summed has to stay in the "
            "graph: reduce_from_region hands the gradient back."
        )
    mine = torch.arange(planted.VOCAB).tensor_split(p)[rank]
    grad = torch.empty(0) if whole.grad is None else whole.grad[:, mine]
    causes: list[Cause] = [
        (close_to(grad * p), f"{p} times too large: a sum in backward that nobody asked for."),
        (close_to(grad / p), f"{p} times too small."),
    ]
    look = "softmax - 1 at the target: does the gradient flow through the sum, and the logit?"
    expect_close(used.grad, grad, f"{where}, the gradient of the logits", causes, look)
    _expect_few([*used.forward, *used.backward], where)
    if not used.same_targets:
        raise CheckFailed(f"{where}: targets has changed. It is the caller's: work on a copy.")


def _expect_few(calls: list[Event], where: str) -> None:
    num_bytes = sum(call.num_bytes for call in calls)
    if len(calls) > BUDGET_CALLS or num_bytes > BUDGET_BYTES:
        raise CheckFailed(
            f"{where}: {len(calls)} calls of {num_bytes} bytes in all; the budget is "
            f"{BUDGET_CALLS} calls of {BUDGET_BYTES} bytes, {BUDGET_CALLS} numbers a token. "
            "Logits stay where they are: only sums and maxima over the vocabulary travel."
        )


def _causes(case: Case, rank: int, p: int) -> list[Cause]:
    mine = torch.arange(planted.VOCAB).tensor_split(p)[rank]
    own, targets = case.logits[:, mine], case.targets
    counted = targets != IGNORED
    need = F.cross_entropy(case.logits, targets)
    right = planted.own_logit(own, targets, int(mine[0]))
    local = torch.where(counted, own.logsumexp(-1) - right, 0.0).sum() / counted.sum()
    inside = targets - int(mine[0])
    here = (inside >= 0) & (inside < len(mine))
    few = F.cross_entropy(own[here], inside[here]) if here.any() else local
    of_all = counted.double().mean()
    return [
        (close_to(local), LOCAL),
        (close_to(few), LOCAL),
        (close_to(need * of_all), "A target of -100 has no loss: divide by the others' number."),
        (close_to(need * counted.sum()), "That is the sum over the tokens: return their mean."),
        (lambda got: not bool(got.isfinite()), OVERFLOW),
        (close_to(need * p), f"{p} times too large: all ranks have the same loss, do not sum it."),
        (lambda got: IGNORED in targets, "-100 is no token: leave those targets out."),
    ]


LOCAL = (
    "That is the loss over this rank's own vocabulary: the softmax divides by the sum over all "
    "tokens, and the target may be on another rank."
)
OVERFLOW = "exp overflows: subtract the largest logit first, the largest of all ranks."
WHOSE = (
    "Is each target's logit in it once, from the rank that has it? Is the sum of exponentials "
    "that of all ranks? And does every rank subtract the same maximum?"
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
    ),
)
