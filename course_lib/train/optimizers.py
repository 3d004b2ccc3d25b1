"""Adapters that give every strategy's optimizer one interface: reset gradients, clip, step, state.

The state is the model and its optimizer as `course_lib.checkpoint` takes them: it finds this rank's
shards of the whole tensors, so a run can resume with another strategy and other ranks.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from course_lib.checkpoint.model_state import whole_shard
from course_lib.core.shards import Shard
from course_lib.fsdp.fsdp import FSDP
from course_lib.mesh.clip import clip_grad_norm_across, finish_over_axes, held_grads
from course_lib.mesh.model_part import ModelPart
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.models.storages import storage_bytes
from course_lib.ranks.world import number_in
from course_lib.tensor_parallel.state import HeldGrad
from course_lib.train.config import TrainConfig
from course_lib.zero.lab import owned_bytes
from course_lib.zero.muon import Muon
from course_lib.zero.state import range_shard
from course_lib.zero.zero import ZeRO1

if TYPE_CHECKING:  # the frameworks are imported by the strategies that use them
    from course_lib.frameworks import Engine, MegatronEngine

State = dict[str, Any]  # what course_lib.checkpoint saves and loads
OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def optimizer_of(config: TrainConfig, params: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of a run for these parameters."""
    return OPTIMIZERS[config.optimizer](params, **settings_of(config))


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the optimizer's keyword arguments."""
    return {"lr": config.lr} | ({"momentum": config.momentum} if config.momentum else {})


class PartAdapter:
    """What the training loop uses after a step's backward passes: an optimizer of a model's part.

    As it is for whole copies over dp; subclasses say what ZeRO and FSDP have sharded, and
    `FrameworkAdapter` leaves all of it to a framework.
    """

    optimizer: Optimizer

    def __init__(self, part: ModelPart[Any], mesh: RankMesh, config: TrainConfig) -> None:
        self.part, self.mesh = part, mesh
        self.optimizer = self._optimizer(config)

    def _optimizer(self, config: TrainConfig) -> Optimizer:
        module = self.part.module
        if config.optimizer == "muon":
            params = dict(module.named_parameters())
            return Muon(params, self.mesh.group("dp"), **settings_of(config))
        return optimizer_of(config, module.parameters())

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Add to the gradients, which are means over dp, what other stages and tp ranks have."""
        late = self.part.wrapped.reduces_in_backward
        finish_over_axes(self.part.module, self.mesh, self._held(), sums_tied=late)

    def clip(self, max_norm: float) -> float | None:
        """Clip by the norm of the whole gradient, over all axes of the mesh; return that before."""
        return number_in(clip_grad_norm_across(self.part.module, self.mesh, max_norm))

    def grad_shards(self) -> dict[str, Shard]:
        """Return what this rank has of the gradients, by their names in the whole model."""
        found: dict[str, Shard] = {}
        for one in self._held():  # a parameter may be in several flat ones of ZeRO
            place = self.part.places[one.param]
            shard = place.to_whole(one.shard_of(one.grad))
            found.setdefault(place.names[0], Shard(shard.shape)).pieces += shard.pieces
        return found

    def step(self) -> None:
        """Update what this rank steps; afterwards every rank can compute with it."""
        self.optimizer.step()

    def state(self) -> State:
        """Return this rank's part of the model, and the optimizer."""
        return {"model": self.part, "optimizer": self.optimizer}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by kind."""
        return state_bytes(self.part.module.parameters(), self.optimizer)

    def weights(self) -> list[Tensor]:
        """Return all tensors in whose memory this rank has parameters, also for a while."""
        return list(self.part.module.parameters())

    def _held(self) -> list[HeldGrad]:
        return held_grads(self.part.module)


class ZeROAdapter(PartAdapter):
    """Adapter for a ZeRO engine of notebook 09_zero, which has its own optimizer."""

    def __init__(
        self, part: ModelPart[Any], mesh: RankMesh, config: TrainConfig, engine: ZeRO1
    ) -> None:
        self.engine = engine
        super().__init__(part, mesh, config)
        freed = {one for flat in engine.all_flat_params if flat.only_shard for one in flat.params}
        pieces = engine.shards() if freed else {}  # in the memory of the flat parameters' shards
        named = part.module.named_parameters()
        part.shard_of |= {
            param: partial(_in_engine, pieces[name]) for name, param in named if param in freed
        }

    def _optimizer(self, config: TrainConfig) -> Optimizer:
        return self.engine.optimizer

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the whole gradient: the squares of all shards are summed."""
        scaled = [grad for one in self.engine.flat_params for grad in one.all_grads()]
        module, held = self.part.module, self._held()
        norm = clip_grad_norm_across(module, self.mesh, max_norm, held, scaled=scaled)
        return number_in(norm)

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by kind."""
        return owned_bytes(self.engine)

    def weights(self) -> list[Tensor]:
        """Return the parameters, and the flat ones with this rank's shards of them."""
        flats = self.engine.all_flat_params
        whole = [param for param in super().weights() if param.numel()]  # not freed: no memory
        return [*whole, *(x for one in flats for x in (one.flat, one.shard))]

    def _held(self) -> list[HeldGrad]:
        return [
            HeldGrad(
                one.params[piece.index],
                grad,
                partial(range_shard, one.layout.shapes[piece.index], piece.start),
            )
            for one in self.engine.flat_params
            for piece, grad in one.grads()
        ]


