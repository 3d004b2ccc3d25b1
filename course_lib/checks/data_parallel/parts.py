"""Tools for the checks of 05_data_parallel: a module with every kind of state, and a budget.

Tensor i of its state holds i + 1 and a little more at each place, times 10**r on rank r: a wrong
number tells which rank and which tensor it comes from.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.exercise import Cause
from course_lib.checks.expectations import Demand, OnlyKinds
from course_lib.checks.on_ranks import At

FINE = 1 + 2**-30  # what float32 loses

OTHER_CALL = Cause("Use the call that the text names, and no other one.")


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


def around(module: nn.Module) -> dict[str, Any]:
    """Return what is around the numbers of a module, as plain data."""
    return {
        "train or eval mode": [part.training for part in module.modules()],
        "requires_grad": [param.requires_grad for param in module.parameters()],
        "the global random state": torch.get_rng_state().tolist(),
        "autograd, on or off": torch.is_grad_enabled(),
    }


def budget(kind: str, sizes: Sequence[int], cause: Cause) -> tuple[OnlyKinds, Demand]:
    """Demand calls of one kind: at most one for each of these sizes in bytes, and no byte more."""
    return (
        OnlyKinds((kind,), OTHER_CALL),
        Demand(
            lambda at: len(_sizes(at)) <= len(sizes) and sum(_sizes(at)) <= sum(sizes),
            lambda at: f"{_in_calls(_sizes(at))}; the budget is {_in_calls(sizes)}",
            cause,
        ),
    )


def _sizes(at: At) -> list[int]:
    return [call.num_bytes for call in at.seen.calls]


def _in_calls(sizes: Sequence[int]) -> str:
    return f"{sum(sizes)} bytes in {len(sizes)} call{'s' if len(sizes) > 1 else ''}"
