"""The end of a step, and what a checkpoint holds, by who has the optimizer's state.

Every class here does the same five things: forget gradients, clip them, step, put the whole state
together on rank 0, and go on from it. The whole state is always that of one process, so a run can
go on with another strategy and another number of ranks.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from course_lib.fsdp import FSDP
from course_lib.fsdp_state import full_optim_state, load_full_optim
from course_lib.training.config import TrainConfig
from course_lib.training.parts import Parts
from course_lib.training.whole_state import State, by_name, held_bytes, whole_state
from course_lib.zero import ZeRO1
from course_lib.zero_lab import owned_bytes

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Steps(Protocol):
    """What the loop asks for after the backward passes of a step."""

    @property
    def optimizer(self) -> Optimizer | None:
        """Where the learning rate is set; None: a framework keeps it to itself."""

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""

    def clip(self, max_norm: float) -> None:
        """Make the norm of the whole gradient max_norm at most."""

    def step(self) -> None:
        """Step the parameters; every rank can compute with them afterwards."""

    def gather(self) -> State | None:
        """The state dicts `model` and `optimizer` of one process, on rank 0; elsewhere None."""

    def load(self, state: State) -> None:
        """Take this rank's part of what `gather` gave."""

    def held(self) -> dict[str, int]:
        """Bytes that this rank holds, by kind."""


def optimizer_of(config: TrainConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer that a run asks for, of these parameters."""
    return OPTIMIZERS[config.optimizer](params, **settings_of(config))


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """What an optimizer is told besides its parameters."""
    return {"lr": config.lr} | ({"momentum": config.momentum} if config.momentum else {})


class PlainSteps:
    """An optimizer of all that this rank has of the model."""

    def __init__(self, parts: Parts, config: TrainConfig) -> None:
        self.parts = parts
        self.optimizer = optimizer_of(config, parts.module.parameters())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Every rank has the whole gradient, and finds the same norm."""
        nn.utils.clip_grad_norm_(self.parts.module.parameters(), max_norm)

    def step(self) -> None:
        """Every rank steps all that it has."""
        self.optimizer.step()

    def gather(self) -> State | None:
        """As `Parts.gather`."""
        return self.parts.gather(self.optimizer)

    def load(self, state: State) -> None:
        """As `Parts.load`."""
        self.parts.load(state, self.optimizer)

    def held(self) -> dict[str, int]:
        """Bytes by kind."""
        return held_bytes(self.parts.module.parameters(), self.optimizer)


class ZeROSteps:
    """An engine of notebook 09_zero, which has its own optimizer."""

    def __init__(self, engine: ZeRO1) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer

    def zero_grad(self) -> None:
        """Forget whole gradients and shards."""
        self.engine.zero_grad()

    def clip(self, max_norm: float) -> None:
        """The shards' squares add up."""
        self.engine.clip_grad_norm_(max_norm)

    def step(self) -> None:
        """Step the shard, gather the parameters."""
        self.engine.step()

    def gather(self) -> State | None:
        """Rows are put together one by one, on every rank."""
        state = self.engine.full_state_dict()
        return None if dist.get_rank() else state

    def load(self, state: State) -> None:
        """Cut out this rank's shards."""
        self.engine.load_full_state_dict(state)

    def held(self) -> dict[str, int]:
        """Bytes by kind."""
        return owned_bytes(self.engine)


class FSDPSteps:
    """The FSDP of notebook 10_fsdp, and an optimizer of its shards.

    names   of the plain model's parameters, in their order
    """

    def __init__(self, model: FSDP, names: list[str], config: TrainConfig) -> None:
        self.model, self.names = model, names
        self.optimizer = optimizer_of(config, model.parameters())

    def zero_grad(self) -> None:
        """Forget the shards' gradients."""
        self.model.zero_grad()

    def clip(self, max_norm: float) -> None:
        """The shards' squares add up."""
        self.model.clip_grad_norm_(max_norm)

    def step(self) -> None:
        """Step the shards; the next forward gathers them."""
        self.optimizer.step()

    def gather(self) -> State | None:
        """Rows are put together one by one."""
        model = self.model.full_state_dict(rank=0)
        kept = full_optim_state(self.model.rows, self.optimizer)
        return whole_state(model, self.names, kept, self.optimizer)

    def load(self, state: State) -> None:
        """Every rank takes its shards."""
        self.model.load_full_state_dict(state["model"])
        load_full_optim(self.model.rows, self.optimizer, by_name(state, self.names))

    def held(self) -> dict[str, int]:
        """Bytes by kind; what a unit is gathered into counts while it is there."""
        rows = self.model.rows
        held = held_bytes([row.shard for row in rows], self.optimizer)
        return {
            **held,
            "params": held["params"] + sum(row.whole.untyped_storage().nbytes() for row in rows),
        }
