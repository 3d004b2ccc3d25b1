"""One rank's step in the check of exercise 3 of 08_pipeline: run the answer, note what it did."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from course_lib.checks.on_ranks import calls_of
from course_lib.checks.pipeline.callers import Belongings, Change
from course_lib.checks.pipeline.sends import watched_sends
from course_lib.checks.pipeline.stages import (
    SETUPS,
    Grads,
    Memory,
    StepSetup,
    loss_fn,
)
from course_lib.core import Event
from course_lib.ranks import record


@dataclass
class Seen:
    """The results of one step on one rank; `graphs` and `peak_bytes` are of what was alive."""

    grads: Grads
    changed: list[Change]
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
    """Run the setups that need each micro-batch's number, or nan, once the others are right."""
    return [{"labels": [*SETUPS][:-2]}, {"labels": [*SETUPS][-2:]}]


def _step(rank: int, answer: Callable[..., Any], setup: StepSetup) -> Seen:
    given = Belongings(rank, dist.get_world_size(), setup)
    stage, tensors = given.stage, [tensor for pair in given.batch for tensor in pair]
    before = [param.grad for param in stage.trained if param.grad is not None]
    memory = Memory([*tensors, *stage.parameters(), *before])
    with record() as log, watched_sends() as sends_changed, memory as stage.memory:
        answer(given.actions, stage, given.batch, loss_fn)
    return Seen(
        grads=stage.grads(),
        changed=given.changes(),
        order=stage.order,
        backwards=stage.backwards,
        starts_s=stage.starts_s,
        graphs=stage.graphs,
        peak_bytes=stage.peak,
        lost=stage.lost,
        sends_changed=sends_changed,
        calls=calls_of(log.events),
    )
