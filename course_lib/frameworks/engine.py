"""`Engine`, the interface to all frameworks: a model to call, a step, weights to compare.

Notebooks 09_zero and 10_fsdp.
"""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from course_lib.core.errors import CourseError, MeshError
from course_lib.models.storages import storage_bytes

LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")  # in the environment of a rank
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class _Package:
    """The package of a module; `on_linux`: installed with the course there, elsewhere an extra."""

    name: str
    version: str
    extra: str
    on_linux: bool = False


PACKAGES = {  # by the module that is imported
    "deepspeed": _Package("deepspeed", "0.19.8", "deepspeed", on_linux=True),
    "accelerate": _Package("accelerate", "1.15.0", "accelerate", on_linux=True),
    "transformers": _Package("transformers", "5.23.0", "accelerate", on_linux=True),
    "lightning_fabric": _Package("lightning-fabric", "2.6.6", "lightning"),
    "megatron.core": _Package("megatron-core", "0.16.1", "megatron"),
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model under a framework, on every rank of the world.

    loss = loss_of(engine.model(inputs)); engine.step(loss)

    model      to be called; its loss is the mean over this rank's part of the batch
    backward   the framework's own backward pass, with its communication
    update     the optimizer step, then clearing of the gradients
    weights    returns the whole weights under the plain model's names; every rank has to call it
    optimizer  whose `param_groups` have the learning rate
    clip       scales the whole gradient before `update`, returns its norm; None: `update` does it
    save, load everything to or from a folder, in the framework's own format; every rank calls them
    """

    name: str
    model: nn.Module
    backward: Callable[[Tensor], Any]
    update: Callable[[], Any]
    weights: Callable[[], dict[str, Tensor]]
    optimizer: Any = None
    clip: Callable[[float], Any] | None = None
    save: Callable[[str], Any] | None = None
    load: Callable[[str], Any] | None = None

    def step(self, loss: Tensor) -> float:
        """Run backward and update; return the loss."""
        self.backward(loss)
        self.update()
        return loss.item()


def stepping(optimizer: Optimizer) -> Callable[[], None]:
    """Return the update of an engine: the optimizer step, then clearing of the gradients."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def copied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights of a model that is whole on every rank."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def missing(module: str) -> str | None:
    """Return how to install a missing framework, in one sentence; None where it is installed."""
    top, _, inside = module.partition(".")
    # any folder of that name would be found as a namespace package, but has no distribution
    if find_spec(top) and not (inside and _installed(module) is None):
        return None
    package = PACKAGES[module]
    return (
        f"need {package.name} {package.version}; it is not installed here. "
        f"Try {_install(package)} in the course's folder."
    )


def same_minor(module: str, where: str) -> None:
    """Check that the installed version differs from the course's in its last number only.

    The engine uses what Megatron-Core does not promise to keep from one version to the next.

    Raises: CourseError where it does not
    """
    package, found = PACKAGES[module], _installed(module)
    if found is None or found.split(".")[:2] != package.version.split(".")[:2]:
        raise CourseError(
            f"{where}: need {package.name} {package.version}, for which the engine is written; "
            f"got {found}. Try {_install(package)} in the course's folder."
        )


def _installed(module: str) -> str | None:
    try:
        return version(PACKAGES[module].name)
    except PackageNotFoundError:
        return None


def _install(package: _Package) -> str:
    what = "." if package.on_linux and sys.platform == "linux" else f"'.[{package.extra}]'"
    return f"pip install -e {what}"


def in_world(where: str) -> None:
    """Check that this process is a rank of a world, and knows its local rank.

    Raises: MeshError where it is not, or does not
    """
    if not dist.is_initialized():
        raise MeshError(
            f"{where}: need ranks that form a world; there is none in this process. "
            "Try it inside ranks.run(fn), or a script started with launch(fn)."
        )
    if unset := [name for name in LOCAL if name not in os.environ]:
        raise MeshError(
            f"{where}: need ranks that know their place on their node; {' and '.join(unset)} "
            f"{'are' if len(unset) > 1 else 'is'} not set. Try torchrun, or launch(fn)."
        )


def needed(module: str, where: str) -> ModuleType:
    """Import a framework now and not before, because most lessons do without it.

    Raises: CourseError where it is not installed
    """
    if sentence := missing(module):
        raise CourseError(f"{where}: {sentence}")
    return importlib.import_module(module)


def must_be(where: str, what: str, wanted: object, got: object) -> None:
    """Check that what runs is what was asked for: frameworks silently fall back on less.

    Raises: CourseError where it is not
    """
    if got != wanted:
        raise CourseError(
            f"{where}: need {what} = {wanted}; got {got}. What runs is not what was asked for."
        )


def alive_bytes(besides: Iterable[StorageWeakRef] = ()) -> int:
    """Return the bytes of all tensors that this process holds, each storage once, gradients too.

    besides   storages that do not count, such as those that `alive_storages` found earlier

    Buffers inside C++ (messages under way, what autograd saved) have no Python object: not counted.
    """
    return storage_bytes(_alive_tensors(), {storage.cdata for storage in besides})


def alive_storages() -> set[StorageWeakRef]:
    """Return a weak reference to the storage of every tensor that this process holds.

    The references keep no bytes alive. A difference of two `alive_bytes` is wrong once an earlier
    tensor is freed in between; `alive_bytes(besides=alive_storages())` stays right.
    """
    return {
        StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        for tensor in _alive_tensors()
    }


def _alive_tensors() -> Iterator[Tensor]:
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would wake objects that warn
            yield from filter(_has_memory, (thing, thing.grad if thing.is_leaf else None))


def _has_memory(tensor: Tensor | None) -> bool:
    """Return whether a tensor, or the local shard of a sharded one, has a storage with bytes."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local is not None and local.layout == torch.strided and not local.is_meta
