"""The right answer to exercise 4 of 07_tensor_parallel, and the wrong ones its check must name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.tensor_parallel_parts import copy_to_region, reduce_from_region, summed
from course_lib.models import IGNORED

VOCAB = 23


def split_loss(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """One maximum, one sum of exponentials, one logit a token."""
    top = summed(logits.max(dim=-1).values, dist.ReduceOp.MAX)
    shifted = logits - top[:, None]
    total = reduce_from_region(shifted.exp().sum(-1))
    return mean_loss(total.log() - reduce_from_region(own_logit(shifted, targets, first)), targets)


def own_logit(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """The target's logit, where it is on this rank; else 0."""
    local = targets - first
    here = (local >= 0) & (local < logits.shape[-1])
    return logits.gather(-1, local.where(here, 0)[:, None])[:, 0] * here


def mean_loss(each: Tensor, targets: Tensor) -> Tensor:
    counts = targets != IGNORED
    return (each * counts).sum() / counts.sum()


def _parts(logits: Tensor, targets: Tensor, first: int, **other: Any) -> Tensor:
    """The right answer with some parts exchanged."""
    top = other.get("top", summed(logits.detach().max(dim=-1).values, dist.ReduceOp.MAX))
    shifted = logits - top[:, None]
    total = other.get("total", reduce_from_region)(shifted.exp().sum(-1))
    logit = other.get("logit", reduce_from_region)(
        other.get("own", own_logit)(shifted, targets, first)
    )
    loss: Tensor = other.get("mean", mean_loss)(total.log() - logit, targets)
    return loss


def local(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    own = own_logit(logits, targets, first)
    return mean_loss(logits.logsumexp(-1) - own, targets)


def gathered(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    whole = logits.new_zeros(len(logits), VOCAB)
    whole[:, first : first + logits.shape[1]] = logits
    return F.cross_entropy(reduce_from_region(whole), targets)


def no_maximum(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, top=torch.zeros(len(logits)))


def own_maximum(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, top=logits.detach().max(dim=-1).values)


def nearest_logit(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    def own(shifted: Tensor, targets: Tensor, first: int) -> Tensor:
        local = (targets - first).clamp(0, shifted.shape[-1] - 1)
        return shifted.gather(-1, local[:, None])[:, 0]

    return _parts(logits, targets, first, own=own)


def all_tokens(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    def mean(each: Tensor, targets: Tensor) -> Tensor:
        return (each * (targets != IGNORED)).mean()

    return _parts(logits, targets, first, mean=mean)


def ignored_counts(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, mean=lambda each, targets: each.mean())


def summed_tokens(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    def total(each: Tensor, targets: Tensor) -> Tensor:
        return (each * (targets != IGNORED)).sum()

    return _parts(logits, targets, first, mean=total)


def back_through_f(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Sums the gradient of each token's sums, too: within the budget, and p times too large."""
    top = summed(logits.detach().max(dim=-1).values, dist.ReduceOp.MAX)
    shifted = logits - top[:, None]
    both = torch.stack([shifted.exp().sum(-1), own_logit(shifted, targets, first)])
    total, logit = reduce_from_region(copy_to_region(both) * 1.0)
    return mean_loss(total.log() - logit, targets)


def left_the_graph(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, total=summed, logit=summed)


def logit_not_summed(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, logit=lambda own: own)


def writes_targets(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    loss = split_loss(logits, targets, first)
    targets[targets == IGNORED] = 0
    return loss
