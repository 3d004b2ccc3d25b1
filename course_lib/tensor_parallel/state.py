"""State of a split model: finish its gradients, gather its shards to save them, shard to load.

Shards are gathered by parameter name, so weights, gradients and optimizer state are treated alike;
the whole tensors fit a model that is split otherwise, or not at all. Notebook 07_tensor_parallel.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.shards import Box, Shard
from course_lib.tensor_parallel.finish_watch import finishing
from course_lib.tensor_parallel.layers import ShardedLayer
from course_lib.tensor_parallel.regions import gather_whole, own_shard


@torch.no_grad()
def finish_gradients(model: nn.Module) -> None:
    """Sum the gradients of replicated parameters over the ranks, once a step after backward.

    With sequence parallelism a norm, a position or the bias of a row-parallel layer has seen only
    this rank's tokens, so its gradient is a partial sum. Without it there is nothing to do.

    Cost:    sequence parallel: one all_reduce of these gradients
    Raises:  CourseError for a model that is not split, and for a second call
    Source:  NVIDIA Megatron-LM, megatron/core/distributed/finalize_model_grads.py,
             _allreduce_layernorm_grads
    """
    layers = list(_sharded_layers(model).values())
    if not layers[0].sequence_parallel:
        return
    split = {id(getattr(layer, name)) for layer in layers for name in layer.shards}
    params = [param for param in model.parameters() if id(param) not in split]
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return
    with finishing(params):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=layers[0].group)
        sizes = [grad.numel() for grad in grads]
        for grad, total in zip(grads, flat.split(sizes), strict=True):
            grad.copy_(total.view_as(grad))


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the unsplit model, on every rank; any GPT of the spec can load it.

    Cost:    one all_gather per split parameter; a tied one is gathered once and stays tied
    Raises:  CourseError for a model that is not split
    """
    return gather_tensors(model, model.state_dict(keep_vars=True))


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load this rank's shards of an unsplit model's state dict; no communication.

    Raises:  CourseError for a model that is not split; ShapeError for another model's tensors
    """
    model.load_state_dict(shard_tensors(model, state))


@torch.no_grad()
def gather_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather whole tensors from the ranks' shards: weights, gradients or moments, by name.

    All ranks need the same names in the same order. One tensor under two names is gathered once.

    Cost:    one all_gather per split tensor
    Raises:  CourseError for a model that is not split
    """
    sharded_dims, wholes = _sharded_dims(model), dict[int, Tensor]()
    for name, tensor in tensors.items():
        if id(tensor) not in wholes:
            group, dim, size = sharded_dims.get(name, (None, None, 0))
            whole = tensor if dim is None else gather_whole(tensor, dim, size, group)
            wholes[id(tensor)] = whole.detach().clone(memory_format=torch.contiguous_format)
    return {name: wholes[id(tensor)] for name, tensor in tensors.items()}


@torch.no_grad()
def shard_tensors(model: nn.Module, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards of whole tensors, by name: the inverse of `gather_tensors`.

    Raises:  CourseError for a model that is not split; ShapeError for another model's tensors
    """
    sharded_dims, shards = _sharded_dims(model), {}
    for name, whole in wholes.items():
        if name not in sharded_dims:
            shards[name] = whole
            continue
        group, dim, size = sharded_dims[name]
        if whole.dim() <= dim or whole.shape[dim] != size:
            raise ShapeError(
                f"rank {dist.get_rank()}, shard_tensors: need {name} with {size} in dim {dim}; got "
                f"{list(whole.shape)}. Try the state of a model with the same spec."
            )
        shards[name] = own_shard(whole, dim, group)
    return shards


def shards_of_split(model: nn.Module) -> dict[str, Callable[[Tensor], Shard]]:
    """Return by name of each split parameter: the shard that a tensor laid out like it is.

    None for a model that is not split. The padding of uneven sizes is no part of the whole tensor.
    """
    return {
        name: partial(_narrow_shard, group, dim, size)
        for name, (group, dim, size) in _dims_of(_find_sharded_layers(model)).items()
    }


def _narrow_shard(group: Group, dim: int, size: int, tensor: Tensor) -> Shard:
    shape = [*tensor.shape]
    shape[dim] = size
    start = dist.get_rank(group) * tensor.shape[dim]
    numbers = min(tensor.shape[dim], size - start)
    if numbers <= 0:
        return Shard(tuple(shape))
    part = tensor.detach().narrow(dim, 0, numbers)
    offsets = tuple(start if number == dim else 0 for number in range(tensor.dim()))
    return Shard(tuple(shape), [(Box(offsets, tuple(part.shape)), part)])


def _sharded_dims(model: nn.Module) -> dict[str, tuple[Group, int, int]]:
    """Return by name of each split parameter: its group, the dim that is split, its whole size."""
    return _dims_of(_sharded_layers(model))


def _dims_of(layers: Mapping[str, ShardedLayer]) -> dict[str, tuple[Group, int, int]]:
    return {
        f"{path}.{name}".lstrip("."): (layer.group, dim, size)
        for path, layer in layers.items()
        for name, (dim, size) in layer.shards.items()
    }


def _find_sharded_layers(model: nn.Module) -> dict[str, ShardedLayer]:
    named = model.named_modules()
    return {path: module for path, module in named if isinstance(module, ShardedLayer)}


def _sharded_layers(model: nn.Module) -> dict[str, ShardedLayer]:
    found = _find_sharded_layers(model)
    if not found:
        raise CourseError(
            f"rank {dist.get_rank()}: need a model that is split over ranks; got a "
            f"{type(model).__name__} without a split layer. Try parallelize(model, mesh) first."
        )
    return found
