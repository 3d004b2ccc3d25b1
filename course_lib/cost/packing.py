"""Pack sizes into buckets in order: which tensors share one message."""

from collections.abc import Sequence


def fill_buckets(sizes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """Put things of these sizes into buckets, in order; return who is in which, by number.

    A bucket takes what fits into `bucket_bytes`. Nothing is cut: what is larger than that has a
    bucket of its own.
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
