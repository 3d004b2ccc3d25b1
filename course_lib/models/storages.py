"""Bytes that tensors occupy: each storage once, however many tensors are views of it.

Weights, gradients, optimizer state and activations are all counted with these two functions.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def storage_bytes(tensors: Iterable[Any], counted: set[int] | None = None) -> int:
    """Return the bytes of the tensors' storages, each storage once.

    Of a sharded tensor (a DTensor) the local shard counts; None and anything else counts 0.

    counted   keys of storages that an earlier call has counted: left out here; new ones are added
    """
    counted = set() if counted is None else counted
    total = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (key := storage_key(tensor)) not in counted:
            counted.add(key)
            total += _local(tensor).untyped_storage().nbytes()
    return total


def storage_key(tensor: Tensor) -> int:
    """Return a number that all views of one storage share; valid as long as the storage lives."""
    return _local(tensor).untyped_storage()._cdata


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)
