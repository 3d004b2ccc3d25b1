"""Tools for the checks of 10_fsdp: a module with a tied weight, and one smaller than its group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.exercise import CheckFailed
from course_lib.checks.zero.parts import flat, shard_numel
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.core.errors import CourseError

WIDTH, TOKENS = 3, 2
WORLD_SIZES = (3, 2, 1)  # on 2 ranks, wrong answers look alike
NUMBER_BYTES = 8  # in float64
ROUNDING = 1e-12
ALONE = "rank 0 of 1,"


class TiedModel(nn.Module):
    """Three layers of 23 numbers; the first two have one weight, which backward needs twice.

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


MODULES: tuple[type[nn.Module], ...] = (TiedModel, Small)


@contextmanager
def not_followed(where: object) -> Iterator[None]:
    """Wrap gather(): a message whose tensors autograd records fails when it is waited for."""
    try:
        yield
    except RuntimeError as error:
        if "no_grad mode" not in str(error):
            raise
        raise CheckFailed(
            f"{where}, gather(): autograd follows what is sent, and a message cannot do that. "
            "Is it self.shard.detach() that is sent?"
        ) from error


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


def row_of(kind: type[nn.Module]) -> Tensor:
    """Return all numbers of a module in one flat tensor."""
    return flat(list(kind().parameters()))


def row_bytes(numel: int, p: int) -> int:
    """Return the bytes of a module's flat parameter in float64, padded for p ranks."""
    return shard_numel(numel, p) * p * NUMBER_BYTES


def grad_of(tensor: Tensor) -> Tensor:
    """Return its gradient, which must not be None."""
    if tensor.grad is None:
        raise CourseError("grad_of: need a tensor with a gradient; got one without.")
    return tensor.grad


def expect_near(got: object, wanted: Tensor, where: str, says: str) -> None:
    """Demand that a tensor is equal up to rounding."""
    if not isinstance(got, Tensor):
        raise CheckFailed(f"{where}: need a tensor; got {got!r}. {says}")
    if not close(got, wanted):
        off = ""
        if got.shape != wanted.shape:
            off = f"need shape {list(wanted.shape)}; got {list(got.shape)}. "
        elif got.dtype != wanted.dtype:
            off = f"need {wanted.dtype}; got {got.dtype}. "
        else:
            most = (got - wanted).abs().max().item()
            off = f"off by up to {most:.3g}. "
        raise CheckFailed(f"{where}: {off}{says}")


def calls_in(events: Sequence[Event]) -> list[tuple[str, int]]:
    """Return kind and bytes of the communication, in order."""
    made = sorted((e for e in events if e.kind in COMMUNICATION_KINDS), key=lambda e: e.start_s)
    return [(call.kind, call.num_bytes) for call in made]


def expect_calls(
    where: str, got: Sequence[tuple[str, int]], needed: Sequence[tuple[str, int]], says: str
) -> None:
    """Demand these calls, in this order; a single rank may do without."""
    if list(got) != list(needed) and (got or not where.startswith(ALONE)):
        raise CheckFailed(f"{where}: need {_listed(needed)}; got {_listed(got)}. {says}")


def _listed(calls: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} of {size} bytes" for kind, size in calls) or "no call at all"


def close(got: Any, wanted: Tensor) -> bool:
    """Return whether they are equal up to the rounding of sums in another order."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    return torch.allclose(got, wanted, rtol=ROUNDING, atol=ROUNDING)
