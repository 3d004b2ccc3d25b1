"""The right answer to exercise 3 of 08_pipeline, and the wrong ones that its check must name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.pipeline.actions import Action
from course_lib.pipeline.schedules import gpipe

_LossFn = Callable[[Tensor, Tensor], Tensor]
_MicroBatches = Sequence[tuple[Tensor, Tensor]]


class ActionRunner:
    """The right answer, step by step, so that a mistake can change one of the steps."""

    def __init__(self, stage: nn.Module, micro_batches: _MicroBatches, loss_fn: _LossFn) -> None:
        self.stage, self.micro_batches, self.loss_fn = stage, micro_batches, loss_fn
        self.rank, self.p, self.m = dist.get_rank(), dist.get_world_size(), len(micro_batches)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.sent: list[Any] = []

    def run(self, actions: Sequence[Action]) -> None:
        for kind, _, i, _ in actions:
            if kind == "forward":
                self.forward(i)
            else:
                self.backward(i)
        self.finish()

    def finish(self) -> None:
        for work in self.sent:
            work.wait()

    def forward(self, i: int) -> None:
        x = self.input(i)
        y = self.stage(x)
        if self.rank < self.p - 1:
            self.send(y.detach(), self.rank + 1)
        self.keep(i, x, y)

    def input(self, i: int) -> Tensor:
        x = self.micro_batches[i][0]
        return self.receive(x, self.rank - 1).requires_grad_() if self.rank > 0 else x

    def receive(self, like: Tensor, source: int) -> Tensor:
        x = torch.empty_like(like)
        dist.recv(x, source)
        return x

    def send(self, x: Tensor, target: int) -> None:
        self.sent.append(dist.isend(x, target))

    def keep(self, i: int, x: Tensor, y: Tensor) -> None:
        self.kept[i] = x, y

    def take(self, i: int) -> tuple[Tensor, Tensor]:
        return self.kept.pop(i)

    def backward(self, i: int) -> None:
        x, y = self.take(i)
        if self.rank == self.p - 1:
            grad = None
            self.loss(y, i).backward()
        else:
            grad = self.receive(y, self.rank + 1)
            y.backward(self.scaled(grad))
        if self.rank > 0:
            self.send(self.gradient(x, y, grad), self.rank - 1)

    def loss(self, y: Tensor, i: int) -> Tensor:
        return self.loss_fn(y, self.micro_batches[i][1]) / self.m

    def scaled(self, grad: Tensor) -> Tensor:
        return grad

    def gradient(self, x: Tensor, _y: Tensor, _grad: Tensor | None) -> Tensor:
        grad: Any = x.grad
        return grad


def answer(made: type[ActionRunner]) -> Callable[..., None]:
    """Return an answer to the exercise that works like an engine of this kind."""

    def run_actions(
        actions: Sequence[Action], stage: nn.Module, micro_batches: _MicroBatches, loss_fn: _LossFn
    ) -> None:
        made(stage, micro_batches, loss_fn).run(actions)

    return run_actions


run_actions = answer(ActionRunner)


class NotDivided(ActionRunner):
    def loss(self, y: Tensor, i: int) -> Tensor:
        return self.loss_fn(y, self.micro_batches[i][1])


class DividedByRanks(ActionRunner):
    def loss(self, y: Tensor, i: int) -> Tensor:
        return self.loss_fn(y, self.micro_batches[i][1]) / self.p


class DividedByEach(ActionRunner):
    def scaled(self, grad: Tensor) -> Tensor:
        return grad / self.m


class DividedAtTheEnd(NotDivided):
    """The last stage divides its own gradients, after it has sent others back."""

    def finish(self) -> None:
        super().finish()
        for param in self.stage.parameters():
            if param.grad is not None and self.rank == self.p - 1:
                param.grad /= self.m


class SendBlocks(ActionRunner):
    def send(self, x: Tensor, target: int) -> None:
        dist.send(x, target)


class WaitsAtOnce(ActionRunner):
    def send(self, x: Tensor, target: int) -> None:
        work: Any = dist.isend(x, target)
        work.wait()


class NoRequiresGrad(ActionRunner):
    def input(self, i: int) -> Tensor:
        return super().input(i).detach()


class KeptForEver(ActionRunner):
    def take(self, i: int) -> tuple[Tensor, Tensor]:
        return self.kept[i]


class GraphsKept(ActionRunner):
    """Sends what still hangs on its graph, and keeps it to the end."""

    def keep(self, i: int, x: Tensor, y: Tensor) -> None:
        super().keep(i, x, y)
        self.sent_outputs = [*getattr(self, "sent_outputs", []), y]


class SendsInput(ActionRunner):
    def gradient(self, x: Tensor, _y: Tensor, _grad: Tensor | None) -> Tensor:
        return x.detach()


class SendsOutput(ActionRunner):
    def gradient(self, _x: Tensor, y: Tensor, _grad: Tensor | None) -> Tensor:
        return y.detach()


class PassesOn(ActionRunner):
    """Hands the gradient it got to the rank before, unchanged."""

    def gradient(self, x: Tensor, _y: Tensor, grad: Tensor | None) -> Tensor:
        return super().gradient(x, _y, grad) if grad is None else grad


class NeverWaits(ActionRunner):
    def finish(self) -> None:
        pass


class KeepsOne(ActionRunner):
    def keep(self, i: int, x: Tensor, y: Tensor) -> None:
        self.one = x, y

    def take(self, i: int) -> tuple[Tensor, Tensor]:
        return self.one


class NewestFirst(ActionRunner):
    """Goes backward with what was kept last."""

    def take(self, i: int) -> tuple[Tensor, Tensor]:
        return self.kept.popitem()[1]


class FromTheBatch(ActionRunner):
    """Every stage takes the batch in place of what the stage before sent."""

    def input(self, i: int) -> Tensor:
        super().input(i)
        return self.micro_batches[i][0].clone().requires_grad_()


class IntoTheBatch(ActionRunner):
    def receive(self, like: Tensor, source: int) -> Tensor:
        if like.requires_grad:
            return super().receive(like, source)
        dist.recv(like, source)
        return like


class FirstTarget(ActionRunner):
    def loss(self, y: Tensor, i: int) -> Tensor:
        return super().loss(y, 0)


class LastOnly(ActionRunner):
    """Each backward starts from nothing: only the last micro-batch's gradient is left."""

    def backward(self, i: int) -> None:
        self.stage.zero_grad()
        super().backward(i)


class OwnOrder(ActionRunner):
    """All forwards, then all backwards, whatever the list says."""

    def run(self, actions: Sequence[Action]) -> None:
        super().run(gpipe(self.p, self.m)[self.rank])


class Circle(ActionRunner):
    """The last stage sends its output to rank 0."""

    def forward(self, i: int) -> None:
        super().forward(i)
        if self.rank == self.p - 1:
            self.send(self.kept[i][1].detach(), 0)


class FirstSendsBack(ActionRunner):
    """The first stage has nobody before it, and sends a gradient to the last one."""

    def input(self, i: int) -> Tensor:
        return super().input(i).detach().requires_grad_()

    def backward(self, i: int) -> None:
        x = self.kept[i][0]
        super().backward(i)
        if self.rank == 0 < self.p - 1:
            self.send(super().gradient(x, x, None), self.p - 1)


class HalfPrecision(ActionRunner):
    def send(self, x: Tensor, target: int) -> None:
        super().send(x.float(), target)
