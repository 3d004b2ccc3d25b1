"""What the check of exercise 3 of 08_pipeline runs: a stage that is watched, and its gradients.

The gradients of all stages are computed on one process, right or as a wrong engine would, so that a
wrong answer can be recognized.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ITEMS, WIDTH = 2, 3
Grads = list[Tensor]


class Stage(nn.Module):
    """tanh of a linear layer, which logs when it is run and how many of its graphs are alive."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random).double())
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=random).double())
        if rank < 2:  # a frozen parameter in a stage that has another one
            (self.bias if rank == 0 else self.weight).requires_grad_(False)
        self.order, self.most_alive = "", 0
        self.alive: weakref.WeakSet[_Token] = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        return _Watched.apply((x @ self.weight + self.bias).tanh(), self)

    def grads(self) -> Grads:
        """What is in param.grad; zeros where nothing is."""
        trained = [param for param in self.parameters() if param.requires_grad]
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]


class _Token:
    """Lives as long as the graph of one forward."""


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, stage: Stage) -> Tensor:
        ctx.token, ctx.stage = _Token(), stage
        stage.alive.add(ctx.token)
        stage.order += "F"
        stage.most_alive = max(stage.most_alive, len(stage.alive))
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.stage.order += "B"
        return grad, None


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    """The mean over one micro-batch."""
    return ((y - target) ** 2).mean()


def batch_of(m: int) -> list[tuple[Tensor, Tensor]]:
    """m micro-batches with numbers of their own."""
    random = torch.Generator().manual_seed(m)
    made = torch.randn(m, 2, ITEMS, WIDTH, generator=random).double()
    return [(x.clone(), target.clone()) for x, target in made]


# --- on one process: the right gradients, and wrong ones to compare with


def gradients(
    p: int,
    m: int,
    *,
    loss_scale: float = 1.0,
    passed_on: Callable[[Tensor, Tensor, Tensor | None], Any] = lambda x, y, grad: x.grad,
    scaled: float = 1.0,
    target_of: Callable[[int], int] = lambda i: i,
    last_only: bool = False,
) -> list[Grads]:
    """Gradients of each stage, in an engine that may be wrong."""
    stages, batch = [Stage(rank) for rank in range(p)], batch_of(m)
    for i, (x, _) in enumerate(batch):
        kept, grad = list[tuple[Tensor, Tensor]](), None
        for stage in stages:
            x = x.detach().requires_grad_()
            kept.append((x, stage(x)))
            x = kept[-1][1]
        for stage, (x, y) in reversed(list(zip(stages, kept, strict=True))):
            if last_only:
                stage.zero_grad()
            if stage is stages[-1]:
                (loss_fn(y, batch[target_of(i)][1]) / m * loss_scale).backward()
            elif grad is not None:
                y.backward(grad * scaled)
            grad = passed_on(x, y, grad)
    return [stage.grads() for stage in stages]


NOT_NUMBERED = (
    "Is every gradient used with the activations of its own micro-batch? Keep x and y under the "
    "number i, and take them out by it."
)


def causes(p: int, m: int) -> list[tuple[Mapping[str, Any], str]]:
    return [
        (
            {"loss_scale": m},
            f"{m} times too large: divide each loss by the number of micro-batches.",
        ),
        (
            {"loss_scale": m / p},
            "Divided by the number of ranks: it is the number of micro-batches.",
        ),
        ({"loss_scale": 1 / m}, "Divided by the number of micro-batches twice."),
        (
            {"scaled": 1 / m},
            "Divided on every stage anew: only the last stage divides, the others hand on.",
        ),
        (
            {"passed_on": lambda x, y, grad: x.detach()},
            "What goes back is the activation x: send its gradient, x.grad.",
        ),
        (
            {"passed_on": lambda x, y, grad: y.detach()},
            "What goes back is the output y: send the gradient of the input, x.grad.",
        ),
        (
            {"passed_on": lambda x, y, grad: x.grad if grad is None else grad},
            "A stage hands on the gradient it got: it was for y; send the one for x, x.grad.",
        ),
        (
            {"target_of": lambda i: 0},
            "All micro-batches have the first one's target: use number i.",
        ),
        ({"last_only": True}, "Only the last micro-batch is in it: gradients have to add up."),
    ]
