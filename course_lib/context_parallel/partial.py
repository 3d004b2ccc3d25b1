"""Partial attention: softmax over some of the keys, and how parts are merged.

Beside its output o, attention over a block of keys returns lse, the logarithm of the sum of the
exponentials of a query's scores. It says how much the block weighs: two blocks merge as

    lse = log(exp lse1 + exp lse2),    o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2

in any order, and the result is attention over all keys. So no rank has to hold them all.
Notebook 15_context_parallel.
"""

import math

import torch
from torch import Tensor


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to a block of keys; return the output and the lse of every query.

    A query that sees no key of the block has o = 0 and lse = -inf. Computes in fp32 or wider.

    mask     True where a query sees a key; None: everywhere

    Shapes:  q [batch, heads, n, head_dim], k and v [batch, kv_heads, m, head_dim], mask
             [batch or 1, n, m] -> [batch, heads, n, head_dim], [batch, heads, n]
    Cost:    4 n m head_dim FLOP per head
    Source:  Rabe and Staats 2021 (Self-attention Does Not Need O(n^2) Memory)
    """
    with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
        scores = _scores(q, k, mask)  # [batch, kv_heads, group, n, m]
        lse = scores.logsumexp(dim=-1)
        o = _weights(scores, lse) @ _shared(v)
    return o.flatten(1, 2), lse.flatten(1, 2)


def merge(o: Tensor, lse: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries to two blocks of keys into that to both blocks.

    No exponential overflows, as the largest is exp(0); a part with lse = -inf counts for nothing.

    Shapes:  o [..., n, head_dim] and lse [..., n], twice -> once
    Source:  Dao et al. 2022 (FlashAttention), section 3.1
    """
    both = torch.logaddexp(lse, lse2)
    safe = both.masked_fill(both == -math.inf, 0.0)  # -inf - (-inf) would be nan
    o = (lse - safe).exp()[..., None] * o + (lse2 - safe).exp()[..., None] * o2
    return o, both


def no_part(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention to no key at all, to merge others with: o = 0, lse = -inf."""
    o = q.new_zeros(q.shape, dtype=wide(q.dtype))
    return o, o.new_full(q.shape[:-1], -math.inf)


# --- backward


def block_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    grad: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms of dq, dk and dv that a block of keys contributes.

    lse, the one over all keys, gives the weights of attention again: w = exp(score - lse). The
    gradient of a score is w (grad . v - delta), in which delta = grad . o stands for all keys.

    Shapes:  q, k, v, mask as in `attend_block`; grad as q; lse and delta [batch, heads, n]
    Cost:    10 n m head_dim FLOP per head
    Source:  Dao et al. 2022 (FlashAttention), appendix B.2
    """
    kv_heads, scale = k.shape[1], 1 / math.sqrt(q.shape[-1])
    lse, delta, grad = (x.unflatten(1, (kv_heads, -1)) for x in (lse, delta, grad))
    weights = _weights(_scores(q, k, mask), lse)  # [batch, kv_heads, group, n, m]
    dv = (weights.mT @ grad).sum(dim=2)  # over the queries that share a key
    dscores = weights * (grad @ _shared(v).mT - delta[..., None]) * scale
    dq = dscores @ _shared(k)
    dk = (dscores.mT @ _grouped(q, kv_heads)).sum(dim=2)
    return dq.flatten(1, 2), dk, dv


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = _grouped(q, k.shape[1]) @ _shared(k).mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None].to(scores.device), -math.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), and 0 for a query that has seen no key."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Group the queries that share a key: [batch, heads, ...] -> [batch, kv_heads, group, ...]."""
    return q.to(wide(q.dtype)).unflatten(1, (kv_heads, -1))


def _shared(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype)).unsqueeze(2)
