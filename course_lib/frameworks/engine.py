"""What all frameworks have in common: a model to call, a step to make, weights to compare.

Notebooks 09_zero and 10_fsdp.
"""

import gc
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.core.errors import CourseError, MeshError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
VERSIONS = {"deepspeed": "0.19.8", "accelerate": "1.15.0", "transformers": "5.23.0"}
EXTRAS = {"deepspeed": "deepspeed", "accelerate": "accelerate", "transformers": "accelerate"}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model in the hands of a framework, on every rank of the world.

    loss = loss_of(engine.model(inputs)); engine.step(loss)

    model      to be called; its loss is the mean over this rank's part of the batch
    backward   the framework's own, with all that it sends
    update     the optimizer's step, then no gradients
    weights    the whole weights under the names of the plain model; every rank has to call it
    """

    name: str
    model: nn.Module
    backward: Callable[[Tensor], Any]
    update: Callable[[], Any]
    weights: Callable[[], dict[str, Tensor]]

    def step(self, loss: Tensor) -> float:
        """Backward and update; return the loss."""
        self.backward(loss)
        self.update()
        return loss.item()


def missing(package: str) -> str | None:
    """How to install a package that is not here, in one sentence; None where it is."""
    if find_spec(package):
        return None
    return (
        f"need {package} {VERSIONS[package]}; it is not installed here. "
        f"Try pip install -e '.[{EXTRAS[package]}]' in the course's folder."
    )


def in_world(where: str) -> None:
    """Raises: MeshError unless this process is one of the ranks of a world."""
    if not dist.is_initialized():
        raise MeshError(
            f"{where}: need ranks that form a world; there is none in this process. "
            "Try it inside ranks.run(fn), or a script started with launch(fn)."
        )


def needed(package: str, where: str) -> ModuleType:
    """The package, imported now and not before: most lessons go without it.

    Raises: CourseError where it is not installed
    """
    if sentence := missing(package):
        raise CourseError(f"{where}: {sentence}")
    return importlib.import_module(package)


def must_be(where: str, what: str, wanted: object, got: object) -> None:
    """What is compared has to be what runs: frameworks fall back on less without a word.

    Raises: CourseError where it is not
    """
    if got != wanted:
        raise CourseError(
            f"{where}: need {what} = {wanted}; got {got}. What runs is not what was asked for."
        )


def alive_bytes() -> int:
    """Bytes of all tensors that this process holds, each storage once, gradients too.

    Buffers inside C++ (messages under way, what autograd saved) have no Python object: not counted.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would wake objects that warn
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                storages |= _storages(tensor)
    return sum(storages.values())


def _storages(tensor: Tensor | None) -> dict[int, int]:
    """Address and bytes of a tensor's storage; of a sharded one, of the part that is here."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local is None or local.layout != torch.strided or local.is_meta:
        return {}
    storage = local.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
