"""Unified sequence parallelism: Ulysses inside a node, a ring between nodes.

Ulysses needs as many heads as ranks and sends to all of them at once, which suits fast links; a
ring has no limit and sends to one neighbor. With u * r ranks, u in a row exchange tokens for heads
by two all-to-alls, and in between each head's r ranks are a ring. Notebook 15_context_parallel.
"""

import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import Group
from course_lib.context_parallel.inputs import placement_of
from course_lib.context_parallel.layouts import lengths_of
from course_lib.context_parallel.ring import ring_attention
from course_lib.context_parallel.ulysses import heads_for_tokens, tokens_for_heads


def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inside: Group,
    ring: Group,
    causal: bool = True,
    layout: str = "contiguous",
    seq: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attend to the tokens of all u * r ranks, for this rank's queries.

    A member's tokens are `shard(shard(x, i, r, layout), j, u)`, if it is number i of its ring and
    number j of its group inside: these have, in a row, what one rank of a ring alone would have.

    inside     the u ranks that share heads; MeshError as for `ulysses_attention`
    ring       the r ranks with the same heads
    layout     of the sequence over the ring
    seq        tokens of the whole sequence; None: u * r times those of this rank
    documents  as in `ring_attention`

    Shapes:  q [batch, heads, seq/(u r), head_dim], k and v [batch, kv_heads, ...] -> q's
    Cost:    that of `ulysses_attention` for seq/r tokens over u ranks, and that of `ring_attention`
             for 1/u of the heads over r ranks
    Raises:  ShapeError, MeshError, CourseError
    Source:  Fang and Zhao 2024 (USP), section 3
    """
    u, r = dist.get_world_size(inside), dist.get_world_size(ring)
    seq = q.shape[2] * u * r if seq is None else seq
    together = lengths_of(seq, r, layout)[dist.get_rank(ring)]
    placed = placement_of("usp_attention", q, k, v, inside, causal, "contiguous", together, None)
    q, k, v = heads_for_tokens(q, k, v, placed)  # [batch, heads/u, seq/r, head_dim]
    return tokens_for_heads(ring_attention(q, k, v, ring, causal, layout, seq, documents), placed)
