"""Layouts of a sequence over the ranks of a group: which positions each rank holds.

Rank r of p holds, in rising order,

    contiguous   the r-th of p pieces
    zigzag       chunks r and 2p - 1 - r of 2p: an early one and a late one
    striped      positions r, r + p, r + 2p, ...

Under a causal mask late tokens see more keys than early ones, so the last rank of a contiguous
layout computes the most; the other two give every rank early and late tokens. A length that p does
not divide leaves some ranks with more tokens. Notebook 15_context_parallel.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from course_lib.core.errors import CourseError, ShapeError

if TYPE_CHECKING:  # `cost.py` stands on this file, and needs no PyTorch
    from torch import Tensor

LAYOUTS = ("contiguous", "zigzag", "striped")


def positions(rank: int, p: int, seq: int, layout: str = "contiguous") -> list[int]:
    """Return the global positions of the tokens that a rank holds, in the order of its shard.

    Rotary and learned positions of a shard are those of this list, not 0, 1, 2, ...

    Raises:  CourseError for another layout; ShapeError for a rank outside 0 .. p-1, or seq < p
    Source:  Brandon et al. 2023 (Striped Attention); the zigzag is that of Llama 3
             (Grattafiori et al. 2024, section 3.3.2)
    """
    return [at for part in _ranges(rank, p, seq, layout) for at in part]


def lengths_of(seq: int, p: int, layout: str = "contiguous") -> list[int]:
    """Return the number of tokens on each rank. Raises: as `positions`"""
    return [sum(map(len, _ranges(rank, p, seq, layout))) for rank in range(p)]


def _ranges(rank: int, p: int, seq: int, layout: str) -> list[range]:
    if layout not in LAYOUTS:
        raise CourseError(
            f"positions: need layout as one of {', '.join(LAYOUTS)}; got {repr(layout)[:60]}."
        )
    if not 0 <= rank < p or seq < p:
        raise ShapeError(
            f"positions: need a rank from 0 to p - 1 and a token for every rank, seq >= p; got "
            f"rank {rank}, p = {p}, seq = {seq}. Try a longer sequence, or fewer ranks."
        )
    if layout == "contiguous":
        return [_chunk(rank, p, seq)]
    if layout == "zigzag":
        return [_chunk(rank, 2 * p, seq), _chunk(2 * p - 1 - rank, 2 * p, seq)]
    return [range(rank, seq, p)]


def _chunk(index: int, count: int, seq: int) -> range:
    """Return the positions of one of `count` chunks; the first ones may be longer by one."""
    size, longer = divmod(seq, count)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def shard(whole: "Tensor", rank: int, p: int, layout: str = "contiguous", dim: int = 1) -> "Tensor":
    """Return a rank's tokens of a tensor that has all of them along `dim`.

    Shapes:  [batch, seq, ...] -> [batch, seq/p, ...]; a copy
    Raises:  CourseError for another layout; ShapeError for a sequence shorter than p
    """
    held = positions(rank, p, whole.shape[dim], layout)
    return whole.movedim(dim, 0)[held].movedim(0, dim).contiguous()


def unshard(shards: Sequence["Tensor"], layout: str = "contiguous", dim: int = 1) -> "Tensor":
    """Put the shards of all ranks together again, in the order of the sequence.

    Shapes:  p times [batch, seq/p, ...] -> [batch, seq, ...]
    Raises:  ShapeError for shards that are not those of one sequence
    """
    p, lengths = len(shards), [one.shape[dim] for one in shards]
    held = [positions(rank, p, sum(lengths), layout) for rank in range(p)]
    if not shards or lengths != [len(own) for own in held]:
        raise ShapeError(
            f"unshard: need the {layout} shards of {sum(lengths)} tokens, of lengths "
            f"{[len(own) for own in held]}; got {lengths}. Try all shards, in the order of ranks."
        )
    shape = list(shards[0].shape)
    shape[dim] = sum(lengths)
    whole = shards[0].new_empty(shape)
    for own, one in zip(held, shards, strict=True):
        whole.movedim(dim, 0)[own] = one.movedim(dim, 0)
    return whole


def shard_batch(
    tokens: "Tensor", targets: "Tensor", rank: int, p: int, layout: str = "contiguous"
) -> tuple["Tensor", "Tensor"]:
    """Return a rank's tokens, and the target of each: the token that follows it in the sequence.

    Targets are made of whole sequences (`next_tokens`), before they are split: the target of a
    shard's last token is the first token of another rank's shard.

    Shapes:  tokens and targets [batch, seq] -> [batch, seq/p] twice
    Raises:  ShapeError for tokens and targets of different shapes, or shorter than p
    """
    if tokens.shape != targets.shape:
        raise ShapeError(
            f"shard_batch: need a target for every token; got {list(tokens.shape)} tokens and "
            f"{list(targets.shape)} targets. Try next_tokens(tokens), before the split."
        )
    return shard(tokens, rank, p, layout), shard(targets, rank, p, layout)
