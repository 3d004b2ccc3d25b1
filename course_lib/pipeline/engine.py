"""Pipeline parallelism: one small engine that runs any schedule on real ranks.

A rank goes through its list of actions: it waits for what the action needs, computes, lets the
outcome leave, and goes on. Gradients add up over the micro-batches, each counted by its share of
the batch, so a step gives the numbers of one process on the whole batch. Notebook 08_pipeline.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from course_lib.collectives.group import Group, describe, member_of
from course_lib.core.errors import CourseError, ShapeError
from course_lib.models.data import IGNORED
from course_lib.pipeline.actions import Action, Schedule, ScheduleError, num_model_chunks_of
from course_lib.pipeline.p2p import CommPlan, StageComm, TensorMeta
from course_lib.pipeline.schedule_rules import check_schedule
from course_lib.pipeline.split_backward import SplitBackward
from course_lib.pipeline.stage import Stage, share_tied, tied_summed
from course_lib.ranks import span

LossFn = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """This rank's stage, and the engine that runs schedules on it.

    pipeline = Pipeline(split_model(spec, p, rank), token_loss)
    pipeline.step(one_f_one_b(p, m), inputs, targets); optimizer.step()

    stage     from `split_model`; or a module, or one module for each model chunk
    loss_fn   (output, targets) of a micro-batch -> the mean over its targets
    group     the ranks of this pipeline, stage 0 first; all ranks by default

    peak_in_flight   the most micro-batches whose activations were held in the last step

    Raises: MeshError for another's group
    """

    def __init__(
        self, stage: Stage | nn.Module | Sequence[nn.Module], loss_fn: LossFn, group: Group = None
    ) -> None:
        self.member = member_of(group, "Pipeline")
        self.stage, self.loss_fn, self.peak_in_flight = _as_stage(stage), loss_fn, 0
        param = next(self.stage.parameters(), None)
        self.device = torch.device("cpu") if param is None else param.device
        self._checked: tuple[Schedule, int, CommPlan] | None = None
        self._metas: dict[Any, dict[tuple[int, int], TensorMeta]] = {}
        share_tied(self.stage, self.member)

    def step(
        self,
        schedule: Schedule,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Run the schedule once; gradients of the whole batch's mean loss add to `param.grad`.

        inputs    one tensor a micro-batch, on every rank: the first stage reads them, the others
                  only look at their shapes (so device="meta" will do)
        targets   one tensor a micro-batch; only the last stage needs them
        weights   each micro-batch's share of the loss; by default its share of all targets

        Returns the mean loss on the last stage, None on the others.

        Cost:    an activation and a gradient sent per micro-batch and border between pieces
        Raises:  ScheduleError before anything is sent; CourseError
        """
        plan = self._plan(schedule, len(inputs))
        weights = self._check_batch(inputs, targets, weights)
        shapes = tuple((tuple(x.shape), x.dtype) for x in inputs)
        comm = StageComm(self.member, plan, self._metas.get(shapes, {}), self.device)
        batch = (inputs, targets or (), weights)
        run = StageExecutor(self.stage, self.loss_fn, plan, batch)
        with tied_summed(self.stage, self.member):
            for action in schedule[self.member.rank]:
                received = comm.receive(action)
                with span(action.kind, action.label):
                    made = run.do(action, received)
                if made is not None:
                    comm.send(action, made)
            comm.finish()
        self._metas[shapes], self.peak_in_flight = comm.metas, run.peak
        return run.loss

    @property
    def is_last(self) -> bool:
        """Is this the stage that has the loss?"""
        return self.member.rank == self.member.size - 1

    def _plan(self, schedule: Schedule, num_micro_batches: int) -> CommPlan:
        """This rank's part of a schedule, which is checked when it is new."""
        if self._checked is None or self._checked[:2] != (schedule, num_micro_batches):
            check_schedule(schedule, num_micro_batches=num_micro_batches)
            self._check_sizes(schedule)
            copy = [list(actions) for actions in schedule]
            self._checked = copy, num_micro_batches, CommPlan(schedule, self.member.rank)
        return self._checked[2]

    def _check_sizes(self, schedule: Schedule) -> None:
        where, p, v = f"rank {dist.get_rank()}, Pipeline", self.member.size, len(self.stage.chunks)
        if len(schedule) != p:
            raise ScheduleError(
                f"{where}: need a schedule for the {p} ranks of the group; got one for "
                f"{len(schedule)}. Try one_f_one_b({p}, num_micro_batches)."
            )
        if num_model_chunks_of(schedule) != v:
            raise ScheduleError(
                f"{where}: need a schedule for the stage's {v} model chunks; got one for "
                f"{num_model_chunks_of(schedule)}. Try split_model(..., num_model_chunks="
                f"{num_model_chunks_of(schedule)})."
            )

    def _check_batch(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor] | None, weights: Any
    ) -> Sequence[float]:
        """The micro-batches' shares of the loss, on the last stage; targets for all of them."""
        if not self.is_last:
            return ()
        for name, given in (("targets", targets), ("weights", weights)):
            if (given is None and name == "targets") or (given and len(given) != len(inputs)):
                raise CourseError(
                    f"rank {dist.get_rank()}, Pipeline.step: need {name} for {len(inputs)} "
                    f"micro-batches; got {'none' if given is None else len(given)}. "
                    f"Try {name}.chunk({len(inputs)}), as for the inputs."
                )
        return shares(targets or ()) if weights is None else weights


