"""The right answer to exercise 4 of 07_tensor_parallel, and the wrong ones its check must name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.tensor_parallel.parts import copy_to_region, reduce_from_region, summed
from course_lib.models import IGNORED

VOCAB = 23


def split_loss(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Compute the loss with one maximum, one sum of exponentials, and one logit per token."""
    top = summed(logits.max(dim=-1).values, dist.ReduceOp.MAX)
    shifted = logits - top[:, None]
    total = reduce_from_region(shifted.exp().sum(-1))
    return mean_loss(total.log() - reduce_from_region(own_logit(shifted, targets, first)), targets)


def own_logit(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return the target's logit, where it is on this rank; else 0."""
    local = targets - first
    here = (local >= 0) & (local < logits.shape[-1])
    return logits.gather(-1, local.where(here, 0)[:, None])[:, 0] * here


def mean_loss(each: Tensor, targets: Tensor) -> Tensor:
    counts = targets != IGNORED
    return (each * counts).sum() / counts.sum()


def _parts(logits: Tensor, targets: Tensor, first: int, **other: Any) -> Tensor:
    """Return the right answer with some parts exchanged."""
    top = other.get("top")
    if top is None:
        top = summed(logits.max(dim=-1).values, dist.ReduceOp.MAX)
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
    """Sum the gradient of each token's sums, too: within the budget, and p times too large."""
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


def summed_maxima(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, top=summed(logits.max(dim=-1).values))


def one_maximum(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    top = summed(logits.max()[None], dist.ReduceOp.MAX)
    return _parts(logits, targets, first, top=top.expand(len(logits)))


def first_maximum(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    top = logits.detach().max(dim=-1).values
    dist.broadcast(top, 0)
    return _parts(logits, targets, first, top=top)


def maximum_from_zero(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    top = summed(logits.max(dim=-1).values.clamp(min=0), dist.ReduceOp.MAX)
    return _parts(logits, targets, first, top=top)


def maximum_in_graph(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    top = logits.max(dim=-1).values
    dist.all_reduce(top, dist.ReduceOp.MAX)
    return _parts(logits, targets, first, top=top)


def unshifted(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, own=lambda _, *where: own_logit(logits, *where))


def _is_here(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return (targets >= first) & (targets < first + logits.shape[1])


def own_tokens(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Leave the others' tokens out, and never sum the logits of targets."""

    def mean(each: Tensor, targets: Tensor) -> Tensor:
        return (each * _is_here(logits, targets, first)).sum() / (targets != IGNORED).sum()

    return _parts(logits, targets, first, logit=lambda own: own, mean=mean)


def summed_losses(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return the right loss, with this rank's gradient only in the sum of exponentials."""
    return reduce_from_region(own_tokens(logits, targets, first))


def a_number(logits: Tensor, targets: Tensor, first: int) -> float:
    return split_loss(logits, targets, first).item()


def no_mean(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return _parts(logits, targets, first, mean=lambda each, targets: each)


def summed_mean(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return reduce_from_region(split_loss(logits, targets, first)) / dist.get_world_size()


def logits_through_f(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    return split_loss(copy_to_region(logits), targets, first)


def in_the_graph(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Let backward skip the sums, which is what g does; PyTorch warns of it."""

    def total(parts: Tensor) -> Tensor:
        out = parts * 1.0
        dist.all_reduce(out)
        return out

    return _parts(logits, targets, first, total=total, logit=total)
