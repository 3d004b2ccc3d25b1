"""Tools for the checks of 06_ddp: a model with known gradients, and a log of messages.

Rank r's gradient is a multiple of 10**r, so that a wrong mean tells which ranks are in it. In the
first step the last rank comes late: until then nothing can have been added up on the others, and
whoever does not wait reads what is surely wrong.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

LATE_S = 0.12
ROUNDING = 1e-12


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


def come_late(rank: int) -> None:
    """Delay the last rank, if there are several."""
    if rank == dist.get_world_size() - 1 > 0:
        time.sleep(LATE_S)


@contextmanager
def watched_handles(kind: str = "all_reduce") -> Iterator[set[int]]:
    """Yield the numbers of the calls of a kind that were launched and not waited for.

    Whoever asks for a handle's future has waited: the numbers tell whether it did.
    """
    call, started, open_ones = getattr(dist, kind), list[Any](), set[int]()

    def watching(*args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        if work is not None:
            number = len(started)
            started.append(work)
            open_ones.add(number)

            def noting(method: Callable[..., Any]) -> Callable[..., Any]:
                def note_and_call(*args: Any, **kwargs: Any) -> Any:
                    open_ones.discard(number)
                    return method(*args, **kwargs)

                return note_and_call

            work.wait, work.get_future = noting(work.wait), noting(work.get_future)
        return work

    with patch.object(dist, kind, watching):
        yield open_ones


def digits(p: int) -> int:
    """Return 1, 11, 111, 1111: every rank once."""
    return sum(10**rank for rank in range(p))


def grads_of(module: Bag) -> dict[str, Any]:
    """Return the gradient of each parameter; None where there is none."""
    return {f"parameter {i}": param.grad for i, param in enumerate(module.weights)}


def modes_of(model: nn.Module) -> list[bool]:
    """Return of every part of a model whether it is in train mode."""
    return [part.training for part in model.modules()]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def count_hooks(model: nn.Module) -> int:
    """Return how many hooks there are on the parts and the parameters of a model."""
    holders = [*model.modules(), *model.parameters()]
    names = (*HOOKS, "_post_accumulate_grad_hooks")
    return sum(len(getattr(holder, name, None) or ()) for holder in holders for name in names)
