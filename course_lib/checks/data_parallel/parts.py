"""Tools for the checks of 05_data_parallel: a module with every kind of state, and a budget.

Tensor i of its state holds i + 1 and a little more at each place, times 10**r on rank r: a wrong
number tells which rank and which tensor it comes from.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.on_ranks import calls_of
from course_lib.checks.properties import REDUCES, TRAINS, Property
from course_lib.core import Event

FINE = 1 + 2**-30  # what float32 loses
BUDGET = "budget"  # a facet: what goes beyond it


class Everything(nn.Module):
    """A module, never called, with state of all kinds at several depths.

    A weight is tied, a layer is frozen, one is trained but unused, another one's weight is a
    transposed tensor, `gate` is a single number, `mask` is a tied buffer that `state_dict()`
    leaves out, and `causal` holds an -inf, as masks of attention do. Batch norm is in eval mode,
    the others are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(3), persistent=False)
        self.register_buffer("causal", torch.tensor([0.0, -inf]))
        self.embedding = nn.Embedding(3, 2)
        self.inner = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 3, bias=False))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.transposed = nn.Linear(4, 2, bias=False)
        self.transposed.weight.data = torch.zeros(4, 2).t()
        self.unused, self.gate = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.double()
        self.inner[1].weight = self.embedding.weight
        self.frozen.register_buffer("tied_mask", self.get_buffer("mask"), persistent=False)
        self.inner[0].eval()


def module_of(rank: int) -> nn.Module:
    """Return the module with the numbers of a rank."""
    module = Everything()
    for index, tensor in enumerate(state_of(module).values()):
        tensor.copy_(pattern(index, tensor) * 10**rank)
    return module


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, detached; a tied one only once."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def pattern(index: int, tensor: Tensor) -> Tensor:
    """Return the numbers of rank 0's tensor `index`, whose sums over ranks are exact.

    What is -inf in the tensor is so in its pattern, on every rank.
    """
    if not tensor.is_floating_point():
        return torch.full_like(tensor, index + 1)
    places = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    return ((index + 1 + places / 8) * FINE).where(tensor.isfinite(), tensor)


def grads_of(module: nn.Module) -> dict[str, Any]:
    """Return the gradient of each parameter, by name; None where there is none."""
    return {name: param.grad for name, param in module.named_parameters()}


def beyond(events: Iterable[Event], kind: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Return what calls take beyond a budget: one call of a kind for each of these sizes.

    Fewer and smaller calls are within it.
    """
    calls = calls_of(events)
    more_bytes = sum(call.num_bytes for call in calls) - sum(sizes)
    return {
        "other calls": [call.kind for call in calls if call.kind != kind],
        "calls too many": max(0, len(calls) - len(sizes)),
        "bytes too many": max(0, more_bytes),
    }


def properties(*names: str) -> list[Property]:
    """Return the mistakes of these names that any answer with gradients or all-reduces can make."""
    known = {one.name: one for one in (*TRAINS, *REDUCES)}
    return [known[name] for name in names]
