"""Fingerprints of tensors: a hash of the bits, and a sketch that is linear in the values.

The hash says whether two tensors are equal to the last bit. The sketch is `WIDTH` products of the
tensor with fixed random tensors. It is linear: the sketch of a sum is the sum of the sketches, and
shards of a tensor have sketches that add up to that of the whole. So two runs with other shards,
or the sum of what several ranks have, can be compared without any value being stored.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from course_lib.core.shards import Box

WIDTH = 4  # a difference is overlooked only if all of these products are zero
Sketch = tuple[float, ...]


def bit_hash(tensor: Tensor) -> str:
    """Return 16 digits that differ for tensors of the same dtype and shape that differ in a bit."""
    raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=8).hexdigest()


def sketch(part: Tensor, box: Box, shape: Sequence[int]) -> Sketch:
    """Return the sketch of the part of a tensor of `shape` that lies in the box.

    The random tensors are products of a vector per dim, so a rank makes only vectors.

    Cost:    2 * WIDTH FLOP per element, in float64
    """
    found = part.detach().to("cpu", torch.float64).unsqueeze(-1).expand(*part.shape, WIDTH)
    for dim in reversed(range(part.dim())):
        factors = _vectors(dim, shape[dim])[box.offsets[dim] : box.offsets[dim] + box.sizes[dim]]
        found = torch.einsum("...nk,nk->...k", found, factors)
    return tuple(found.tolist())


@lru_cache(maxsize=256)
def _vectors(dim: int, size: int) -> Tensor:
    """Return WIDTH random vectors of `size`, the same in every process."""
    generator = torch.Generator().manual_seed(1 + dim)
    return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return an estimate of the norm of the difference of two tensors from their sketches."""
    return float((sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / WIDTH) ** 0.5)


def added(sketches: Sequence[Sequence[float]], factor: float = 1.0) -> Sketch:
    """Return the sketch of the sum of tensors, times a factor."""
    return tuple(factor * sum(column) for column in zip(*sketches, strict=True))
