"""Masks between two blocks of tokens, from their positions in the whole sequence.

A causal mask compares global positions: a shard's first token is not the sequence's first one. In a
packed sequence a token also sees its own document only. `tiles` finds what there is to compute of
a block, so that a rank spends no time on scores that the mask removes. Notebook
15_context_parallel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128  # queries whose scores are computed at once

Tile = tuple[slice, slice, Tensor | None]  # rows of q, rows of k and v, mask


@dataclass(frozen=True)
class HeldTokens:
    """Tokens of one rank: positions [n] in the whole sequence; documents [batch, n] or None."""

    positions: Tensor
    documents: Tensor | None = None

    def part(self, rows: slice) -> "HeldTokens":
        """Return some of the tokens."""
        documents = None if self.documents is None else self.documents[:, rows]
        return HeldTokens(self.positions[rows], documents)


def sees(queries: HeldTokens, keys: HeldTokens, causal: bool) -> Tensor:
    """Return which query sees which key: by position if causal, and within its document only.

    Shapes:  n and m tokens -> [batch, n, m], or [1, n, m] without documents
    """
    n, m = len(queries.positions), len(keys.positions)
    seen = torch.ones(1, n, m, dtype=torch.bool, device=keys.positions.device)
    if causal:
        seen = queries.positions[:, None] >= keys.positions[None]
        seen = seen[None]  # [1, n, m]
    if queries.documents is not None and keys.documents is not None:
        seen = seen & (queries.documents[:, :, None] == keys.documents[:, None])
    return seen


def tiles(
    queries: HeldTokens, keys: HeldTokens, causal: bool, size: int | None = None
) -> Iterator[Tile]:
    """Yield what there is to compute of a block: (rows of q, rows of k, mask) of each tile.

    A tile has up to `size` queries, and the keys from the first to the last that one of them sees;
    where nothing is seen there is no tile. The mask is None where everything is seen.

    Shapes:  mask [batch or 1, tile, keys of the tile]
    """
    size = size or TILE
    for start in range(0, len(queries.positions), size):
        rows = slice(start, start + size)
        seen = sees(queries.part(rows), keys, causal)
        of_any = seen.any(dim=0).any(dim=0).nonzero()
        if len(of_any):
            columns = slice(int(of_any[0]), int(of_any[-1]) + 1)
            mask = seen[..., columns]
            yield rows, columns, None if bool(mask.all()) else mask


def whole_of(held: Sequence[HeldTokens]) -> HeldTokens:
    """Return the tokens of all ranks, those of rank 0 first."""
    documents = [one.documents for one in held if one.documents is not None]
    whole = torch.cat(documents, dim=1) if documents else None
    return HeldTokens(torch.cat([one.positions for one in held]), whole)