def run_schedule(
    schedule: Schedule,
    stage: Stage | nn.Module | Sequence[nn.Module],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    loss_fn: LossFn,
    group: Group = None,
) -> Tensor | None:
    """One step of `Pipeline(stage, loss_fn, group)`: the mean loss on the last stage, else None."""
    return Pipeline(stage, loss_fn, group).step(schedule, inputs, targets)


def _as_stage(stage: Stage | nn.Module | Sequence[nn.Module]) -> Stage:
    if isinstance(stage, Stage):
        return stage
    return Stage([stage] if isinstance(stage, nn.Module) else stage)


@dataclass
class InFlight:
    """What a rank keeps of a micro-batch in a model chunk, from its forward to its backward."""

    x: Tensor | None  # the input, if its gradient is wanted
    edge: Any  # where backward begins; the output itself may go once it has arrived
    grad: Tensor | None  # the gradient there, where none comes from the next stage
    split: SplitBackward | None


class StageExecutor:
    """One step of one rank: does actions, whose messages somebody else receives and sends."""

    def __init__(
        self,
        stage: Stage,
        loss_fn: LossFn,
        plan: CommPlan,
        batch: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[float]],
    ) -> None:
        self.stage, self.loss_fn, self.plan = stage, loss_fn, plan
        self.inputs, self.targets, self.weights = batch
        self.held: dict[tuple[int, int], InFlight] = {}
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
        if held.split:
            held.split.backward_weight()
        return None

    def _forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        x = self.inputs[action.micro_batch] if received is None else received.requires_grad_()
        part, chunk = (
            (action.model_chunk, action.micro_batch),
            self.stage.chunks[action.model_chunk],
        )
        split = SplitBackward(chunk) if part in self.plan.halved else None
        with split or nullcontext():
            out = self._called(chunk, x, action)
        grad = None
        if last := self.plan.is_last(action):
            out, grad = self._mean_loss(out, action.micro_batch)
        edge = get_gradient_edge(out) if out.requires_grad else None
        self.held[part] = InFlight(received, edge, grad, split)
        self.peak = max(self.peak, len(self.held))
        return None if last else out

    def _backward(self, held: InFlight, received: Tensor | None) -> Tensor | None:
        """Backward, or its first half; return the gradient of what was received in forward."""
        x_grad, grad = None, held.grad if received is None else received
        if held.edge and held.split:
            x_grad = held.split.backward_input(held.edge, grad, held.x)
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
