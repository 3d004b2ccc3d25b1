"""A run without running it: what one step would hold and send on each kind of rank.

The trainer's own lines go through two steps as one rank of a `dry_world`, on the meta device, for
one rank of each pipeline stage that differs: the ranks of a stage hold and send alike. The tokens
of a rank go to all experts in turn.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.records import COMMUNICATION_KINDS, Event
from course_lib.core.units import format_bytes
from course_lib.cost.bandwidth import bus_factor
from course_lib.memory.saved_tensors import SavedStorages
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.ranks.dry_world import dry_world
from course_lib.ranks.recorder import record
from course_lib.train.config import TrainConfig
from course_lib.train.optimizers import FrameworkAdapter
from course_lib.train.strategies import FRAMEWORKS
from course_lib.train.trainer import Trainer

UNUSED: dict[str, Any] = {  # by the two steps of a dry run
    **{"steps": 2, "epochs": None, "lr_decay": None, "warmup": 0, "every": 0, "eval_every": 0},
    **{"stop_at_loss": None, "record_values": None, "out": None, "profile": None},
    **{"save_every": 0, "async_save": False},
}
MOST_STAGES = 4  # of which each is looked at


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of one kind along one axis in a step of a rank.

    axis         of the mesh, or several: "dp x cp"
    num_bytes    of the whole tensors: the gathered one of an all_gather, as in `Event`
    sent_bytes   that a ring, or the message itself, sends from this rank
    """

    axis: str
    kind: str
    count: int
    num_bytes: int
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of a rank: `traffic`, and `memory` in bytes by kind.

    Activations at their peak, the others when the last backward has ended, as in a run record.
    """

    rank: int
    memory: dict[str, int]
    traffic: Sequence[Traffic]


def dry_run(config: TrainConfig, num_ranks: int) -> list[RankStep]:
    """Return a step of each kind of rank of a run with so many; nothing is computed, sent or read.

    Cost:    on one core, some seconds for a large model, and no memory for its numbers
    Raises:  CourseError for what has no dry run, or cannot be trained
    """
    check_dry(config)
    config = replace(config, **UNUSED)
    found = []
    for rank in ranks_to_look_at(config, num_ranks):
        with dry_world(rank, num_ranks):
            found.append(measure_step(Trainer(rank, config)))
    return found


def check_dry(config: TrainConfig) -> None:
    """Check that a run has a dry run. Raises: CourseError"""
    if config.strategy in (*FRAMEWORKS, "torch-ddp", "torch-fsdp"):
        near = "fsdp" if "fsdp" in config.strategy else "ddp"
        raise CourseError(
            f"--dry-run: need a strategy of the course, as others read numbers, which tensors on "
            f"the meta device do not have; got {config.strategy}. Try --strategy {near}."
        )
    if config.resume or config.eval_only:
        raise CourseError(
            "--dry-run: need a training step; got a run that reads a checkpoint or only evaluates. "
            "Try it without --resume and --eval-only."
        )
    if dist.is_initialized():
        raise CourseError(
            "--dry-run: need a process of its own; got one that is a rank. Try it without torchrun."
        )


def ranks_to_look_at(config: TrainConfig, num_ranks: int) -> list[int]:
    """Return the first rank of each pipeline stage; of many: first, second and last."""
    stages = {*range(config.pp)}
    if config.pp > MOST_STAGES:
        stages = {0, 1, config.pp - 1}
    return [stage * (num_ranks // config.pp) for stage in sorted(stages)]


def measure_step(trainer: Trainer) -> RankStep:
    """Take the steps of a run that has taken none; return what the last one holds and sends.

    `activations` is what autograd keeps for backward, besides parameters and token numbers. Works
    in a real run, too; all ranks call it.

    Raises: CourseError for a strategy that is not the course's own
    """
    if isinstance(trainer.adapter, FrameworkAdapter):
        raise CourseError(
            f"measure_step: need a strategy of the course; got {trainer.config.strategy}."
        )
    for _ in range(trainer.config.steps - 1):  # a first one makes the optimizer's state, and more
        trainer.step()
    peak = 0

    def note() -> None:
        nonlocal peak
        peak = max(peak, saved.num_bytes)

    given = [*trainer.adapter.weights(), *trainer.model.buffers()]
    saved = SavedStorages(given, note, without=torch.int64)
    with record() as log, saved.hooks():
        trainer.step()
    memory = {kind: trainer.record.run["memory"][kind] for kind in ("params", "grads")}
    memory["optim_state"] = trainer.adapter.state_bytes()["optim_state"]
    return RankStep(
        rank=trainer.rank,
        memory=memory | {"activations": peak},
        traffic=traffic_of(log.events, trainer.mesh),
    )


def traffic_of(events: Sequence[Event], mesh: RankMesh) -> list[Traffic]:
    """Return the communication among events of this rank, by axis and kind."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for event in events:
        if event.kind not in COMMUNICATION_KINDS or len(event.group) < 2:
            continue
        share = 0 if event.kind == "recv" else bus_factor(event.kind, len(event.group))
        sent_bytes = share * event.num_bytes
        coordinates = [mesh.mesh.coordinates(rank) for rank in event.group]
        axes = (axis for axis in mesh.mesh.sizes if len({one[axis] for one in coordinates}) > 1)
        found[" x ".join(axes), event.kind].append((event.num_bytes, sent_bytes))
    return [
        Traffic(
            axis=axis,
            kind=kind,
            count=len(calls),
            num_bytes=sum(num_bytes for num_bytes, _ in calls),
            sent_bytes=sum(sent_bytes for _, sent_bytes in calls),
        )
        for (axis, kind), calls in sorted(found.items())
    ]


def dry_text(steps: Sequence[RankStep]) -> str:
    """Return memory and messages of the fullest rank, and the memory of the others looked at."""
    fullest = max(steps, key=lambda step: sum(step.memory.values()))
    lines = [f"rank {fullest.rank}, the fullest of ranks {', '.join(str(s.rank) for s in steps)}"]
    lines = lines if len(steps) > 1 else [f"rank {fullest.rank}; the others hold and send no more"]
    lines += [f"  {kind:<15}{format_bytes(n):>12}" for kind, n in fullest.memory.items()]
    lines += [f"  {'in all':<15}{format_bytes(sum(fullest.memory.values())):>12}", ""]
    lines += [f"  {'axis':<9}{'message':<16}{'number':>8}{'whole tensors':>16}{'sent':>12}"]
    lines += [
        f"  {one.axis:<9}{one.kind:<16}{one.count:>8,}{format_bytes(one.num_bytes):>16}"
        f"{format_bytes(one.sent_bytes):>12}"
        for one in fullest.traffic
    ]
    others = (step for step in steps if step is not fullest)
    lines += [f"rank {s.rank} holds {format_bytes(sum(s.memory.values()))}" for s in others]
    return "\n".join(lines)
