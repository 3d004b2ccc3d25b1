"""One rank's step in the check of exercise 3 of 08_pipeline: run the answer, note what it did."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.on_ranks import calls_of
from course_lib.checks.pipeline.sends import watched_sends
from course_lib.checks.pipeline.stages import (
    SETUPS,
    Grads,
    Memory,
    SampleStage,
    StepSetup,
    batch_of,
    changed_in,
    loss_fn,
)
from course_lib.core import Event
from course_lib.ranks import record


@dataclass
class Seen:
    """The results of one step on one rank; `graphs` and `peak_bytes` are of what was alive."""

    grads: Grads
    changed: tuple[str, ...]
    order: str
    backwards: list[int]
    starts_s: list[float]
    graphs: list[int]
    peak_bytes: int
    lost: int
    sends_changed: list[list[int]]
    calls: list[Event]


def run_steps(rank: int, answer: Callable[..., Any], labels: Sequence[str]) -> dict[str, Seen]:
    """Run the answer with each of these setups."""
    return {label: _step(rank, answer, SETUPS[label]) for label in labels}


def runs_of(_p: int) -> list[Mapping[str, Any]]:
    """Run the setups that need the number of each micro-batch only once the others are right."""
    return [{"labels": [*SETUPS][:-1]}, {"labels": [*SETUPS][-1:]}]


def _step(rank: int, answer: Callable[..., Any], setup: StepSetup) -> Seen:
    p = dist.get_world_size()
    stage, actions = SampleStage(rank, setup), setup.make(p, setup.m)[rank]
    batch, fresh = (batch_of(setup, first=rank == 0, last=rank == p - 1) for _ in range(2))
    given, tensors = list(actions), [tensor for pair in batch for tensor in pair]
    before = [param.grad for param in stage.trained if param.grad is not None]
    random_state = torch.get_rng_state()
    memory = Memory([*tensors, *stage.parameters(), *before])
    with record() as log, watched_sends() as sends_changed, memory as stage.memory:
        answer(given, stage, batch, loss_fn)
    return Seen(
        grads=stage.grads(),
        changed=("the list of actions",) * (given != actions)
        + ("the stage",) * (not stage.as_made(rank, setup))
        + ("the global random state",) * (not random_state.equal(torch.get_rng_state()))
        + changed_in(batch, fresh),
        order=stage.order,
        backwards=stage.backwards,
        starts_s=stage.starts_s,
        graphs=stage.graphs,
        peak_bytes=stage.peak,
        lost=stage.lost,
        sends_changed=sends_changed,
        calls=calls_of(log.events),
    )
