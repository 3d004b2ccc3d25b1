"""Observation of the split loss on one rank, for exercise 4 of 07_tensor_parallel."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import come_late, watched_handles
from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.tensor_parallel.parts import changed, is_outside
from course_lib.checks.tensor_parallel.whole_logits import SCALE, Case, cases
from course_lib.core import Event
from course_lib.ranks import record


@dataclass
class Used:
    """The observation by one rank of one loss."""

    loss: Any
    grad: Any
    forward: list[Event]
    backward: list[Event]
    changed: tuple[str, ...]
    never_waited: int
    outside: bool


def use(rank: int, answer: Callable[[Tensor, Tensor, int], Any]) -> dict[str, Used]:
    """Compute each case's loss and its gradient; in the first one, the last rank comes late."""
    used = dict[str, Used]()
    for name, case in cases().items():
        if not used:
            come_late(rank)
        with torch.set_grad_enabled(not case.no_grad):
            used[name] = _use_one(answer, case, case.shard(dist.get_world_size(), rank))
    return used


def _use_one(answer: Callable[[Tensor, Tensor, int], Any], case: Case, mine: Tensor) -> Used:
    logits, targets, outside = case.logits[:, mine].clone(), case.targets.clone(), False
    logits.requires_grad_(not case.frozen)
    with record() as forward, watched_handles() as open_ones:
        loss = case.total(lambda one, other: answer(one, other, int(mine[0])), logits, targets)
    kept = copied(loss)
    above = torch.full_like(kept if isinstance(kept, Tensor) else logits, SCALE)
    with record() as backward:
        if isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
            outside = is_outside(partial(loss.backward, above))
    return Used(
        loss=kept,
        grad=copied(logits.grad),
        forward=calls_of(forward.events),
        backward=calls_of(backward.events),
        changed=changed(
            logits=(logits, case.logits[:, mine]),
            targets=(targets, case.targets),
            the_gradient_from_above=(above, torch.full_like(above, SCALE)),
        ),
        never_waited=len(open_ones),
        outside=outside,
    )
