"""The end of a step, and what a checkpoint holds, by who has the optimizer's state.

Every class here does the same five things: forget gradients, clip them, step, put the whole state
together on rank 0, and go on from it. The whole state is always that of one process, so a run can
go on with another strategy and another number of ranks.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from course_lib.core.errors import CourseError
from course_lib.frameworks import Engine, alive_bytes
from course_lib.fsdp.fsdp import FSDP
from course_lib.fsdp.state import StateDict, full_optim_state, load_full_optim
from course_lib.train.config import TrainConfig
from course_lib.train.model_part import ModelPart, groups_of
from course_lib.zero.lab import owned_bytes
from course_lib.zero.zero import ZeRO1

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class OptimizerAdapter(Protocol):
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

    def gather(self) -> StateDict | None:
        """The state dicts `model` and `optimizer` of one process, on rank 0; elsewhere None."""

    def load(self, state: StateDict) -> None:
        """Take this rank's part of what `gather` gave."""

    def state_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds, by kind."""


def optimizer_of(config: TrainConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer that a run asks for, of these parameters."""
    return OPTIMIZERS[config.optimizer](params, **settings_of(config))


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """What an optimizer is told besides its parameters."""
    return {"lr": config.lr} | ({"momentum": config.momentum} if config.momentum else {})


class PlainAdapter:
    """An optimizer of all that this rank has of the model."""

    def __init__(self, part: ModelPart, config: TrainConfig) -> None:
        self.part = part
        self.optimizer = optimizer_of(config, part.module.parameters())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Every rank has the whole gradient, and finds the same norm."""
        nn.utils.clip_grad_norm_(self.part.module.parameters(), max_norm)

    def step(self) -> None:
        """Every rank steps all that it has."""
        self.optimizer.step()

    def gather(self) -> StateDict | None:
        """As `ModelPart.gather`."""
        return self.part.gather(self.optimizer)

    def load(self, state: StateDict) -> None:
        """As `ModelPart.load`."""
        self.part.load(state, self.optimizer)

    def state_bytes(self) -> dict[str, int]:
        """Bytes by kind."""
        return state_bytes(self.part.module.parameters(), self.optimizer)


class ZeROAdapter:
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

    def gather(self) -> StateDict | None:
        """Rows are put together one by one, on every rank."""
        state = self.engine.full_state_dict()
        return None if dist.get_rank() else state

    def load(self, state: StateDict) -> None:
        """Cut out this rank's shards."""
        self.engine.load_full_state_dict(state)

    def state_bytes(self) -> dict[str, int]:
        """Bytes by kind."""
        return owned_bytes(self.engine)


class FSDPAdapter:
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

    def gather(self) -> StateDict | None:
        """Rows are put together one by one."""
        model = self.model.full_state_dict(rank=0)
        kept = full_optim_state(self.model.param_groups, self.optimizer)
        return whole_state(model, self.names, kept, self.optimizer)

    def load(self, state: StateDict) -> None:
        """Every rank takes its shards."""
        self.model.load_full_state_dict(state["model"])
        load_full_optim(self.model.param_groups, self.optimizer, by_name(state, self.names))

    def state_bytes(self) -> dict[str, int]:
        """Bytes by kind; what a unit is gathered into counts while it is there."""
        rows = self.model.param_groups
        held = state_bytes([row.shard for row in rows], self.optimizer)
        return {
            **held,
            "params": held["params"] + sum(row.whole.untyped_storage().nbytes() for row in rows),
        }


class TorchFSDPAdapter:
    """PyTorch's `fully_shard`, and an optimizer of its DTensors."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.params = dict(model.named_parameters())

    def zero_grad(self) -> None:
        """Forget the shards' gradients."""
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """DTensors know the norm of the whole."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> None:
        """Step the shards; the next forward gathers them."""
        self.optimizer.step()

    @torch.no_grad()
    def gather(self) -> StateDict | None:
        """Tensors are put together one by one, on every rank."""
        model = {key: _full(value) for key, value in self.model.state_dict().items()}
        kept = {
            name: {kind: _full(value) for kind, value in self.optimizer.state[param].items()}
            for name, param in self.params.items()
        }
        return whole_state(model, list(self.params), kept, self.optimizer)

    @torch.no_grad()
    def load(self, state: StateDict) -> None:
        """Every rank cuts its shards out of its own copy."""
        for key, value in self.model.state_dict().items():
            value.copy_(_like(value, state["model"][key]))
        for name, kept in by_name(state, list(self.params)).items():
            param = self.params[name]
            self.optimizer.state[param] = {kind: _like(param, x) for kind, x in kept.items()}

    def state_bytes(self) -> dict[str, int]:
        """Bytes of shards by kind."""
        return state_bytes(self.model.parameters(), self.optimizer)


class FrameworkAdapter:
    """A framework, which keeps its optimizer and its state to itself."""

    def __init__(self, engine: Engine, before: int) -> None:
        self.engine, self.before = engine, before
        self.optimizer: Optimizer | None = None

    def zero_grad(self) -> None:
        """It has forgotten them after its last step."""

    def clip(self, max_norm: float) -> None:
        """Raises: CourseError; the settings do not let it come here."""
        raise CourseError(f"{self.engine.name}: need no clipping; got {max_norm}.")

    def step(self) -> None:
        """The framework's own."""
        self.engine.update()

    def gather(self) -> StateDict | None:
        """Nothing: no checkpoint is asked for."""
        return None

    def load(self, state: StateDict) -> None:
        """Raises: CourseError; the settings do not let it come here."""
        raise CourseError(f"{self.engine.name}: need a start from the seed; got a checkpoint.")

    def state_bytes(self) -> dict[str, int]:
        """Bytes of all tensors since there is a model; which kind they are is not told."""
        return {"tensors": alive_bytes() - self.before}


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(wanted: Tensor, value: Any) -> Any:
    """A whole tensor dealt out like `wanted`; a count of steps stays as it is."""
    if not (isinstance(wanted, DTensor) and isinstance(value, Tensor) and value.dim()):
        return value
    value = value.to(wanted.device)
    return distribute_tensor(value, wanted.device_mesh, wanted.placements, src_data_rank=None)


def state_bytes(params: Iterable[nn.Parameter], optimizer: Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank, each storage once."""
    params = list(params)
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    return {
        "params": _bytes(params),
        "grads": _bytes([param.grad for param in params]),
        "optim_state": _bytes([x for x in state if isinstance(x, Tensor) and x.dim()]),
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    local = [getattr(x, "_local_tensor", x) for x in tensors if x is not None]  # of a DTensor
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}
    return sum(storages.values())


def whole_state(
    model: Mapping[str, Any],
    names: list[str],
    kept: Mapping[str, Mapping[str, Any]],
    optimizer: Optimizer,
) -> StateDict | None:
    """State dicts of one process out of whole tensors by name."""
    if dist.get_rank():
        return None
    state = {n: _on_host(kept[name]) for n, name in enumerate(names) if kept.get(name)}
    groups = groups_of(optimizer.state_dict(), len(names))
    return {"model": _on_host(model), "optimizer": {"state": state, "param_groups": groups}}


def _on_host(values: Mapping[str, Any]) -> StateDict:
    """Copies: a count of steps that parameters share would be counted up by each of them."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }


def by_name(state: StateDict, names: list[str]) -> dict[str, StateDict]:
    """What a saved optimizer remembers of each parameter, by its name."""
    return {names[number]: kept for number, kept in state["optimizer"]["state"].items()}
