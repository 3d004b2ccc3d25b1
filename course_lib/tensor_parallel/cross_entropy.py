"""Cross-entropy of logits whose vocabulary is split over ranks, without gathering the logits.

Each rank has the logits of its part of the vocabulary. The loss needs three numbers per token from
all ranks: the largest logit, the sum of the exponentials, and the target's logit. The logits, the
largest tensor of a step, are not communicated. The embedding and the output projection are in
`layers.py`. Notebook 07_tensor_parallel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives.group import Group
from course_lib.core.errors import ShapeError
from course_lib.models.data import IGNORED
from course_lib.tensor_parallel.layers import _check_tokens, own_tokens


def parallel_token_loss(logits: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """Return the mean cross-entropy over all targets that are not `IGNORED`, as `token_loss` does.

    Shapes:  [batch, seq, vocab/tp] and [batch, seq] -> [], the same on every rank
    Cost:    see vocab_parallel_cross_entropy
    """
    losses = vocab_parallel_cross_entropy(logits, targets, group)
    return losses.sum() / (targets != IGNORED).sum()


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """Return each token's cross-entropy from split logits; 0 where the target is `IGNORED` (-100).

    Shapes:  [..., vocab/tp] and [...] -> [...], the same on every rank
    Cost:    two all_reduces in forward, of one and of two numbers per token (fp32 or wider); no
             communication in backward
    Saves:   this rank's shard of the softmax, [..., vocab/tp]
    Raises:  ShapeError for a target outside the vocabulary, or targets of another shape
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3
    """
    vocab = logits.shape[-1] * dist.get_world_size(group)
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"rank {dist.get_rank()}, vocab_parallel_cross_entropy: need a target for each row of "
            f"logits; got {list(logits.shape)} and {list(targets.shape)}."
        )
    _check_tokens(targets.masked_fill(targets == IGNORED, 0), vocab, "vocab_parallel_cross_entropy")
    return _CrossEntropy.apply(logits, targets, group)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax at the target: log(sum of exp(logit - largest)) - (target's logit - largest)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        index, mine = own_tokens(targets, logits.shape[-1], group)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = wide.amax(-1)  # [...]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = wide - largest.unsqueeze(-1)  # [..., vocab/tp]
        at_target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), at_target])  # [2, ...]
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), index, mine, targets)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(targets == IGNORED, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return softmax - 1 at the target, which needs no communication."""
        softmax, index, mine, targets = ctx.saved_tensors
        one = mine.to(softmax.dtype).unsqueeze(-1)
        grad_logits = softmax.scatter_add(-1, index.unsqueeze(-1), -one)
        scale = grad.masked_fill(targets == IGNORED, 0).unsqueeze(-1)
        return grad_logits.mul_(scale).to(ctx.dtype), None, None
