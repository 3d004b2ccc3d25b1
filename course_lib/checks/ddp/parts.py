"""Tools for the checks of 06_ddp: a model with known gradients, and a log of messages.

Rank r's gradient is a multiple of 10**r, so that a wrong mean tells which ranks are in it. In the
first step the last rank comes late: until then nothing can have been added up on the others, and
whoever does not wait reads what is surely wrong.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.exercise import CheckFailed
from course_lib.core import Event

WORLD_SIZES = (3, 2, 4, 1)  # on 2 ranks, wrong answers look alike
LATE_S = 0.12
ROUNDING = 1e-12
NOT_WAITED = (
    "Divided, but not added up: this rank read the bucket before the others' gradients were in it. "
    "Call wait() on what all_reduce returned, first."
)


class Bag(nn.Module):
    """Parameters whose gradients are known: `pattern(i)` times what forward is called with.

    Those of 4 numbers are matrices.
    The second one is frozen, the first one is tied: it has two names, and is used twice.
    """

    def __init__(self, sizes: Iterable[int], *, order: Sequence[int] = ()) -> None:
        super().__init__()
        shapes = [(2, 2) if size == 4 else (size,) for size in sizes]
        params = [nn.Parameter(torch.full(shape, 7.0).double()) for shape in shapes]
        self.weights, self.order = nn.ParameterList(params), order or range(len(params))
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

    @property
    def trained(self) -> list[int]:
        """Return the numbers of the parameters that get a gradient."""
        return [i for i, param in enumerate(self.weights) if param.requires_grad]


@dataclass
class Step:
    """The result of one step on one rank."""

    grads: list[Any]
    calls: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    backward_end_s: float = 0.0
    kept_bytes: int = 0
    params_changed: bool = False
    never_waited: int = 0


def come_late(rank: int) -> None:
    """Delay the last rank, if there are several."""
    if rank == dist.get_world_size() - 1 > 0:
        time.sleep(LATE_S)


@contextmanager
def watched_handles() -> Iterator[set[int]]:
    """Yield the numbers of the all_reduces that were launched and not waited for."""
    all_reduce, started, open_ones = dist.all_reduce, list[Any](), set[int]()

    def watching(*args: Any, **kwargs: Any) -> Any:
        work = all_reduce(*args, **kwargs)
        if work is not None:
            number, wait = len(started), work.wait
            started.append(work)
            open_ones.add(number)

            def note_and_wait(*args: Any, **kwargs: Any) -> Any:
                open_ones.discard(number)
                return wait(*args, **kwargs)

            work.wait = note_and_wait
        return work

    with patch.object(dist, "all_reduce", watching):
        yield open_ones


def kept_bytes(holder: Any) -> int:
    """Return the bytes of all tensors in an object's attributes, except parameters and modules."""
    stack, sizes = list(vars(holder).values()), dict[int, int]()
    while stack:
        thing = stack.pop()
        if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
            sizes[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            stack += thing.values()
        elif isinstance(thing, list | tuple | set):
            stack += thing
    return sum(sizes.values())


def digits(p: int) -> int:
    """Return 1, 11, 111, 1111: every rank once."""
    return sum(10**rank for rank in range(p))


def close(got: Any, wanted: Tensor) -> bool:
    """Return whether they are equal up to the rounding of sums in another order."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    return torch.allclose(got, wanted, rtol=ROUNDING, atol=0)


def row(tensor: Any) -> str:
    """Format numbers: `[1, 2.5]`."""
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    return f"[{', '.join(f'{number:g}' for number in tensor.flatten().tolist())}]"


def expect_all_reduces(where: str, calls: Sequence[Event], sizes: Sequence[int]) -> None:
    """Demand one all_reduce per bucket, of its bytes, in order."""
    other = [call for call in calls if call.kind != "all_reduce"]
    if other:
        raise CheckFailed(f"{where} calls {other[0].kind}; this exercise is for all_reduce.")
    got, needed = [call.num_bytes for call in calls], list(sizes)
    if got == needed:
        return
    if sum(got) == sum(needed) and len(got) > len(needed):
        says = "One all_reduce a bucket, not one a parameter: put its gradients into one tensor."
    elif sorted(got) == sorted(needed):
        says = "Send the buckets in their order, the first one first."
    elif got == [num_bytes // 2 for num_bytes in needed]:
        says = "Half of the bytes, and of the digits: send in the dtype of the gradients."
    elif len(got) == len(needed) and sum(got) > sum(needed):
        says = "Send what is in the bucket and nothing else, in the dtype of the gradients."
    elif set(got) == set(needed) and len(got) > len(needed):
        says = "Each bucket travels once a step: what is sent already?"
    else:
        says = "One all_reduce a bucket, of all its gradients and nothing else."
    raise CheckFailed(f"{where} sends {_listed(got)} bytes; need {_listed(needed)}. {says}")


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"
