"""All-gather attention: every rank gathers the keys and values of all tokens.

Queries stay split, and each rank computes its part of the attention with a mask of its own,
whatever that mask is: Llama 3 chose this form for its document masks, and because with few KV heads
the messages are short. Here nothing overlaps, and each rank holds the keys and values of all
tokens. In backward the gradients of all keys and values are summed over the ranks, and each rank
keeps those of its own tokens. Notebook 15_context_parallel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from course_lib.collectives.group import Group
from course_lib.context_parallel.inputs import Placement, placement_of
from course_lib.context_parallel.masks import sees, whole_of
from course_lib.context_parallel.partial import wide
from course_lib.models.gpt import fused
from course_lib.ranks.recorder import span


def all_gather_attention(
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

    Shards of unequal length are padded to the longest for the two collectives.

    seq        tokens of the whole sequence; None: p times those of this rank
    documents  ids [batch, seq] of the document of every token, the same on all ranks: a token sees
               its own document only

    Shapes:  q [batch, heads, seq/p, head_dim], k and v [batch, kv_heads, seq/p, head_dim] -> q's
    Cost:    2 (p-1)/p * batch * seq * kv_heads * head_dim numbers sent per rank in forward, in one
             all_gather; as many in backward, in one reduce_scatter, in fp32 or wider
    Adjoint: a reduce_scatter for the all_gather
    Raises:  ShapeError, MeshError, CourseError, before anything is sent
    Source:  Grattafiori et al. 2024 (Llama 3), section 3.3.2
    """
    placed = placement_of("all_gather_attention", q, k, v, group, causal, layout, seq, documents)
    keys, values = _GatherTokens.apply(torch.stack([k, v]), placed)
    how = {}
    if causal or documents is not None:
        how["attn_mask"] = sees(placed.own, whole_of(placed.held), causal)[:, None].to(q.device)
    with span("forward", "all keys"):
        grouped = q.shape[1] > k.shape[1]
        return fused(q, keys, values, enable_gqa=grouped, **how)


class _GatherTokens(torch.autograd.Function):
    """All keys and values from each rank's own; backward sums the gradients, and keeps its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, placed: Placement) -> Tensor:
        ctx.placed = placed
        p, lengths = placed.member.size, placed.lengths
        shard = _padded(own, max(lengths))  # [2, batch, kv_heads, longest, head_dim]
        shards = shard.new_empty(p * len(shard), *shard.shape[1:])
        dist.all_gather_single(shards, shard, group=placed.member.group)
        parts = zip(shards.chunk(p), lengths, strict=True)
        return torch.cat([part[..., :length, :] for part, length in parts], dim=-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        placed, sums = ctx.placed, grad.to(wide(grad.dtype))
        longest = max(placed.lengths)
        parts = [_padded(part, longest) for part in sums.split(placed.lengths, dim=-2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_single(own, torch.cat(parts), group=placed.member.group)
        return own[..., : len(placed.own.positions), :].to(grad.dtype), None


def _padded(x: Tensor, length: int) -> Tensor:
    return F.pad(x, (0, 0, 0, length - x.shape[-2])).contiguous()
