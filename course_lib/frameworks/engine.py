"""`Engine`, the interface to all frameworks: a model to call, a step, weights to compare.

Notebooks 09_zero and 10_fsdp.
"""

import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
VERSIONS = {"deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.23.0"}
EXTRAS = {"deepspeed": "deepspeed", "accelerate": "accelerate", "transformers": "accelerate"}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model under a framework, on every rank of the world.

    loss = loss_of(engine.model(inputs)); engine.step(loss)

    model      to be called; its loss is the mean over this rank's part of the batch
    backward   the framework's own backward pass, with its communication
    update     the optimizer step, then clearing of the gradients
    weights    returns the whole weights under the plain model's names; every rank has to call it
    """

    name: str
    model: nn.Module
    backward: Callable[[Tensor], Any]
    update: Callable[[], Any]
    weights: Callable[[], dict[str, Tensor]]

    def step(self, loss: Tensor) -> float:
        """Run backward and update; return the loss."""
        self.backward(loss)
        self.update()
        return loss.item()


def missing(package: str) -> str | None:
    """Return how to install a missing package, in one sentence; None where it is installed."""
    if find_spec(package):
        return None
    what = "." if sys.platform == "linux" else f"'.[{EXTRAS[package]}]'"
    return (
        f"need {package} {VERSIONS[package]}; it is not installed here. "
        f"Try pip install -e {what} in the course's folder."
    )


def in_world(where: str) -> None:
    """Check that this process is a rank of a world.

    Raises: MeshError where it is not
    """
    if not dist.is_initialized():
        raise MeshError(
            f"{where}: need ranks that form a world; there is none in this process. "
            "Try it inside ranks.run(fn), or a script started with launch(fn)."
        )


def needed(package: str, where: str) -> ModuleType:
    """Import a package now and not before, because most lessons do without it.

    Raises: CourseError where it is not installed
    """
    if sentence := missing(package):
        raise CourseError(f"{where}: {sentence}")
    return importlib.import_module(package)


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