def _in_engine(shard: Shard, _freed: Tensor) -> Shard:
    return shard


class FSDPAdapter(PartAdapter):
    """Adapter for the FSDP of notebook 10_fsdp, one for each model chunk of this rank."""

    def __init__(
        self, part: ModelPart[Any], mesh: RankMesh, config: TrainConfig, models: Sequence[FSDP]
    ) -> None:
        super().__init__(part, mesh, config)
        self.models = models
        part.shard_of |= {one.local: one.shard_of for fsdp in models for one in fsdp.param_shards()}

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the whole gradient: the squares of all shards are summed."""
        module, held = self.part.module, self._held()
        return number_in(clip_grad_norm_across(module, self.mesh, max_norm, held))

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes by kind; a unit's gathered parameters count while they are allocated."""
        return super().state_bytes() | {"params": storage_bytes(self.weights())}

    def weights(self) -> list[Tensor]:
        """Return the shards, and the memory in which units are gathered."""
        groups = (group for model in self.models for group in model.param_groups)
        return [*super().weights(), *(group.whole for group in groups)]

    def _held(self) -> list[HeldGrad]:
        shard_of = self.part.shard_of
        return [replace(one, shard_of=shard_of[one.param]) for one in held_grads(self.part.module)]


class TorchFSDPAdapter(PartAdapter):
    """Adapter for PyTorch's `fully_shard`, whose DTensors know their shards."""

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the whole gradient, which DTensors compute."""
        norm: Any = nn.utils.clip_grad_norm_(self.part.module.parameters(), max_norm)
        return float(norm.full_tensor())

    def grad_shards(self) -> dict[str, Shard]:
        """Return the shards of the gradients."""
        named = self.part.module.named_parameters()
        return {name: whole_shard(param.grad) for name, param in named if param.grad is not None}

    def state(self) -> State:
        """Return the model and the optimizer."""
        return {"model": self.part.module, "optimizer": self.optimizer}


class FrameworkAdapter(PartAdapter):
    """Adapter for a framework, which keeps its optimizer and its state to itself.

    earlier   storages that were alive before the model and do not belong to this run
    """

    def __init__(self, engine: "Engine | MegatronEngine", earlier: Set[StorageWeakRef]) -> None:
        self.engine, self.earlier = engine, earlier
        self.optimizer: Optimizer = engine.optimizer

    def zero_grad(self) -> None:
        """Do nothing: the framework resets the gradients after its step."""

    def finish(self) -> None:
        """Do nothing: the framework has done it."""

    def clip(self, max_norm: float) -> float | None:
        """Let the framework clip; None where its own step does it, and the norm is not known."""
        clip = getattr(self.engine, "clip", None)
        if clip is None:
            return None
        norm = clip(max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def grad_shards(self) -> dict[str, Shard]:
        """Return nothing: the settings allow no recording."""
        return {}

    def step(self) -> None:
        """Run the framework's own update."""
        self.engine.update()

    def state(self) -> State:
        """Return the engine, which saves and loads itself in its own format."""
        return {"engine": self.engine}

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
