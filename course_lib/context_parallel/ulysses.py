"""Ulysses: every rank attends with some of the heads, but over all tokens.

An all-to-all turns the split over tokens into one over heads, so that the attention in between is
that of one process; a second all-to-all turns it back. DeepSpeed calls it sequence parallelism, a
name that Megatron gives to its split of norms and dropout. Notebook 15_context_parallel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives.group import Group
from course_lib.context_parallel.inputs import Placement, placement_of
from course_lib.context_parallel.masks import sees, whole_of
from course_lib.core.errors import MeshError
from course_lib.models.gpt import fused
from course_lib.ranks.recorder import span


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    causal: bool = True,
    layout: str = "contiguous",
    seq: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attend to the tokens of all ranks, for this rank's queries.

    With fewer KV heads than ranks each is sent to the p / kv_heads ranks whose queries share it:
    kv_heads counts as p in the cost.

    seq        tokens of the whole sequence; None: p times those of this rank
    documents  ids [batch, seq] of the document of every token, the same on all ranks: a token sees
               its own document only

    Shapes:  q [batch, heads, seq/p, head_dim], k and v [batch, kv_heads, seq/p, head_dim] -> q's
    Cost:    2 (p-1)/p * batch * seq/p * (heads + kv_heads) * head_dim numbers sent per rank in
             forward, in four all_to_alls; the same in backward
    Adjoint: itself: an all_to_all for each
    Raises:  MeshError unless p divides heads, and p or kv_heads the other; ShapeError, CourseError
    Source:  Jacobs et al. 2023 (DeepSpeed Ulysses)
    """
    placed = placement_of("ulysses_attention", q, k, v, group, causal, layout, seq, documents)
    q, k, v = heads_for_tokens(q, k, v, placed)
    tokens = whole_of(placed.held)
    how = {}
    if causal or documents is not None:
        how["attn_mask"] = sees(tokens, tokens, causal)[:, None].to(q.device)
    with span("forward", "all tokens"):
        o = fused(q, k, v, enable_gqa=q.shape[1] > k.shape[1], **how)
    return tokens_for_heads(o, placed)


def heads_for_tokens(q: Tensor, k: Tensor, v: Tensor, placed: Placement) -> list[Tensor]:
    """Exchange all heads of this rank's tokens for all tokens of this rank's heads.

    Shapes:  each [batch, h, seq/p, head_dim] -> [batch, h/p, seq, head_dim], rank 0's tokens first
    Cost:    an all_to_all for each
    Raises:  MeshError as `ulysses_attention`
    """
    p, kv_heads = placed.member.size, k.shape[1]
    _check_heads(q.shape[1], kv_heads, placed)
    if kv_heads < p:
        k, v = (x.repeat_interleave(p // kv_heads, dim=1) for x in (k, v))
    return [_ToHeads.apply(x, placed) for x in (q, k, v)]


def tokens_for_heads(o: Tensor, placed: Placement) -> Tensor:
    """Turn `heads_for_tokens` around.

    Shapes:  [batch, h/p, seq, head_dim] -> [batch, h, seq/p, head_dim]
    Cost:    an all_to_all
    """
    return _ToTokens.apply(o, placed)


class _ToHeads(torch.autograd.Function):
    """From all heads of this rank's tokens to all tokens of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, placed: Placement) -> Tensor:
        ctx.placed = placed
        return _to_heads(x, placed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_tokens(grad, ctx.placed), None


class _ToTokens(torch.autograd.Function):
    """From all tokens of this rank's heads to all heads of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, placed: Placement) -> Tensor:
        ctx.placed = placed
        return _to_tokens(x, placed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_heads(grad, ctx.placed), None


def _to_heads(x: Tensor, placed: Placement) -> Tensor:
    """Send each rank its heads of this rank's tokens: [batch, h, n, d] -> [batch, h/p, seq, d].

    The tokens of rank 0 come first, whatever their positions; the mask knows them.
    """
    heads = x.chunk(placed.member.size, dim=1)
    shapes = [(*heads[0].shape[:2], length, x.shape[-1]) for length in placed.lengths]
    return torch.cat(_all_to_all(heads, shapes, placed), dim=2)


def _to_tokens(x: Tensor, placed: Placement) -> Tensor:
    """Send each rank its tokens of this rank's heads: [batch, h/p, seq, d] -> [batch, h, n, d]."""
    tokens = x.split(placed.lengths, dim=2)
    shapes = [tokens[placed.member.rank].shape] * placed.member.size
    return torch.cat(_all_to_all(tokens, shapes, placed), dim=1)


def _all_to_all(
    outs: Sequence[Tensor], shapes: Sequence[Sequence[int]], placed: Placement
) -> list[Tensor]:
    """Send one tensor to each rank; return those received, whose shapes are known."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([out.flatten() for out in outs])
    into = flat.new_empty(sum(sizes))
    sent = [out.numel() for out in outs]
    dist.all_to_all_single(into, flat, sizes, sent, group=placed.member.group)
    return [part.view(shape) for part, shape in zip(into.split(sizes), shapes, strict=True)]


def _check_heads(heads: int, kv_heads: int, placed: Placement) -> None:
    p, rank = placed.member.size, placed.member.global_rank(placed.member.rank)
    if heads % p or (kv_heads % p and p % kv_heads):
        raise MeshError(
            f"rank {rank}, ulysses_attention: need heads divisible by p, and kv_heads by p or p by "
            f"kv_heads; got {heads}, {kv_heads} and p = {p}. Try ring_attention, or fewer ranks."
        )
