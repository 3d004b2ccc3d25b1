"""The logits and targets of exercise 4 of 07_tensor_parallel, and what wrong losses show."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.tensor_parallel_loss_mistakes import VOCAB, own_logit
from course_lib.checks.tensor_parallel_parts import close_to
from course_lib.checks.tools import Cause
from course_lib.models import IGNORED

TOKENS = 6
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


@dataclass(frozen=True)
class Case:
    """Whole logits and targets; the same on every rank."""

    name: str
    logits: Tensor
    targets: Tensor


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
    """What a maximum that is not detached adds to the gradient on its rank."""
    counted, own = case.targets != IGNORED, case.logits[:, mine]
    here = torch.isin(case.targets, mine).double()
    share = case.logits.softmax(-1)[:, mine].sum(-1)
    at = F.one_hot(own.argmax(-1), len(mine))
    return 3 * ((here - share) * counted / counted.sum())[:, None] * at


def is_rows_of(got: Tensor, grad: Tensor, targets: Tensor, mine: Tensor) -> bool:
    """Whether the sums have their gradient only where the target is on this rank."""
    here = torch.isin(targets, mine)
    return not here.all() and not got[~here].any() and close_to(grad[here])(got[here])
