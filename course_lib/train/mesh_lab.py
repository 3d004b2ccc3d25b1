"""Lesson 11's training on a mesh: its numbers, its bytes by axis, the seconds of orders of axes.

The functions start with `rank` where all ranks run them. Notebook 11_mesh.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from course_lib.core.records import Event
from course_lib.cost.bandwidth import bus_factor
from course_lib.mesh.cost import MeshStep
from course_lib.mesh.mesh import Mesh
from course_lib.models import GPT, token_loss
from course_lib.models.data import next_tokens, token_batch
from course_lib.ranks import Ranks, record
from course_lib.ranks.timing import time_interleaved
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import Trainer

COUNTED = ("all_reduce", "all_gather", "reduce_scatter", "send")
LossesAndWeights = tuple[list[float], dict[str, Tensor]]  # losses, weights by name
DTYPES = {4: torch.float32, 8: torch.float64}


def batch_of(step: MeshStep, number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a step's whole batch, the same on every rank."""
    tokens = token_batch(number, batch=step.batch, seq=step.seq, vocab=step.spec.vocab)
    inputs, targets = next_tokens(tokens)
    return inputs, targets


def trainer_of(rank: int, step: MeshStep, **options: Any) -> Trainer:
    """Return the trainer of a step, its axes in the mesh's order, by default with DDP and SGD.

    The layers are divided evenly over the stages, as the formulas of `MeshStep` have it.
    """
    usual: dict[str, Any] = {"strategy": "ddp", "optimizer": "sgd", "lr": 0.1}
    config = TrainConfig(
        model=step.spec,
        tp=step.mesh.size("tp"),
        pp=step.mesh.size("pp"),
        global_batch=step.batch,
        micro_batch=step.micro_batch,
        seq=step.seq,
        dtype=str(DTYPES[step.number_bytes]).removeprefix("torch."),
        every=0,
        **usual | options,
    )
    num_layers = [len(step.layers_of(stage)) for stage in range(config.pp)]
    num_layers[0] += 1  # the embedding
    num_layers[-1] += 1  # the head
    return Trainer(rank, config, order=[*step.mesh.sizes], num_layers=num_layers)


def take_step(trainer: Trainer) -> float:
    """Take the next step; return its mean loss, which the last stage sends to the others."""
    total, mesh = trainer.step()[0], trainer.mesh
    for axis in ("pp", "dp"):
        if mesh.size(axis) > 1:
            dist.all_reduce(total, group=mesh.group(axis))
    return float(total) / mesh.num_copies


def train_on_mesh(
    rank: int,
    step: MeshStep,
    optimizer_cls: type[Optimizer] = torch.optim.AdamW,
    num_steps: int = 3,
    **how: Any,
) -> LossesAndWeights:
    """Train on the step's mesh; return losses and whole weights. `how` goes to `TrainConfig`."""
    name = optimizer_cls.__name__.lower()
    trainer = trainer_of(rank, step, optimizer=name, clip_norm=how.pop("max_norm", None), **how)
    losses = [take_step(trainer) for _ in range(num_steps)]
    return losses, trainer.part.full_state()


def train_alone(
    step: MeshStep,
    optimizer_cls: type[Optimizer] = torch.optim.AdamW,
    num_steps: int = 3,
    *,
    max_norm: float | None = None,
    **settings: Any,
) -> LossesAndWeights:
    """Train the same model on the same batches in this process: what `train_on_mesh` must equal."""
    torch.manual_seed(0)
    model = GPT(step.spec).to(DTYPES[step.number_bytes])
    optimizer, losses = optimizer_cls(model.parameters(), **settings), []
    for number in range(num_steps):
        tokens, targets = batch_of(step, number)
        optimizer.zero_grad()
        loss = token_loss(model(tokens), targets)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def furthest_apart(ours: LossesAndWeights, theirs: LossesAndWeights) -> float:
    """Return the largest difference of losses and weights."""
    (losses, weights), (their_losses, their_weights) = ours, theirs
    apart = [abs(a - b) for a, b in zip(losses, their_losses, strict=True)]
    apart += [(weights[name] - their_weights[name]).abs().max().item() for name in their_weights]
    return max(apart)


def events_of_a_step(rank: int, step: MeshStep) -> list[Event]:
    """Return this rank's events of a step; one before it, which also exchanges shapes, is not."""
    trainer = trainer_of(rank, step)
    take_step(trainer)
    with record() as log:
        take_step(trainer)
    return log.events


def bytes_by_axis(mesh: Mesh, rank: int, events: Iterable[Event]) -> dict[str, float]:
    """Return the bytes that a rank sent along each axis, collectives around rings.

    The group of a call, of a message its two ranks, says which axis it belongs to.
    """
    sent = dict.fromkeys(mesh.sizes, 0.0)
    for event in events:
        if event.rank == rank and event.kind in COUNTED and (axis := mesh.axis_of(event.group)):
            sent[axis] += bus_factor(event.kind, len(event.group)) * event.num_bytes
    return sent


def time_orders(ranks: Ranks, steps: Sequence[MeshStep], turns: int = 3) -> dict[Mesh, float]:
    """Return the seconds of a step on each mesh, which take turns: the fastest on the slowest rank.

    The fastest turn is the one that other processes disturbed least.
    """
    by_rank = ranks.run(_seconds_of, list(steps), turns)
    return {step.mesh: max(found[n] for found in by_rank) for n, step in enumerate(steps)}


def _seconds_of(rank: int, steps: Sequence[MeshStep], turns: int) -> list[float]:
    trainers = [trainer_of(rank, step) for step in steps]
    runs = {str(n): (one.model, partial(take_step, one)) for n, one in enumerate(trainers)}
    return list(time_interleaved(runs, turns, of=min).values())
