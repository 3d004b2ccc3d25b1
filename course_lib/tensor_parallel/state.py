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
from course_lib.models.gpt import Attention
from course_lib.tensor_parallel.finish_watch import finishing
from course_lib.tensor_parallel.layers import ShardedLayer
from course_lib.tensor_parallel.regions import ShardAxis, gather_whole, own_shard


@torch.no_grad()
def finish_gradients(model: nn.Module) -> None:
    """Sum the gradients of which each rank has a part over the ranks, once a step after backward.

    `partial_params` says which these are. Where there are none, there is nothing to do.

    Cost:    one all_reduce of these gradients; those of shared heads as large as all heads'
    Raises:  CourseError for a model that is not split, and for a second call
    Source:  NVIDIA Megatron-LM, megatron/core/distributed/finalize_model_grads.py,
             _allreduce_layernorm_grads
    """
    group = next(iter(_sharded_layers(model).values())).group
    grads = [(p.grad, how) for p, how in partial_params(model).items() if p.grad is not None]
    if not grads:
        return
    with finishing(partial_params(model)):
        parts = [grad if how is None else _placed(grad, how, group) for grad, how in grads]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=group)
        totals = flat.split([part.numel() for part in parts])
        for (grad, how), part, total in zip(grads, parts, totals, strict=True):
            whole = total.view_as(part)
            grad.copy_(whole if how is None else own_shard(whole, how.dim, group, how.copies))


def partial_params(model: nn.Module) -> dict[nn.Parameter, ShardAxis | None]:
    """Return the parameters of whose gradients each rank has a part, and how they are split.

    The norm of each query and key has seen this rank's heads, and a head of keys or values that
    several ranks hold has seen the queries of one. With sequence parallelism norms, positions and
    the biases of row-parallel layers have seen only this rank's tokens, too.

    Raises:  CourseError for a model that is not split
    """
    layers = list(_sharded_layers(model).values())
    splits = {getattr(layer, name): how for layer in layers for name, how in layer.shards.items()}
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    per_head = {p for one in attentions for norm in (one.q_norm, one.k_norm)
                for p in norm.parameters()}  # fmt: skip
    found: dict[nn.Parameter, ShardAxis | None] = {}
    for param in model.parameters():
        how = splits.get(param)
        seen = layers[0].sequence_parallel or param in per_head
        if (seen and how is None) or (how is not None and how.copies > 1):
            found[param] = how
    return found


def _placed(shard: Tensor, how: ShardAxis, group: Group) -> Tensor:
    """Return the whole tensor with this rank's shard in its place, and zeros elsewhere."""
    found = _narrow_shard(group, how, shard)
    whole = shard.new_zeros(found.shape)
    for box, part in found.pieces:
        whole[box.slices()] = part
    return whole


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
    splits, wholes = _splits_of(_sharded_layers(model)), dict[int, Tensor]()
    for name, tensor in tensors.items():
        if id(tensor) not in wholes:
            whole = tensor
            if name in splits:
                group, how = splits[name]
                whole = gather_whole(tensor, how.dim, how.size, group, how.copies)
            wholes[id(tensor)] = whole.detach().clone(memory_format=torch.contiguous_format)
    return {name: wholes[id(tensor)] for name, tensor in tensors.items()}


@torch.no_grad()
def shard_tensors(model: nn.Module, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards of whole tensors, by name: the inverse of `gather_tensors`.

    Raises:  CourseError for a model that is not split; ShapeError for another model's tensors
    """
    splits, shards = _splits_of(_sharded_layers(model)), {}
    for name, whole in wholes.items():
        if name not in splits:
            shards[name] = whole
            continue
        group, (dim, size, copies) = splits[name]
        if whole.dim() <= dim or whole.shape[dim] != size:
            raise ShapeError(
                f"rank {dist.get_rank()}, shard_tensors: need {name} with {size} in dim {dim}; got "
                f"{list(whole.shape)}. Try the state of a model with the same spec."
            )
        shards[name] = own_shard(whole, dim, group, copies)
    return shards


def shards_of_split(model: nn.Module) -> dict[str, Callable[[Tensor], Shard]]:
    """Return by name of each split parameter: the shard that a tensor laid out like it is.

    None for a model that is not split. The padding of uneven sizes is no part of the whole tensor.
    """
    return {
        name: partial(_narrow_shard, group, how)
        for name, (group, how) in _splits_of(_find_sharded_layers(model)).items()
    }


def counted_once(model: nn.Module, rank: int) -> set[str]:
    """Return the names of split parameters whose shard is counted on this rank of the group.

    Of the ranks that hold the same heads of keys and values, the first one counts them.
    """
    splits = _splits_of(_find_sharded_layers(model))
    return {name for name, (_, how) in splits.items() if rank % how.copies == 0}


def _narrow_shard(group: Group, how: ShardAxis, tensor: Tensor) -> Shard:
    dim, size, copies = how
    shape = [*tensor.shape]
    shape[dim] = size
    start = dist.get_rank(group) // copies * tensor.shape[dim]
    numbers = min(tensor.shape[dim], size - start)
    if numbers <= 0:
        return Shard(tuple(shape))
    part = tensor.detach().narrow(dim, 0, numbers)
    offsets = tuple(start if number == dim else 0 for number in range(tensor.dim()))
    return Shard(tuple(shape), [(Box(offsets, tuple(part.shape)), part)])


def _splits_of(layers: Mapping[str, ShardedLayer]) -> dict[str, tuple[Group, ShardAxis]]:
    """Return by name of each split parameter: its group, and how it is split."""
    return {
        f"{path}.{name}".lstrip("."): (layer.group, how)
        for path, layer in layers.items()
        for name, how in layer.shards.items()
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
