"""The uses of the pair in exercise 6 of 07_tensor_parallel, and what they lead to.

Rank r's part multiplies by 10**r, so that a wrong sum tells which ranks are in it. In bfloat16 it
multiplies by r: the sums are exact, and what rank 0 brings is 0. In float32 it is a random matrix.
Where p does not divide the tokens, the last ranks' padding holds 99.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.checks.on_ranks import At

PADDING = 99.0


@dataclass(frozen=True)
class SequenceUse:
    """All tokens, the gradient of all tokens from above, and each rank's matrix."""

    x: Tensor
    up: Tensor
    matrix: Callable[[int], Tensor]
    frozen: bool = False  # x needs no gradient
    no_grad: bool = False
    lies: bool = False  # the own tokens are a transposed tensor: not contiguous

    def own(self, whole: Tensor, p: int, rank: int) -> Tensor:
        """Return the tokens that a rank is given, with padding that is no token."""
        shard = own_tokens_of(whole, p, rank, PADDING)
        return shard.transpose(0, 1).contiguous().transpose(0, 1) if self.lies else shard


def _numbers(*shape: int, first: int = 1) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).view(shape).double()


def _random(seed: int, *shape: int) -> Tensor:
    """Return positive numbers: where they are added up, no digits cancel."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def _digit(rank: int) -> Tensor:
    return torch.eye(3).double() * 10.0**rank


EVEN = _numbers(2, 12, 3), _numbers(2, 12, 3, first=7) ** 2, _digit
USES = {
    "12 tokens": SequenceUse(*EVEN),
    "7 tokens": SequenceUse(_numbers(2, 7, 3), _numbers(2, 7, 3, first=7) ** 2, _digit),
    "7 tokens, not contiguous, in bfloat16": SequenceUse(
        _numbers(2, 7, 2).bfloat16(),
        _numbers(2, 7, 2, first=3).bfloat16(),
        lambda rank: torch.eye(2).bfloat16() * rank,
        lies=True,
    ),
    "3 tokens in float32, the part's output is wider": SequenceUse(
        _random(100, 1, 3, 2), _random(101, 1, 3, 5), lambda rank: _random(rank, 2, 5)
    ),
    "an x that needs no gradient": SequenceUse(*EVEN, frozen=True),
    "under torch.no_grad()": SequenceUse(*EVEN, frozen=True, no_grad=True),
}


def own_tokens_of(whole: Tensor, p: int, rank: int, padding: float = 0.0) -> Tensor:
    """Return a rank's ceil(seq/p) tokens; what is missing at the end is padding."""
    size = -(-whole.shape[1] // p)
    own = whole.new_full((len(whole), size, whole.shape[2]), padding)
    part = whole[:, rank * size : (rank + 1) * size]
    own[:, : part.shape[1]] = part
    return own


def sequence_use(at: At) -> SequenceUse:
    """Return the use of this label."""
    return USES[at.label]


def own_matrix(at: At) -> Tensor:
    """Return the matrix of this rank's part."""
    return sequence_use(at).matrix(at.rank)


def total_matrix(at: At) -> Tensor:
    """Return the sum of all ranks' matrices."""
    return torch.stack([sequence_use(at).matrix(rank) for rank in range(at.world_size)]).sum(0)


def parts_of(at: At, whole: Tensor, padding: float = 0.0) -> list[Tensor]:
    """Return the tokens of each rank."""
    return [own_tokens_of(whole, at.world_size, rank, padding) for rank in range(at.world_size)]


def sum_of(matrix: Callable[[At], Tensor], shift: int = 0) -> Callable[[At], Tensor]:
    """Return a function of At: what leaves the region if the parts add up to this matrix.

    shift   1: the tokens of the next rank
    """

    def out(at: At) -> Tensor:
        whole = sequence_use(at).x @ matrix(at)
        return parts_of(at, whole)[(at.rank + shift) % at.world_size]

    return out


def grad_of(matrix: Callable[[At], Tensor]) -> Callable[[At], Tensor | None]:
    """Return a function of At: the gradient of the own tokens, with this matrix."""

    def grad(at: At) -> Tensor | None:
        use = sequence_use(at)
        return None if use.frozen else parts_of(at, use.up @ matrix(at).t())[at.rank]

    return grad


def whole_bytes(at: At, tensor: Tensor) -> int:
    """Return the bytes of all tokens of a tensor, with padding."""
    return sum(part.nbytes for part in parts_of(at, tensor))
