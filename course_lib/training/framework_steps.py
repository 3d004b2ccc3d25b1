"""The end of a step where PyTorch's FSDP, or a framework, has the optimizer's state."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from course_lib.core.errors import CourseError
from course_lib.frameworks import Engine, alive_bytes
from course_lib.training.whole_state import State, by_name, held_bytes, whole_state


class TorchFSDPSteps:
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
    def gather(self) -> State | None:
        """Tensors are put together one by one, on every rank."""
        model = {key: _full(value) for key, value in self.model.state_dict().items()}
        kept = {
            name: {kind: _full(value) for kind, value in self.optimizer.state[param].items()}
            for name, param in self.params.items()
        }
        return whole_state(model, list(self.params), kept, self.optimizer)

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Every rank cuts its shards out of its own copy."""
        for key, value in self.model.state_dict().items():
            value.copy_(_like(value, state["model"][key]))
        for name, kept in by_name(state, list(self.params)).items():
            param = self.params[name]
            self.optimizer.state[param] = {kind: _like(param, x) for kind, x in kept.items()}

    def held(self) -> dict[str, int]:
        """Bytes of shards by kind."""
        return held_bytes(self.model.parameters(), self.optimizer)


class FrameworkSteps:
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

    def gather(self) -> State | None:
        """Nothing: no checkpoint is asked for."""
        return None

    def load(self, state: State) -> None:
        """Raises: CourseError; the settings do not let it come here."""
        raise CourseError(f"{self.engine.name}: need a start from the seed; got a checkpoint.")

    def held(self) -> dict[str, int]:
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
