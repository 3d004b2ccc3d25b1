"""What a stage computes in one step of a pipeline, action by action, and what it holds meanwhile.

Notebook 08_pipeline.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from course_lib.backward_halves import Halves
from course_lib.core.errors import CourseError, ShapeError
from course_lib.cost.actions import Action
from course_lib.mailbox import Routes
from course_lib.models.data import IGNORED
from course_lib.point_to_point import describe
from course_lib.stages import Stage

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass
class _Held:
    """What a rank keeps of a micro-batch in a model chunk, from its forward to its backward."""

    x: Tensor | None  # the input, if its gradient is wanted
    edge: Any  # where backward begins; the output itself may go once it has arrived
    grad: Tensor | None  # the gradient there, where none comes from the next stage
    halves: Halves | None


class StageRun:
    """One step of one rank: does actions, whose messages somebody else receives and sends."""

    def __init__(
        self,
        stage: Stage,
        loss_fn: LossFn,
        routes: Routes,
        batch: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[float]],
    ) -> None:
        self.stage, self.loss_fn, self.routes = stage, loss_fn, routes
        self.inputs, self.targets, self.weights = batch
        self.held: dict[tuple[int, int], _Held] = {}
        self.loss: Tensor | None = None
        self.peak = 0

    def do(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Compute an action from what was received; return what has to be sent."""
        part = (action.model_chunk, action.micro_batch)
        if action.kind == "forward":
            return self._forward(action, received)
        if action.kind == "backward_input":
            return self._backward(self.held[part], received)
        held = self.held.pop(part)
        if action.kind == "backward":
            return self._backward(held, received)
        if held.halves:
            held.halves.backward_weight()
        return None

    def _forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        x = self.inputs[action.micro_batch] if received is None else received.requires_grad_()
        part, chunk = (
            (action.model_chunk, action.micro_batch),
            self.stage.chunks[action.model_chunk],
        )
        halves = Halves(chunk) if part in self.routes.halved else None
        with halves or nullcontext():
            out = self._called(chunk, x, action)
        grad = None
        if last := self.routes.is_last(action):
            out, grad = self._mean_loss(out, action.micro_batch)
        edge = get_gradient_edge(out) if out.requires_grad else None
        self.held[part] = _Held(received, edge, grad, halves)
        self.peak = max(self.peak, len(self.held))
        return None if last else out

    def _backward(self, held: _Held, received: Tensor | None) -> Tensor | None:
        """Backward, or its first half; return the gradient of what was received in forward."""
        x_grad, grad = None, held.grad if received is None else received
        if held.edge and held.halves:
            x_grad = held.halves.backward_input(held.edge, grad, held.x)
        elif held.edge:
            torch.autograd.backward((held.edge,), (grad,))
            x_grad = None if held.x is None else held.x.grad
        if held.x is not None and x_grad is None:  # the stage does not use it
            x_grad = torch.zeros_like(held.x)
        held.x = held.edge = held.grad = None
        return x_grad

    def _mean_loss(self, out: Tensor, micro_batch: int) -> tuple[Tensor, Tensor]:
        """The micro-batch's mean loss, and its share of the batch's: the gradient to begin with."""
        weight = self.weights[micro_batch]
        loss = (out * 0).sum()  # the mean of no targets is not a number
        if weight:
            loss = self.loss_fn(out, self.targets[micro_batch])
        share = (loss.detach() * weight).clone()
        self.loss = share if self.loss is None else self.loss + share
        return loss, torch.full_like(loss, weight)

    def _called(self, chunk: nn.Module, x: Tensor, action: Action) -> Tensor:
        where = f"rank {dist.get_rank()}, Pipeline, {action.label}"
        try:
            out = chunk(x)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("shape", "size", "dtype")):
                raise
            raise ShapeError(
                f"{where}: need a stage that takes what the one before puts out; got "
                f"{describe(x)}, and {error}. Try split_model on every rank, with the same numbers."
            ) from error
        if not isinstance(out, Tensor):
            raise ShapeError(
                f"{where}: need a stage with one tensor as its output; got {describe(out)}. "
                "Try to cut the model elsewhere."
            )
        return out


def shares(targets: Sequence[Tensor]) -> list[float]:
    """Each micro-batch's part of all targets; those that are `IGNORED` do not count."""
    counts = [
        t.numel() if t.is_floating_point() else int((t != IGNORED).sum().item()) for t in targets
    ]
    if not sum(counts):
        raise CourseError("Pipeline.step: need at least one target that counts; got none.")
    return [count / sum(counts) for count in counts]
