"""Adapters that give every strategy's optimizer one interface: reset gradients, clip, step, state.

The state is the model and its optimizer as `course_lib.checkpoint` takes them: it finds this rank's
shards of the whole tensors, so a run can resume with another strategy and other ranks.
"""

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from course_lib.core.errors import CourseError
from course_lib.fsdp.fsdp import FSDP
from course_lib.models.storages import storage_bytes
from course_lib.train.config import TrainConfig
from course_lib.train.model_part import ModelPart
from course_lib.zero.lab import owned_bytes
from course_lib.zero.zero import ZeRO1

if TYPE_CHECKING:  # the frameworks are imported by the strategies that use them
    from course_lib.frameworks import Engine, MegatronEngine

State = dict[str, Any]  # what course_lib.checkpoint saves and loads
OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class OptimizerAdapter(Protocol):
    """The interface that the training loop uses after a step's backward passes."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose learning rate is set; None where a framework keeps its own."""

    def zero_grad(self) -> None:
        """Reset the gradients of the previous step."""

    def clip(self, max_norm: float) -> None:
        """Scale the whole gradient so that its norm is at most max_norm."""

    def step(self) -> None:
        """Update the parameters; afterwards every rank can compute with them."""

    def state(self) -> State:
        """Return the model and the optimizer, to save and load this rank's part of them."""

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by kind."""


def optimizer_of(config: TrainConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of a run for these parameters."""
    return OPTIMIZERS[config.optimizer](params, **settings_of(config))


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the optimizer's keyword arguments."""
    return {"lr": config.lr} | ({"momentum": config.momentum} if config.momentum else {})


class PlainAdapter:
    """Adapter for a PyTorch optimizer of all parameters that this rank has."""

    def __init__(self, part: ModelPart, config: TrainConfig) -> None:
        self.part = part
        self.optimizer = optimizer_of(config, part.module.parameters())

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Clip the gradient: every rank has all of it, and finds the same norm."""
        nn.utils.clip_grad_norm_(self.part.module.parameters(), max_norm)

    def step(self) -> None:
        """Update all parameters of this rank."""
        self.optimizer.step()

    def state(self) -> State:
        """Return this rank's part of the model, and the optimizer."""
        return {"model": self.part, "optimizer": self.optimizer}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by kind."""
        return state_bytes(self.part.module.parameters(), self.optimizer)


class ZeROAdapter:
    """Adapter for a ZeRO engine of notebook 09_zero, which has its own optimizer."""

    def __init__(self, engine: ZeRO1) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer

    def zero_grad(self) -> None:
        """Reset whole gradients and shards."""
        self.engine.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of the whole gradient: the squares of all shards are summed."""
        self.engine.clip_grad_norm_(max_norm)

    def step(self) -> None:
        """Update this rank's shard and gather the parameters."""
        self.engine.step()

    def state(self) -> State:
        """Return the engine and its optimizer, which know their shards."""
        return {"model": self.engine, "optimizer": self.engine.optimizer}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by kind."""
        return owned_bytes(self.engine)


class FSDPAdapter:
    """Adapter for the FSDP of notebook 10_fsdp and an optimizer of its shards."""

    def __init__(self, model: FSDP, config: TrainConfig) -> None:
        self.model = model
        self.optimizer = optimizer_of(config, model.parameters())

    def zero_grad(self) -> None:
        """Reset the shards' gradients."""
        self.model.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of the whole gradient: the squares of all shards are summed."""
        self.model.clip_grad_norm_(max_norm)

    def step(self) -> None:
        """Update the shards; the next forward gathers them."""
        self.optimizer.step()

    def state(self) -> State:
        """Return the model, which knows its shards, and the optimizer."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes by kind; a unit's gathered parameters count while they are allocated."""
        groups = self.model.param_groups
        found = state_bytes(self.model.parameters(), self.optimizer)
        return {
            **found,
            "params": found["params"] + storage_bytes(group.whole for group in groups),
        }


class TorchFSDPAdapter:
    """Adapter for PyTorch's `fully_shard` and an optimizer of its DTensors."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def zero_grad(self) -> None:
        """Reset the shards' gradients."""
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of the whole gradient, which DTensors compute."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> None:
        """Update the shards; the next forward gathers them."""
        self.optimizer.step()

    def state(self) -> State:
        """Return the model and the optimizer: their DTensors know their shards."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's shards by kind."""
        return state_bytes(self.model.parameters(), self.optimizer)


class FrameworkAdapter:
    """Adapter for a framework, which keeps its optimizer and its state to itself.

    earlier   storages that were alive before the model and do not belong to this run
    """

    def __init__(self, engine: "Engine | MegatronEngine", earlier: Set[StorageWeakRef]) -> None:
        self.engine, self.earlier = engine, earlier
        self.optimizer: Optimizer | None = None

    def zero_grad(self) -> None:
        """Do nothing: the framework resets the gradients after its step."""

    def clip(self, max_norm: float) -> None:
        """Refuse to clip; the settings do not allow it. Raises: CourseError"""
        raise CourseError(f"{self.engine.name}: need no clipping; got {max_norm}.")

    def step(self) -> None:
        """Run the framework's own update."""
        self.engine.update()

    def state(self) -> State:
        """Return nothing: the settings allow no checkpoint."""
        return {}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of all tensors of this run; their kinds are not known."""
        from course_lib.frameworks import alive_bytes

        return {"tensors": alive_bytes(besides=self.earlier)}


def state_bytes(params: Iterable[nn.Parameter], optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state here, each storage once."""
    params = list(params)
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    return {
        "params": storage_bytes(params),
        "grads": storage_bytes(param.grad for param in params),
        "optim_state": storage_bytes(x for x in state if isinstance(x, Tensor) and x.dim()),
    }
