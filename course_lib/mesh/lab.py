"""Measure training on a mesh: its numbers, its bytes by axis, and the seconds of orders of axes.

The functions start with `rank` where all ranks run them. Notebook 11_mesh.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from course_lib.core.records import Event
from course_lib.cost.bandwidth import bus_factor
from course_lib.mesh.cost import MeshStep
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.mesh.training import MeshTrainer
from course_lib.models import GPT, token_loss
from course_lib.models.data import next_tokens, token_batch
from course_lib.ranks import Ranks, record
from course_lib.ranks.timing import time_interleaved

COUNTED = ("all_reduce", "all_gather", "reduce_scatter", "send")
LossesAndWeights = tuple[list[float], dict[str, Tensor]]  # losses, weights by name
DTYPES = {4: torch.float32, 8: torch.float64}


def batch_of(step: MeshStep, number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a step's whole batch, the same on every rank."""
    tokens = token_batch(number, batch=step.batch, seq=step.seq, vocab=step.spec.vocab)
    inputs, targets = next_tokens(tokens)
    return inputs, targets


def train_on_mesh(
    rank: int,
    step: MeshStep,
    optimizer_cls: type[Optimizer] = torch.optim.AdamW,
    num_steps: int = 3,
    **how: Any,
) -> LossesAndWeights:
    """Train on the step's mesh; return losses and whole weights. `how` goes to `MeshTrainer`."""
    trainer = _trainer(step, optimizer_cls, **how)
    losses = [trainer.step(*batch_of(step, number)) for number in range(num_steps)]
    return losses, trainer.full_state()


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
    trainer = _trainer(step, torch.optim.SGD, lr=0.1)
    trainer.step(*batch_of(step, 0))
    with record() as log:
        trainer.step(*batch_of(step, 1))
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


def median_call_s(mesh: Mesh, axis: str, events: Iterable[Event]) -> float:
    """Return the median seconds of one rank's collectives and messages along an axis."""
    return median(one.duration_s for one in events if mesh.axis_of(one.group) == axis)


def time_orders(ranks: Ranks, steps: Sequence[MeshStep], turns: int = 3) -> dict[Mesh, float]:
    """Return the seconds of a step on each mesh, which take turns: the fastest on the slowest rank.

    The fastest turn is the one that other processes disturbed least.
    """
    by_rank = ranks.run(_seconds_of, list(steps), turns)
    return {step.mesh: max(found[n] for found in by_rank) for n, step in enumerate(steps)}


def _seconds_of(rank: int, steps: Sequence[MeshStep], turns: int) -> list[float]:
    runs = {}
    for number, step in enumerate(steps):
        trainer, batch = _trainer(step, torch.optim.SGD, lr=0.1), batch_of(step, 0)
        runs[str(number)] = trainer.stage, partial(trainer.step, *batch)
    return list(time_interleaved(runs, turns, of=min).values())


def _trainer(step: MeshStep, optimizer_cls: type[Optimizer], **how: Any) -> MeshTrainer:
    mesh, dtype = RankMesh(step.mesh), DTYPES[step.number_bytes]
    return MeshTrainer(step.spec, mesh, step.num_micro_batches, optimizer_cls, dtype=dtype, **how)
