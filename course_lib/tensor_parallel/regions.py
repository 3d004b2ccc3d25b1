"""The boundaries of a region where ranks compute different things, each with its way in and back.

In front of a split matrix all ranks hold the same tensor, or (sequence parallelism) each its own
tokens of every sequence; behind it each holds a part of a sum. A boundary is a collective in forward
and its adjoint in backward: what adds up on one way only hands through on the other. And one rule
for shards: all of equal size, the last ones filled up with zeros. Notebook 07_tensor_parallel.

    boundary               forward          backward         on paper
    copy_to_region     -                all_reduce       f (Shoeybi), f (Korthikanti)
    reduce_from_region all_reduce       -                g (Shoeybi), f-bar (Korthikanti)
    gather_sequence    all_gather       reduce_scatter   g (Korthikanti)
    scatter_sequence   reduce_scatter   all_gather       g-bar (Korthikanti)
    gather_columns     all_gather       own columns
    split_columns      own columns      all_gather
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives.group import Group
from course_lib.core.errors import ShapeError

SEQUENCE = 1  # the dim of the tokens in [batch, seq, hidden]
Way = Callable[[Tensor], Tensor]


class _Boundary(torch.autograd.Function):
    """`there` in forward, `back` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def copy_to_region(x: Tensor, group: Group = None) -> Tensor:
    """f: the same x on all ranks; backward adds up what each rank's part of the region says of it.

    Cost:    nothing forward, one all_reduce of x backward
    Adjoint: reduce_from_region
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3
    """
    return _Boundary.apply(x, _same, partial(_sum, group=group))


def reduce_from_region(x: Tensor, group: Group = None) -> Tensor:
    """g: the sum of all ranks' x; backward hands the gradient through.

    Cost:    one all_reduce of x forward, nothing backward
    Adjoint: copy_to_region
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3
    """
    return _Boundary.apply(x, partial(_sum, group=group), _same)


def gather_sequence(x: Tensor, group: Group = None) -> Tensor:
    """All tokens out of each rank's; backward adds up, and each rank gets its own tokens' part.

    The matrix behind it keeps all tokens for its backward. Megatron keeps this rank's only, and
    gathers the others again: tp times less memory, one all_gather more.

    Shapes:  [batch, seq/tp, hidden] -> [batch, seq, hidden]
    Cost:    one all_gather forward, one reduce_scatter backward, (p-1)/p * output bytes each
    Adjoint: scatter_sequence
    Source:  Korthikanti et al. 2022, section 4
    """
    ways = partial(all_gather, dim=SEQUENCE, group=group), partial(_own_sum, group=group)
    return _Boundary.apply(x, *ways)


def scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Each rank's tokens of the sum of all ranks' x; backward gathers the gradient.

    Shapes:  [batch, seq, hidden] -> [batch, seq/tp, hidden]
    Cost:    one reduce_scatter forward, one all_gather backward, (p-1)/p * input bytes each
    Adjoint: gather_sequence
    Raises:  ShapeError if tp does not divide seq
    Source:  Korthikanti et al. 2022, section 4
    """
    p, seq = dist.get_world_size(group), x.shape[SEQUENCE]
    if seq % p:
        raise ShapeError(
            f"rank {dist.get_rank()}, sequence parallel: need seq divisible by tp; got {seq} and "
            f"{p}. Try seq={seq + p - seq % p}, or sequence_parallel=False."
        )
    ways = partial(_own_sum, group=group), partial(all_gather, dim=SEQUENCE, group=group)
    return _Boundary.apply(x, *ways)


def gather_columns(x: Tensor, num_columns: int, group: Group = None) -> Tensor:
    """The whole rows out of each rank's columns; what filled them up is left out.

    Shapes:  [..., columns/tp] -> [..., num_columns]
    Cost:    one all_gather forward, nothing backward
    Adjoint: split_columns
    """
    gather = partial(gather_whole, dim=-1, size=num_columns, group=group)
    return _Boundary.apply(x, gather, partial(own_shard, dim=-1, group=group))


def split_columns(x: Tensor, group: Group = None) -> Tensor:
    """This rank's columns of an x that all ranks hold; backward gathers the gradient.

    Shapes:  [..., columns] -> [..., columns/tp]
    Cost:    nothing forward, one all_gather backward
    Adjoint: gather_columns
    """
    gather = partial(gather_whole, dim=-1, size=x.shape[-1], group=group)
    return _Boundary.apply(x, partial(own_shard, dim=-1, group=group), gather)


# --- shards


def own_shard(whole: Tensor, dim: int, group: Group = None) -> Tensor:
    """A copy of this rank's shard: ceil(n/p) of dim's n, filled up with zeros where n ends."""
    n, size = whole.shape[dim], -(-whole.shape[dim] // dist.get_world_size(group))
    start = min(dist.get_rank(group) * size, n)
    part = whole.narrow(dim, start, min(size, n - start))
    shape = list(whole.shape)
    shape[dim] = size
    shard = whole.new_zeros(shape)
    shard.narrow(dim, 0, part.shape[dim]).copy_(part)
    return shard


def gather_whole(shard: Tensor, dim: int, size: int, group: Group = None) -> Tensor:
    """What `own_shard` has cut: the shards side by side, without what filled them up."""
    return all_gather(shard, dim, group).narrow(dim, 0, size)


def all_gather(shard: Tensor, dim: int, group: Group = None) -> Tensor:
    """The shards of all ranks side by side along `dim`."""
    p = dist.get_world_size(group)
    shards = shard.new_empty(p * len(shard), *shard.shape[1:])
    dist.all_gather_single(shards, shard.contiguous(), group=group)
    return torch.cat(shards.chunk(p), dim)


def _own_sum(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens of the sum over the group: a reduce_scatter."""
    parts = x.chunk(dist.get_world_size(group), SEQUENCE)
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_single(out, torch.cat(parts), group=group)
    return out


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # x may be somebody else's too
    dist.all_reduce(total, group=group)
    return total


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
