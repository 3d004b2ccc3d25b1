"""Modules for the checks of 10_fsdp: one with a tied weight, one smaller than its group."""

import torch
from torch import Tensor, nn

WIDTH, TOKENS = 3, 2


class TiedModel(nn.Module):
    """Three layers; the first two have one weight, which backward needs twice.

    The last one is the first by name, so that neither end of the list gets its gradient last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH - 1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        numbered(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Small(nn.Module):
    """A module with one number: fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(1, 1, bias=False)
        numbered(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.only(x[:, :1]))


MODULES: dict[str, type[nn.Module]] = {"three layers": TiedModel, "one number": Small}


def numbered(module: nn.Module) -> None:
    """Fill a module in float64 with a different value for each number, the same on all ranks."""
    module.double()
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=random, dtype=torch.double))


def batch(rank: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Return x of a rank, and the gradient from above for three numbers per token."""
    random = torch.Generator().manual_seed(100 + 10 * number + rank)
    x, above = torch.randn(2, TOKENS, WIDTH, generator=random, dtype=torch.double)
    return x, above


def num_rows(tensor: Tensor, p: int) -> int:
    """Return the rows of a full shard."""
    return -(-len(tensor) // p)


def rows_of(tensor: Tensor, rank: int, p: int) -> Tensor:
    """Return the rows that a rank keeps, as torch.chunk splits them."""
    rows = num_rows(tensor, p)
    return tensor[rank * rows : (rank + 1) * rows]


def pack(tensors: list[Tensor], p: int) -> Tensor:
    """Return all tensors as one [p, n]: row r has what rank r keeps of each, padded with zeros."""
    parts = []
    for tensor in tensors:
        padded = tensor.new_zeros(p * num_rows(tensor, p), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts.append(padded.view(p, -1))
    return torch.cat(parts, dim=1)


def packed_numel(module: nn.Module, p: int) -> int:
    """Return the numbers of a packed module, with the padding."""
    return pack([param.detach() for param in module.parameters()], p).numel()
