"""Tools for the checks of 05_data_parallel: a small module of every kind of state, and its numbers.

State tensor i of rank r is filled with (i + 1) * 10**r, so a wrong number tells whose it is.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from course_lib.checks.exercise import CheckFailed
from course_lib.checks.ranks.mean import calls_of
from course_lib.core import Event

WORLD_SIZES = (4, 3, 2, 1)  # on few ranks, wrong answers look alike


class Everything(nn.Module):
    """A module, never called, with tied and frozen parameters, and buffers of all dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(2, 3, bias=False)
        self.double()
        self.head.weight = self.embedding.weight


def module_of(rank: int) -> nn.Module:
    """Return the module, with every tensor of its state filled with a number of its own."""
    module = Everything()
    for index, tensor in enumerate(state_of(module).values()):
        tensor.fill_((index + 1) * 10**rank)
    return module


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, detached; a tied one only once."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def expect_calls(
    events: Sequence[Event], p: int, sizes: Sequence[int], kind: str, says: str
) -> None:
    """Demand at most one call of a kind for each of these sizes in bytes, and no bytes more."""
    for rank in range(p):
        calls = calls_of(events, rank)
        other = next((call.kind for call in calls if call.kind != kind), "")
        if other:
            raise CheckFailed(f"rank {rank} of {p} calls {other}; the exercise is for {kind}.")
        num_bytes = sum(call.num_bytes for call in calls)
        if len(calls) > len(sizes) or num_bytes > sum(sizes):
            raise CheckFailed(
                f"rank {rank} of {p} makes {len(calls)} calls of {num_bytes} bytes in all; the "
                f"budget is {len(sizes)} calls of {sum(sizes)} bytes. {says}"
            )


def words(value: Tensor) -> float:
    """Return the number that a tensor is filled with, up to rounding; nan if there are several."""
    numbers = value.flatten().double()
    alike = (numbers - numbers[0]).abs() <= 1e-12 * numbers[0].abs()
    return numbers[0].item() if bool(alike.all()) else float("nan")
