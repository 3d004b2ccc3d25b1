"""Ring attention: keys and values travel around the ranks, queries stay where they are.

In p steps every rank computes the attention of its queries to the keys of one rank after another,
and merges the parts. While it computes with one block, the next one is on its way from its left
neighbor. Besides its own, no rank ever holds more than two blocks of keys. In backward the blocks
travel again, and behind each follows the gradient of its keys and values, to which every rank adds
its term; one hop after the last rank it is at home. Notebook 15_context_parallel.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives.group import Group, exchange, start_exchange
from course_lib.context_parallel.inputs import Placement, placement_of
from course_lib.context_parallel.masks import Tile, tiles
from course_lib.context_parallel.partial import attend_block, block_gradients, merge, no_part
from course_lib.ranks.recorder import span


def ring_attention(
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

    seq        tokens of the whole sequence; None: p times those of this rank
    documents  ids [batch, seq] of the document of every token, the same on all ranks: a token sees
               its own document only

    Shapes:  q [batch, heads, seq/p, head_dim], k and v [batch, kv_heads, seq/p, head_dim] -> q's
    Cost:    2 (p-1)/p * batch * seq * kv_heads * head_dim numbers sent per rank in forward; in
             backward the same again, and as many of their gradient, in fp32 or wider
    Adjoint: its own; a second derivative is refused
    Raises:  ShapeError, MeshError, CourseError, before anything is sent
    Source:  Liu, Zaharia and Abbeel 2023 (Ring Attention), section 3
    """
    placed = placement_of("ring_attention", q, k, v, group, causal, layout, seq, documents)
    return _Ring.apply(q, k, v, placed)


class _Ring(torch.autograd.Function):
    """Forward and backward of ring attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, placed: Placement) -> Tensor:
        o, lse = no_part(q)
        for source, (keys, values) in _go_around(torch.stack([k, v]), placed):
            with span("forward", f"block {source}"):
                for rows, columns, mask in tiles(placed.own, placed.held[source], placed.causal):
                    block = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                    part = attend_block(*block, mask)
                    o[:, :, rows], lse[:, :, rows] = merge(o[:, :, rows], lse[:, :, rows], *part)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.placed = placed
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        placed, member = ctx.placed, ctx.placed.member
        grad = grad.to(lse.dtype)
        delta = (grad * o).sum(dim=-1)  # [batch, heads, n]
        dq, at_home, total = torch.zeros_like(grad), Tensor(), Tensor()
        goes_home = any(ctx.needs_input_grad[1:3])
        for step, (source, kv) in enumerate(_go_around(torch.stack([k, v]), placed)):
            earlier = _block_of(source, kv, placed, lse.dtype).zero_()
            works = list[dist.Work]()
            if goes_home and step >= 2:  # the terms of the ranks between the block's home and here
                works = start_exchange(member, total, member.rank + 1, earlier, member.rank - 1)
            with span("backward", f"block {source}"):
                blocks = tiles(placed.own, placed.held[source], placed.causal)
                dq_term, term = _terms((q, lse, grad, delta), kv, blocks)
                dq += dq_term
            _wait(works)
            if step == 0:
                at_home = term
            else:
                total = earlier + term
        if goes_home and member.size > 1:
            others = torch.empty_like(at_home)
            exchange(member, total, member.rank + 1, others, member.rank - 1)
            at_home += others
        dk, dv = at_home.to(k.dtype) if goes_home else (None, None)
        return dq.to(q.dtype), dk, dv, None


def _terms(
    queries: tuple[Tensor, Tensor, Tensor, Tensor], kv: Tensor, blocks: Iterable[Tile]
) -> tuple[Tensor, Tensor]:
    """Return what a block of keys contributes to dq, and this rank's queries to its dk and dv.

    queries   q, lse, grad and delta, as `block_gradients` has them
    """
    wide_dtype = queries[1].dtype
    dq, dkv = (torch.zeros_like(x, dtype=wide_dtype) for x in (queries[0], kv))
    for rows, columns, mask in blocks:
        q, lse, grad, delta = (x[:, :, rows] for x in queries)
        keys, values = kv[:, :, :, columns]
        terms = block_gradients(q, keys, values, mask, lse, grad, delta)
        dq[:, :, rows] += terms[0]
        dkv[:, :, :, columns] += torch.stack(terms[1:])
    return dq, dkv


def _go_around(kv: Tensor, placed: Placement) -> Iterator[tuple[int, Tensor]]:
    """Yield (whose block, keys and values) p times, this rank's first.

    The next block is on its way while the caller computes with one.
    """
    member, p = placed.member, placed.member.size
    for step in range(p):
        source = (member.rank - step) % p
        coming, works = kv, list[dist.Work]()
        if step < p - 1:
            coming = _block_of(source - 1, kv, placed)
            works = start_exchange(member, kv, member.rank + 1, coming, member.rank - 1)
        yield source, kv
        _wait(works)
        kv = coming


def _block_of(
    rank: int, like: Tensor, placed: Placement, dtype: torch.dtype | None = None
) -> Tensor:
    """Return room for the keys and values of a rank: [2, batch, kv_heads, its tokens, head_dim]."""
    length = placed.lengths[rank % placed.member.size]
    return like.new_empty(*like.shape[:-2], length, like.shape[-1], dtype=dtype)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
