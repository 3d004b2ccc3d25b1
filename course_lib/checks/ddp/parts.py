"""Tools for the checks of 06_ddp: a model with known gradients.

Rank r's gradient is a multiple of 10**r, so that a wrong mean tells which ranks are in it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Bag(nn.Module):
    """Parameters whose gradients are known: `pattern(i)` times what forward is called with.

    Those of 4 numbers are matrices; `odd`: transposed ones, if they `lie`, and one number has no
    dimension.
    The second one is frozen, the first one is tied: it has two names, and is used twice.
    """

    def __init__(
        self,
        sizes: Iterable[int],
        *,
        order: Sequence[int] = (),
        odd: bool = False,
        lies: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        shapes = {4: (2, 2), 1: ()} if odd else {4: (2, 2)}
        full = [torch.full(shapes.get(size, (size,)), 7.0, dtype=dtype) for size in sizes]
        params = [nn.Parameter(x.t() if odd and lies and x.dim() == 2 else x) for x in full]
        self.weights, self.order = nn.ParameterList(params), order or range(len(params))
        self.trained = [i for i in range(len(params)) if i != 1]  # those that get a gradient
        params[1].requires_grad_(False)
        self.tied = params[0]

    def forward(self, scale: float | Tensor) -> Tensor:
        terms = [(self.weights[i] * self.pattern(i)).sum() for i in self.order]
        return (sum(terms[1:], terms[0]) + self.tied.sum()) * scale

    def pattern(self, i: int) -> Tensor:
        """Return 1, 2, 3 ... + i."""
        return torch.arange(1, self.weights[i].numel() + 1).double().view_as(self.weights[i]) + i

    def slope(self, i: int) -> Tensor:
        """Return the gradient for a scale of 1; the first parameter is used twice."""
        return self.pattern(i) + (i == 0)


def grads_of(module: Bag) -> dict[str, Any]:
    """Return the gradient of each parameter; None where there is none."""
    return {f"parameter {i}": param.grad for i, param in enumerate(module.weights)}
