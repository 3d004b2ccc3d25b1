"""Adapters that give every strategy's optimizer one interface: step, clip, save and load.

Every adapter does the same five things: reset gradients, clip them, step, gather the whole state on
rank 0, and load it. The whole state is always that of one process, so a run can resume with another
strategy and another number of ranks.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from course_lib.core.errors import CourseError
from course_lib.frameworks import Engine, alive_bytes
from course_lib.fsdp.fsdp import FSDP
from course_lib.fsdp.state import StateDict, full_optim_state, load_full_optim
from course_lib.models.storages import storage_bytes
from course_lib.train.config import TrainConfig
from course_lib.train.model_part import ModelPart, groups_of
from course_lib.zero.lab import owned_bytes
from course_lib.zero.state import on_host
from course_lib.zero.zero import ZeRO1

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

    def gather(self) -> StateDict | None:
        """Return the state dicts `model` and `optimizer` of one process on rank 0, else None."""

    def load(self, state: StateDict) -> None:
        """Load this rank's part of a state that `gather` returned."""

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

    def gather(self) -> StateDict | None:
        """Return the whole state on rank 0; see `ModelPart.gather`."""
        return self.part.gather(self.optimizer)

    def load(self, state: StateDict) -> None:
        """Load this rank's part; see `ModelPart.load`."""
        self.part.load(state, self.optimizer)

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

    def gather(self) -> StateDict | None:
        """Gather the whole state, one flat parameter at a time, on every rank."""
        state = self.engine.full_state_dict()
        return None if dist.get_rank() else state

    def load(self, state: StateDict) -> None:
        """Load this rank's shards of a whole state."""
        self.engine.load_full_state_dict(state)

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by kind."""
        return owned_bytes(self.engine)


class FSDPAdapter:
    """Adapter for the FSDP of notebook 10_fsdp and an optimizer of its shards.

    names   of the plain model's parameters, in their order
    """

    def __init__(self, model: FSDP, names: list[str], config: TrainConfig) -> None:
        self.model, self.names = model, names
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

    def gather(self) -> StateDict | None:
        """Gather the whole state on rank 0, one parameter group at a time."""
        model = self.model.full_state_dict(rank=0)
        saved = full_optim_state(self.model.param_groups, self.optimizer)
        return whole_state(model, self.names, saved, self.optimizer)

    def load(self, state: StateDict) -> None:
        """Load this rank's shards of a whole state."""
        self.model.load_full_state_dict(state["model"])
        load_full_optim(self.model.param_groups, self.optimizer, by_name(state, self.names))

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
        self.params = dict(model.named_parameters())

    def zero_grad(self) -> None:
        """Reset the shards' gradients."""
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of the whole gradient, which DTensors compute."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> None:
        """Update the shards; the next forward gathers them."""
        self.optimizer.step()

    @torch.no_grad()
    def gather(self) -> StateDict | None:
        """Gather the whole state, one tensor at a time, on every rank."""
        model = {key: _full(value) for key, value in self.model.state_dict().items()}
        kept = {
            name: {kind: _full(value) for kind, value in self.optimizer.state[param].items()}
            for name, param in self.params.items()
        }
        return whole_state(model, list(self.params), kept, self.optimizer)

    @torch.no_grad()
    def load(self, state: StateDict) -> None:
        """Load this rank's shards, cut from its own copy of the whole state."""
        for key, value in self.model.state_dict().items():
            value.copy_(_like(value, state["model"][key]))
        for name, kept in by_name(state, list(self.params)).items():
            param = self.params[name]
            self.optimizer.state[param] = {kind: _like(param, x) for kind, x in kept.items()}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's shards by kind."""
        return state_bytes(self.model.parameters(), self.optimizer)


class FrameworkAdapter:
    """Adapter for a framework, which keeps its optimizer and its state to itself.

    earlier   storages that were alive before the model and do not belong to this run
    """

    def __init__(self, engine: Engine, earlier: Set[StorageWeakRef]) -> None:
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

    def gather(self) -> StateDict | None:
        """Return None: the settings allow no checkpoint."""
        return None

    def load(self, state: StateDict) -> None:
        """Refuse to load; the settings do not allow it. Raises: CourseError"""
        raise CourseError(f"{self.engine.name}: need a start from the seed; got a checkpoint.")

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of all tensors of this run; their kinds are not known."""
        return {"tensors": alive_bytes(besides=self.earlier)}


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(wanted: Tensor, value: Any) -> Any:
    """Distribute a whole tensor like `wanted`; a step count stays as it is."""
    if not (isinstance(wanted, DTensor) and isinstance(value, Tensor) and value.dim()):
        return value
    value = value.to(wanted.device)
    return distribute_tensor(value, wanted.device_mesh, wanted.placements, src_data_rank=None)


def state_bytes(params: Iterable[nn.Parameter], optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state here, each storage once."""
    params = list(params)
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    return {
        "params": storage_bytes(params),
        "grads": storage_bytes(param.grad for param in params),
        "optim_state": storage_bytes(x for x in state if isinstance(x, Tensor) and x.dim()),
    }


def whole_state(
    model: Mapping[str, Any],
    names: list[str],
    kept: Mapping[str, Mapping[str, Any]],
    optimizer: Optimizer,
) -> StateDict | None:
    """Return one process's state dicts, from whole tensors by name, on rank 0; else None."""
    if dist.get_rank():
        return None
    state = {n: _copies(kept[name]) for n, name in enumerate(names) if kept.get(name)}
    groups = groups_of(optimizer.state_dict(), len(names))
    return {"model": _copies(model), "optimizer": {"state": state, "param_groups": groups}}


def by_name(state: StateDict, names: list[str]) -> dict[str, StateDict]:
    """Return the saved optimizer state of each parameter by its name."""
    return {names[number]: kept for number, kept in state["optimizer"]["state"].items()}


def _copies(values: Mapping[str, Any]) -> StateDict:
    """Copy all values to the CPU: each parameter would increment a step count that they share."""
    return {key: on_host(value) for key, value in values.items()}
