"""What all frameworks have in common: a model to call, a step to make, weights to compare.

Notebooks 09_zero and 10_fsdp.
"""

import gc
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.core.errors import CourseError

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


def needed(package: str, where: str) -> ModuleType:
    """The package, imported now and not before: most lessons go without it.

    Raises: CourseError where it is not installed
    """
    try:
        return importlib.import_module(package)
    except ImportError as problem:
        raise CourseError(
            f"{where}: need {package} {VERSIONS[package]}; it is not installed here. "
            f"Try pip install -e '.[{EXTRAS[package]}]' in the course's folder."
        ) from problem


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
