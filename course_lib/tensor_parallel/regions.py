"""Boundaries of a parallel region: the conjugate functions f, g, f-bar and g-bar.

Before a region of split matrices all ranks hold the same tensor, or (with sequence parallelism)
each its own tokens of every sequence; at its end each holds a partial sum. A boundary is a
collective in forward and its adjoint in backward: where one direction sums, the other copies.
Shards are all of equal size; the last ones are padded with zeros. Notebook 07_tensor_parallel.

    boundary           forward          backward         in the papers
    copy_to_region     -                all_reduce       f (Shoeybi), f (Korthikanti)
    reduce_from_region all_reduce       -                g (Shoeybi), f-bar (Korthikanti)
    gather_sequence    all_gather       reduce_scatter   g (Korthikanti)
    scatter_sequence   reduce_scatter   all_gather       g-bar (Korthikanti)
    replicate_sequence all_gather       own tokens
    own_sequence       own tokens       all_gather
    gather_columns     all_gather       own columns
    split_columns      own columns      all_gather
    all_reduce_both    all_reduce       all_reduce       (where each rank has a loss of its own)

All but the last assume that every rank computes the same loss, which counts once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives.group import Group
from course_lib.core.errors import ShapeError

SEQUENCE = 1  # the dim of the tokens in [batch, seq, hidden]
TensorFn = Callable[[Tensor], Tensor]


class _Boundary(torch.autograd.Function):
    """Boundary of a parallel region: one function of x in forward, its adjoint in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: TensorFn, adjoint: TensorFn) -> Tensor:
        ctx.adjoint = adjoint
        return fn(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.adjoint(grad), None, None


def boundary(x: Tensor, fn: TensorFn, adjoint: TensorFn) -> Tensor:
    """Return fn(x), whose backward is the adjoint of the gradient."""
    return _Boundary.apply(x, fn, adjoint)


def copy_to_region(x: Tensor, group: Group = None) -> Tensor:
    """f: return x, which all ranks hold; backward sums the ranks' gradients of it.

    Cost:    nothing forward, one all_reduce of x backward
    Adjoint: reduce_from_region
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3
    """
    return _Boundary.apply(x, _same, partial(_sum, group=group))


def reduce_from_region(x: Tensor, group: Group = None) -> Tensor:
    """g: sum x over the ranks; backward passes the gradient on unchanged.

    Cost:    one all_reduce of x forward, nothing backward
    Adjoint: copy_to_region
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3
    """
    return _Boundary.apply(x, partial(_sum, group=group), _same)


def all_reduce_both(x: Tensor, group: Group = None) -> Tensor:
    """Sum x over the ranks; backward sums the gradients, as for losses that are summed over ranks.

    With the same loss on every rank, which counts once, this is p times too much: there backward is
    the identity, `reduce_from_region`.

    Cost:    one all_reduce of x forward, one of its gradient backward
    Adjoint: all_reduce_both
    Source:  PyTorch, torch.distributed.nn.functional.all_reduce
    """
    return _Boundary.apply(x, partial(_sum, group=group), partial(_sum, group=group))


def gather_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Gather the tokens of all ranks; backward sums the gradients and keeps the own tokens' part.

    The next matrix saves all tokens for its backward. `overlapped_columns` saves only this rank's,
    as Megatron does, and gathers the others again: tp times less memory, one more all_gather.

    Shapes:  [batch, seq/tp, hidden] -> [batch, seq, hidden]
    Cost:    one all_gather forward, one reduce_scatter backward, (p-1)/p * output bytes each
    Adjoint: scatter_sequence
    Source:  Korthikanti et al. 2022, section 4
    """
    gather = partial(all_gather, dim=SEQUENCE, group=group)
    return _Boundary.apply(x, gather, partial(_reduce_scatter, group=group))


def scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Sum x over the ranks and keep this rank's tokens; backward gathers the gradient.

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
    gather = partial(all_gather, dim=SEQUENCE, group=group)
    return _Boundary.apply(x, partial(_reduce_scatter, group=group), gather)


def replicate_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Gather the tokens of all ranks, which then compute the same; backward keeps the own part.

    Shapes:  [batch, seq/tp, hidden] -> [batch, seq, hidden]
    Cost:    one all_gather forward, nothing backward
    Adjoint: own_sequence, if each rank's gradient is the whole one
    """
    gather = partial(all_gather, dim=SEQUENCE, group=group)
    return _Boundary.apply(x, gather, partial(own_shard, dim=SEQUENCE, group=group))


def own_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Keep this rank's tokens of an x that all ranks hold; backward gathers the gradient.

    Shapes:  [batch, seq, hidden] -> [batch, seq/tp, hidden]
    Cost:    nothing forward, one all_gather backward
    Adjoint: replicate_sequence
    """
    gather = partial(all_gather, dim=SEQUENCE, group=group)
    return _Boundary.apply(x, partial(own_shard, dim=SEQUENCE, group=group), gather)


def gather_columns(x: Tensor, num_columns: int, group: Group = None) -> Tensor:
    """Gather the columns of all ranks, without padding; backward keeps the own columns.

    Shapes:  [..., columns/tp] -> [..., num_columns]
    Cost:    one all_gather forward, nothing backward
    Adjoint: split_columns
    """
    gather = partial(gather_whole, dim=-1, size=num_columns, group=group)
    return _Boundary.apply(x, gather, partial(own_shard, dim=-1, group=group))


def split_columns(x: Tensor, group: Group = None) -> Tensor:
    """Keep this rank's columns of an x that all ranks hold; backward gathers the gradient.

    Shapes:  [..., columns] -> [..., columns/tp]
    Cost:    nothing forward, one all_gather backward
    Adjoint: gather_columns
    """
    gather = partial(gather_whole, dim=-1, size=x.shape[-1], group=group)
    return _Boundary.apply(x, partial(own_shard, dim=-1, group=group), gather)


# --- shards


class ShardAxis(NamedTuple):
    """How a parameter is split over the ranks of a group.

    dim      that is split, and its whole `size`
    copies   so many ranks in a row hold the same shard: heads of keys that are fewer than tp
    """

    dim: int
    size: int
    copies: int = 1


def own_shard(whole: Tensor, dim: int, group: Group = None, copies: int = 1) -> Tensor:
    """Return a copy of this rank's shard along `dim`: ceil(n/p) of its n, padded with zeros.

    copies   as in `ShardAxis`: p is the number of ranks divided by it

    Shapes:  [..., n, ...] -> [..., ceil(n/p), ...]
    """
    n, size = whole.shape[dim], -(-whole.shape[dim] * copies // dist.get_world_size(group))
    start = min(dist.get_rank(group) // copies * size, n)
    part = whole.narrow(dim, start, min(size, n - start))
    shape = list(whole.shape)
    shape[dim] = size
    shard = whole.new_zeros(shape)
    shard.narrow(dim, 0, part.shape[dim]).copy_(part)
    return shard


def gather_whole(
    shard: Tensor, dim: int, size: int, group: Group = None, copies: int = 1
) -> Tensor:
    """Gather the shards that `own_shard` has cut; return the whole tensor without the padding.

    Shapes:  [..., ceil(size/p), ...] -> [..., size, ...]
    """
    whole = all_gather(shard, dim, group)
    if copies > 1:  # the first copy of each
        whole = torch.cat(whole.chunk(dist.get_world_size(group), dim)[::copies], dim)
    return whole.narrow(dim, 0, size)


def all_gather(shard: Tensor, dim: int, group: Group = None) -> Tensor:
    """Gather the shards of all ranks and concatenate them along `dim`."""
    p = dist.get_world_size(group)
    shards = shard.new_empty(p * len(shard), *shard.shape[1:])
    dist.all_gather_single(shards, shard.contiguous(), group=group)
    return torch.cat(shards.chunk(p), dim)


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the group and keep this rank's tokens: [batch, seq, ...] -> [batch, seq/tp, ...]."""
    parts = x.chunk(dist.get_world_size(group), SEQUENCE)
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_single(out, torch.cat(parts), group=group)
    return out


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # others may use x
    dist.all_reduce(total, group=group)
    return total


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
