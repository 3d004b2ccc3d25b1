"""Pipeline engine: executes any schedule on real ranks, whatever layers each rank holds.

A rank goes through its list of actions. For each one it receives the input (an activation or a
gradient), computes, and sends the output. Three classes share the work: `Pipeline` runs the loop,
`StageExecutor` computes, and `StageComm` of `p2p.py` communicates. Gradients accumulate over the
micro-batches, each weighted by its share of the batch, so a step gives the gradients that one
process computes from the whole batch. Notebook 08_pipeline.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from course_lib.collectives.group import Group, describe, member_of
from course_lib.core.errors import CourseError, ShapeError
from course_lib.models.data import IGNORED
from course_lib.pipeline.actions import (
    Action,
    Schedule,
    ScheduleError,
    depths_of,
    num_model_chunks_of,
)
from course_lib.pipeline.p2p import CommPlan, StageComm, TensorMeta
from course_lib.pipeline.schedule_rules import check_schedule
from course_lib.pipeline.split_backward import SplitBackward
from course_lib.pipeline.stage import Stage, mark_stage, share_tied, tied_summed
from course_lib.ranks import span

LossFn = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """Pipeline engine of one rank: holds its stage and executes schedules on it.

    pipeline = Pipeline(split_model(spec, p, rank), token_loss)
    pipeline.step(one_f_one_b(p, m), inputs, targets); optimizer.step()

    stage     from `split_model`; or a module, or one module for each model chunk
    loss_fn   (output, targets) of a micro-batch -> the mean over its targets
    group     the ranks of this pipeline, stage 0 first; all ranks by default
    sums_tied sum the gradients of tied parameters at the end of a step; False: whoever shards the
              gradients before that calls `sum_copies` with the shards
    border    shape and dtype between stages, for an input: no header tells them. None: headers do

    peak_in_flight   largest number of micro-batches in flight during the last step
    splits_all       compute I and W one by one also where a whole backward does both, to time them

    Raises: MeshError unless this rank belongs to the group
    """

    def __init__(
        self,
        stage: Stage | nn.Module | Sequence[nn.Module],
        loss_fn: LossFn,
        group: Group = None,
        *,
        sums_tied: bool = True,
        border: Callable[[Tensor], TensorMeta] | None = None,
    ) -> None:
        self.member, self.sums_tied = member_of(group, "Pipeline"), sums_tied
        self.border = border
        self.stage, self.loss_fn, self.peak_in_flight = _as_stage(stage), loss_fn, 0
        param = next(self.stage.parameters(), None)
        self.device = torch.device("cpu") if param is None else param.device
        self.splits_all = False
        self._checked: tuple[Schedule, int, CommPlan] | None = None
        self._metas: dict[Any, dict[tuple[int, int], TensorMeta]] = {}
        mark_stage(self.stage, self.member)
        share_tied(self.stage, self.member)

    def step(
        self,
        schedule: Schedule,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Execute the schedule once; add the gradients of the batch's mean loss to `param.grad`.

        inputs    one tensor per micro-batch, on every rank: the first stage reads the values, the
                  others only the shapes (so device="meta" will do)
        targets   one tensor per micro-batch; only the rank of the last layers needs them: the last
                  one, or in a V the first
        weights   each micro-batch's share of the loss; by default its share of all targets

        Returns the mean loss on the rank of the last layers, None on the others.

        Cost:    one activation and one gradient sent per micro-batch and boundary between stages
        Raises:  ScheduleError before anything is sent; CourseError
        """
        plan = self._plan(schedule, len(inputs))
        has_loss = plan.placement[-1] == self.member.rank
        weights = _check_batch(inputs, targets, weights, self.loss_fn) if has_loss else ()
        shapes = tuple((tuple(x.shape), x.dtype) for x in inputs)
        metas = self._metas.get(shapes) or self._known_metas(plan, inputs)
        comm = StageComm(self.member, plan, metas, self.device)
        batch = (inputs, targets or (), weights)
        executor = StageExecutor(self.stage, self.loss_fn, plan, batch)
        with tied_summed(self.stage, self.member) if self.sums_tied else nullcontext():
            for action in schedule[self.member.rank]:
                received = comm.receive(action)
                with span(action.kind, action.label):
                    output = executor.execute(action, received)
                if output is not None:
                    comm.send(action, output)
            comm.finish()
        self._metas[shapes], self.peak_in_flight = comm.metas, executor.peak
        return executor.loss

    @torch.no_grad()
    def forward_only(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        weights: Sequence[float],
        placement: Sequence[int],
    ) -> Tensor | None:
        """Return the weighted sum of the losses on the rank of the last layers, without gradients.

        placement   rank of each model chunk, in the order of the layers

        Cost:    one activation sent per micro-batch and boundary, after a header with its shape
        """
        p = self.member.size
        schedule: Schedule = [
            [
                Action("forward", depth % p, micro_batch, depth // p)
                for micro_batch in range(len(inputs))
                for depth, holder in enumerate(placement)
                if holder == rank
            ]
            for rank in range(p)
        ]
        plan = CommPlan(schedule, self.member.rank)
        comm = StageComm(self.member, plan, {}, self.device)
        executor = StageExecutor(self.stage, self.loss_fn, plan, (inputs, targets, weights))
        for action in schedule[self.member.rank]:
            output = executor.execute(action, comm.receive(action))
            executor.in_flight.clear()  # no backward needs it
            if output is not None:
                comm.send(action, output)
        comm.finish()
        return executor.loss

    def _known_metas(
        self, plan: CommPlan, inputs: Sequence[Tensor]
    ) -> dict[tuple[int, int], TensorMeta]:
        depths, border = range(1, len(plan.placement)), self.border
        if border is None:
            return {}
        return {(depth, number): border(x) for depth in depths for number, x in enumerate(inputs)}

    def _plan(self, schedule: Schedule, num_micro_batches: int) -> CommPlan:
        """Return this rank's communication plan; check a schedule the first time it is used."""
        if self._checked is None or self._checked[:2] != (schedule, num_micro_batches):
            check_schedule(schedule, num_micro_batches=num_micro_batches)
            plan = CommPlan(schedule, self.member.rank, splits_all=self.splits_all)
            self._check_sizes(schedule)
            self._check_placement(plan)
            self._check_recomputed(schedule)
            self._checked = [list(actions) for actions in schedule], num_micro_batches, plan
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

    def _check_recomputed(self, schedule: Schedule) -> None:
        splits = any(action.kind == "backward_input" for actions in schedule for action in actions)
        if splits and any("run_blocks" in vars(chunk) for chunk in self.stage.chunks):
            raise ScheduleError(
                f"rank {dist.get_rank()}, Pipeline: need a whole backward for blocks that are "
                "recomputed, as one in two parts would recompute them twice; got a schedule that "
                "splits it. Try one_f_one_b, or no recomputation."
            )

    def _check_placement(self, plan: CommPlan) -> None:
        wanted = depths_of(self.member.rank, plan.placement)
        if self.stage.depths and self.stage.depths != wanted:
            raise ScheduleError(
                f"rank {dist.get_rank()}, Pipeline: need the model chunks {wanted}, which the "
                f"schedule runs here; got a stage of {self.stage.depths}. "
                f"Try split_model(..., placement={plan.placement})."
            )


def run_schedule(
    schedule: Schedule,
    stage: Stage | nn.Module | Sequence[nn.Module],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    loss_fn: LossFn,
    group: Group = None,
) -> Tensor | None:
    """Execute one step of a new `Pipeline`; return the mean loss where the last layers are."""
    return Pipeline(stage, loss_fn, group).step(schedule, inputs, targets)


def _check_batch(
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    weights: Sequence[float] | None,
    loss_fn: LossFn,
) -> Sequence[float]:
    """On the rank of the last layers: check targets and weights, and return the weights."""
    for name, given in (("targets", targets), ("weights", weights)):
        if (given is None and name == "targets") or (given and len(given) != len(inputs)):
            raise CourseError(
                f"rank {dist.get_rank()}, Pipeline.step: need {name} for {len(inputs)} "
                f"micro-batches; got {'none' if given is None else len(given)}. "
                f"Try {name}.chunk({len(inputs)}), as for the inputs."
            )
    if weights is None:
        _check_loss(loss_fn)
        return shares(targets or ())
    return weights


def _check_loss(loss_fn: LossFn) -> None:
    """Check that a loss whose options are known is a mean over the targets that `shares` counts."""

    def option(name: str) -> Any:
        return getattr(loss_fn, "keywords", {}).get(name, getattr(loss_fn, name, None))

    weighs = nn.CrossEntropyLoss, nn.NLLLoss  # others with a weight divide by the number of targets
    func, ignored = getattr(loss_fn, "func", loss_fn), option("ignore_index")
    for name, is_other in (
        ("reduction", option("reduction") in ("sum", "none")),
        ("ignore_index", ignored not in (None, IGNORED)),
        ("weight", isinstance(loss_fn, weighs) or func in (F.cross_entropy, F.nll_loss)),
    ):
        if is_other and option(name) is not None:
            raise CourseError(
                f"rank {dist.get_rank()}, Pipeline.step: need a loss that is the mean over its "
                f"targets other than {IGNORED}; got one with {name}={option(name)!r}. Try one "
                f"without {name}, or weights=, with each micro-batch's share of the loss."
            )


def _as_stage(stage: Stage | nn.Module | Sequence[nn.Module]) -> Stage:
    if isinstance(stage, Stage):
        return stage
    return Stage([stage] if isinstance(stage, nn.Module) else stage)


@dataclass
class InFlight:
    """State of a micro-batch in a model chunk between its forward and its backward."""

    x: Tensor | None  # the input, if its gradient has to be sent back
    edge: Any  # autograd edge where backward starts; the output itself may be freed once sent
    grad: Tensor | None  # gradient to start from after the last layers; others receive it
    split: SplitBackward | None  # set if the schedule splits this backward into I and W


class StageExecutor:
    """Executor of one step on one rank: computes actions; receiving and sending are `StageComm`'s.

    in_flight   what each micro-batch of each model chunk needs for its backward
    peak        largest number of them at one time
    loss        mean loss of the batch so far; None except on the rank of the last layers
    """

    def __init__(
        self,
        stage: Stage,
        loss_fn: LossFn,
        plan: CommPlan,
        batch: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[float]],
    ) -> None:
        self.stage, self.loss_fn, self.plan = stage, loss_fn, plan
        self.inputs, self.targets, self.weights = batch
        self.in_flight: dict[tuple[int, int], InFlight] = {}
        self.loss: Tensor | None = None
        self.peak = 0

    def execute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Compute an action from what was received; return what has to be sent, if anything."""
        key = (action.model_chunk, action.micro_batch)
        if action.kind == "forward":
            return self._forward(action, received)
        if action.kind == "backward_input":
            return self._backward(self.in_flight[key], received)
        saved = self.in_flight.pop(key)
        if action.kind == "backward":
            return self._backward(saved, received)
        if saved.split:
            saved.split.backward_weight()
        return None

    def _forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Run the model chunk, and after the last layers the loss; keep what backward needs."""
        key = (action.model_chunk, action.micro_batch)
        chunk = self.stage.chunks[action.model_chunk]
        x = self.inputs[action.micro_batch] if received is None else received.requires_grad_()
        split = SplitBackward(chunk) if key in self.plan.split_backwards else None
        with split or nullcontext():
            output = self._call_chunk(chunk, x, action)
        grad = None
        if is_last := self.plan.is_last(action):
            output, grad = self._mean_loss(output, action.micro_batch)
        edge = get_gradient_edge(output) if output.requires_grad else None
        self.in_flight[key] = InFlight(received, edge, grad, split)
        self.peak = max(self.peak, len(self.in_flight))
        return None if is_last else output

    def _backward(self, saved: InFlight, received: Tensor | None) -> Tensor | None:
        """Run the backward, or only its input half; return the gradient of forward's input."""
        x_grad, grad = None, saved.grad if received is None else received
        if saved.edge and saved.split:
            x_grad = saved.split.backward_input(saved.edge, grad, saved.x)
        elif saved.edge:
            torch.autograd.backward((saved.edge,), (grad,))
            x_grad = None if saved.x is None else saved.x.grad
        if saved.x is not None and x_grad is None:  # the stage does not use its input
            x_grad = torch.zeros_like(saved.x)
        saved.x = saved.edge = saved.grad = None
        return x_grad

    def _mean_loss(self, output: Tensor, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's mean loss, and the gradient that backward starts from.

        That gradient is the micro-batch's weight, its share of the mean over the whole batch.
        """
        weight = self.weights[micro_batch]
        loss = (output * 0).sum()  # the mean over no targets would be nan
        if weight:
            loss = self.loss_fn(output, self.targets[micro_batch])
        share = (loss.detach() * weight).clone()
        self.loss = share if self.loss is None else self.loss + share
        return loss, torch.full_like(loss, weight)

    def _call_chunk(self, chunk: nn.Module, x: Tensor, action: Action) -> Tensor:
        """Call a model chunk; explain a shape or dtype that it cannot take."""
        where = f"rank {dist.get_rank()}, Pipeline, {action.label}"
        try:
            output = chunk(x)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("shape", "size", "dtype")):
                raise
            raise ShapeError(
                f"{where}: need a stage that takes what the one before puts out; got "
                f"{describe(x)}, and {error}. Try split_model on every rank, with the same numbers."
            ) from error
        if not isinstance(output, Tensor):
            raise ShapeError(
                f"{where}: need a stage with one tensor as its output; got {describe(output)}. "
                "Try to cut the model elsewhere."
            )
        return output


def shares(targets: Sequence[Tensor]) -> list[float]:
    """Return each micro-batch's share of all targets; `IGNORED` targets do not count.

    Raises: CourseError if no target counts
    """
    counts = [
        t.numel() if t.is_floating_point() else int((t != IGNORED).sum().item()) for t in targets
    ]
    if not sum(counts):
        raise CourseError("Pipeline.step: need at least one target that counts; got none.")
    return [count / sum(counts) for count in counts]
