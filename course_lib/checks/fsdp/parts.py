"""Tools for the checks of 10_fsdp: how the rows of a tensor are split."""

from torch import Tensor


def num_rows(tensor: Tensor, p: int) -> int:
    """Return the rows of a full shard."""
    return -(-len(tensor) // p)


def rows_of(tensor: Tensor, rank: int, p: int) -> Tensor:
    """Return the rows that a rank keeps, as torch.chunk splits them."""
    rows = num_rows(tensor, p)
    return tensor[rank * rows : (rank + 1) * rows]
