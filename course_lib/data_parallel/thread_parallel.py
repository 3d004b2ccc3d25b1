"""The predecessor of DDP: one process with a thread per replica, as in nn.DataParallel.

Every step clones the parameters for each replica, gives each replica a part of the batch, and
gathers the outputs. Autograd sums the replicas' gradients, because a clone is a differentiable
operation. Notebook 05_data_parallel.
"""

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.core.errors import CourseError, ShapeError


class DataParallel(nn.Module):
    """One process with a thread per replica: split the batch, copy the model, gather the outputs.

    Every forward pass clones the parameters (so that autograd sums the replicas' gradients) and
    gives each clone a part of the batch, split by torch.tensor_split; empty parts are dropped. Only
    replica 0's changes to buffers persist. Outputs are concatenated along dim 0, so a loss on them
    is the loss of the whole batch. Tensors in args and kwargs are split, everything else is shared.
    The replicas draw from one random number generator, in the order in which the threads run.

    Cost:    num_replicas copies of the parameters a step; one interpreter runs all threads, and on
             a CPU one thread runs the whole backward pass
    Raises:  CourseError for num_replicas < 1; ShapeError for tensors of different lengths
    Source:  PyTorch, torch/nn/parallel/data_parallel.py, DataParallel
    """

    def __init__(self, module: nn.Module, num_replicas: int) -> None:
        super().__init__()
        if num_replicas < 1:
            raise CourseError(f"DataParallel: need 1 replica or more; got {num_replicas}. Try 2.")
        self.module, self.num_replicas = module, num_replicas

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for the whole batch."""
        parts = split_batch((args, kwargs), self.num_replicas)
        replicas = [replica_of(self.module, is_first=not number) for number in range(len(parts))]
        settings = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu")

        def apply(replica: nn.Module, part: Any) -> Any:
            with torch.set_grad_enabled(settings[0]), torch.autocast("cpu", dtype, settings[1]):
                return replica(*part[0], **part[1])

        with ThreadPoolExecutor(len(parts)) as threads:
            return gather_outputs(list(threads.map(apply, replicas, parts)))


def replica_of(module: nn.Module, *, is_first: bool) -> nn.Module:
    """Return a copy with cloned parameters (in autograd's graph); the first shares the buffers."""
    known: dict[int, Any] = {id(param): param.clone() for param in module.parameters()}
    known |= {id(x): x if is_first else x.clone() for x in module.buffers()}
    return copy.deepcopy(module, known)  # deepcopy takes what is known instead of copying it


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """Split every tensor in nested containers along dim 0; empty parts are dropped.

    Shapes:  [n, ...] -> num_parts times [n / num_parts, ...], or n times [1, ...] if n is less
    """
    lengths = sorted({len(x) for x in _tensors(batch) if x.dim()})
    if len(lengths) > 1:
        raise ShapeError(
            "DataParallel: need tensors of one length along dim 0; got "
            f"{' and '.join(map(str, lengths))}. Try to give constants to the module itself."
        )
    count = max(1, min(num_parts, *lengths)) if lengths else 1
    return [_part(batch, number, count) for number in range(count)]


def gather_outputs(outputs: list[Any]) -> Any:
    """Concatenate outputs along dim 0, also inside tuples, lists and dicts; stack scalars."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, Mapping):
        return type(first)((key, gather_outputs([out[key] for out in outputs])) for key in first)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        joined = [gather_outputs(list(parts)) for parts in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, tuple | list | Mapping):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _part(batch: Any, number: int, count: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.tensor_split(count)[number] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {name: _part(part, number, count) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_part(part, number, count) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
