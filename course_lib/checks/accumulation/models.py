"""Models and batches for the checks of 02: plain ones, and one whose parameters are not alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

ODD = "with tied, frozen and unused parameters, a part in eval mode"


class Odd(nn.Module):
    """A model whose parameters are not alike: `last(two(one(first(x))) * frozen)`, in float64.

    The two layers in the middle share their weight, and the second one is in eval mode. `frozen`
    needs no gradient, and `unused` gets none, as no output depends on it. The numbers are the same
    every time.
    """

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.two.eval()
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.full((3,), 0.25))
        self.double()
        with torch.no_grad():
            for number, param in enumerate(self.parameters(), start=1):
                param.copy_(torch.arange(param.numel()).add(number).sin().view_as(param))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer for x: [items, ...]."""
        return self.last(self.two(self.one(self.first(x))) * self.frozen)


def two_groups(model: Odd, lr: float) -> torch.optim.SGD:
    """Return an optimizer with all parameters of the model, in two groups with weight decay."""
    first = [model.one.weight, *model.first.parameters()]
    rest = [param for param in model.parameters() if all(param is not one for one in first)]
    groups: list[dict[str, Any]] = [{"params": first, "lr": lr / 2}, {"params": rest}]
    return torch.optim.SGD(groups, lr=lr, weight_decay=0.1)


def example(items: int, odd: bool = False) -> tuple[Any, Tensor, Tensor]:
    """Return a model, plain or `odd`, and inputs and targets for it."""
    model = Odd(nn.Linear(2, 3), nn.Linear(3, 2)) if odd else line()
    return model, *batch_of(items, width=2 if odd else 1)


def in_parts(x: Tensor, y: Tensor, lengths: int | Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets in parts of these lengths."""
    return list(zip(x.split(lengths), y.split(lengths), strict=True))


def batch_of(items: int, width: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs [items, 2] and targets [items, width], the same every time."""
    random = torch.Generator().manual_seed(items)
    x = torch.randint(1, 6, (items, 2), generator=random).double()
    return x, torch.randint(-20, 20, (items, width), generator=random).double()


def line() -> nn.Linear:
    """Return a linear model with known weights, in float64."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
        model.bias.fill_(0.5)
    return model


def thick(items: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model that keeps many bytes for backward, with inputs and targets for it."""
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64))
    return model, torch.ones(items, 2), torch.ones(items, 64)


def mean_of_items(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the items of each one's mean square error: [items, length, 1]."""
    return (outputs - targets).square().mean((1, 2)).mean()


def of_two_lengths() -> list[tuple[Tensor, Tensor]]:
    """Return two parts whose items are sequences: 3 of 5 tokens, 2 of 2."""
    (x, y), (u, v) = batch_of(15), batch_of(4)
    return [(x.view(3, 5, 2), y.view(3, 5, 1)), (u.view(2, 2, 2), v.view(2, 2, 1))]


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean square error, in memory of one number.

    The loss that F.mse_loss returns has memory for as many numbers as the outputs have.
    """
    return (outputs - targets).square().mean()
