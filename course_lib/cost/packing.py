"""Packing of tensors into buckets, each of which is sent as one message."""

from collections.abc import Sequence


def fill_buckets(sizes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """Pack tensors of these bytes into buckets, in order; return the indices in each bucket.

    A bucket holds what fits into `bucket_bytes`. No tensor is split: a larger one has a bucket of
    its own.
    """
    buckets: list[list[int]] = []
    free = 0.0
    for number, size in enumerate(sizes):
        if not buckets or size > free:
            buckets.append([])
            free = bucket_bytes
        buckets[-1].append(number)
        free -= size
    return buckets
