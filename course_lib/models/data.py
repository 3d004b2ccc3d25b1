"""Tokens generated from a seed: batch n is a function of (seed, n) and nothing else.

So any number of ranks can read the same batches without communicating, a restarted run continues
where it stopped, and a test knows its input. With probability 3/4 a token follows from the one
before by a fixed rule, so that a small model has something to learn.
"""

import torch
from torch import Tensor

from course_lib.core.errors import ShapeError

IGNORED = -100  # the target of a token that has no loss, as torch's cross_entropy has it


def token_batch(n: int, *, batch: int, seq: int, vocab: int, seed: int = 0) -> Tensor:
    """Return the n-th batch of tokens.

    Shapes:  -> [batch, seq + 1]; the targets are the inputs shifted by one (see `next_tokens`)
    Raises:  ShapeError for a size below 1, or a negative n
    """
    if min(batch, seq, vocab) < 1 or n < 0:
        raise ShapeError(
            f"token_batch: need batch, seq, vocab >= 1 and n >= 0; got {batch, seq, vocab} and {n}."
        )
    random = torch.Generator().manual_seed(mixed_seed(seed, n))
    tokens = torch.randint(vocab, (batch, seq + 1), generator=random)
    follows = torch.rand(batch, seq + 1, generator=random) < 0.75
    for at in range(1, seq + 1):
        rule = (5 * tokens[:, at - 1] + 1) % vocab
        tokens[:, at] = torch.where(follows[:, at], rule, tokens[:, at])
    return tokens


def next_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Split tokens into inputs and targets, which are shifted by one.

    Shapes:  [batch, seq + 1] -> [batch, seq] twice
    """
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def padded_batch(
    n: int, *, batch: int, seq: int, vocab: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of sequences that end early: targets after the end are `IGNORED`.

    Lengths are random from 1 to seq, so parts of a batch hold different numbers of tokens.

    Shapes:  -> [batch, seq] twice
    Raises:  ShapeError for a size below 1, or a negative n
    """
    inputs, targets = next_tokens(token_batch(n, batch=batch, seq=seq, vocab=vocab, seed=seed))
    random = torch.Generator().manual_seed(mixed_seed(seed + 1, n))
    lengths = torch.randint(1, seq + 1, (batch, 1), generator=random)
    return inputs, targets.masked_fill(torch.arange(seq) >= lengths, IGNORED)


def mixed_seed(seed: int, n: int) -> int:
    """Return one seed from two numbers; (seed, n) and (seed + 1, n - 1) give different ones."""
    return (seed * 1_000_003 + n * 7919 + 17) % 2**63
