"""State of a split model: finish its gradients, gather its shards to save them, shard to load.

Shards are gathered by parameter name, so weights, gradients and optimizer state are treated alike;
the whole tensors fit a model that is split otherwise, or not at all. Notebook 07_tensor_parallel.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.shards import Shard
from course_lib.models.gpt import Attention
from course_lib.models.moe import MoE
from course_lib.tensor_parallel.finish_watch import finishing
from course_lib.tensor_parallel.layers import ShardedLayer
from course_lib.tensor_parallel.regions import ShardAxis, gather_whole, own_shard


@dataclass(frozen=True, eq=False)
class HeldGrad:
    """A gradient as this rank holds it: of a parameter, or of a shard that ZeRO or FSDP has left.

    shard_of   the shard of the parameter that a tensor laid out like `grad` is
    """

    param: nn.Parameter
    grad: Tensor
    shard_of: Callable[[Tensor], Shard] = Shard.of


@torch.no_grad()
def finish_gradients(model: nn.Module, held: Iterable[HeldGrad] | None = None) -> None:
    """Sum the gradients of which each rank has a part over the ranks, once a step after backward.

    `partial_params` says which these are. Where there are none, there is nothing to do.

    held    the gradients where they are sharded, the same ones on all ranks of the group; None:
            those of the parameters

    Cost:    one all_reduce of these gradients; those of shared heads as large as all heads'
    Raises:  CourseError for a model that is not split, and for a second call
    Source:  NVIDIA Megatron-LM, megatron/core/distributed/finalize_model_grads.py,
             _allreduce_layernorm_grads
    """
    group = next(iter(_sharded_layers(model).values())).group
    wanted = partial_params(model)
    if held is None:
        held = [HeldGrad(param, param.grad) for param in wanted if param.grad is not None]
    shards = [_in_whole(group, wanted[one.param], one) for one in held if one.param in wanted]
    found = [shard for shard in shards if shard.pieces]  # a rank may own no row of a parameter
    if not found:
        return
    with finishing(wanted):
        wholes = [_placed(shard) for shard in found]
        flat = torch.cat([whole.reshape(-1) for whole in wholes])
        dist.all_reduce(flat, group=group)
        totals = flat.split([whole.numel() for whole in wholes])
        for shard, whole, total in zip(found, wholes, totals, strict=True):
            for box, part in shard.pieces:
                part.copy_(total.view_as(whole)[box.slices()])


def partial_params(model: nn.Module) -> dict[nn.Parameter, ShardAxis | None]:
    """Return the parameters of whose gradients each rank has a part, and how they are split.

    The norm of each query and key has seen this rank's heads, and a head of keys or values that
    several ranks hold has seen the queries of one. With sequence parallelism norms, positions and
    the biases of row-parallel layers have seen only this rank's tokens, too; but in a layer of
    experts every rank has routed all of them.

    Raises:  CourseError for a model that is not split
    """
    layers = list(_sharded_layers(model).values())
    splits = {getattr(layer, name): how for layer in layers for name, how in layer.shards.items()}
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    per_head = {p for one in attentions for norm in (one.q_norm, one.k_norm)
                for p in norm.parameters()}  # fmt: skip
    routed = {p for one in model.modules() if isinstance(one, MoE) for p in one.parameters()}
    found: dict[nn.Parameter, ShardAxis | None] = {}
    for param in model.parameters():
        how = splits.get(param)
        seen = (layers[0].sequence_parallel and param not in routed) or param in per_head
        if (seen and how is None) or (how is not None and how.copies > 1):
            found[param] = how
    return found


def _in_whole(group: Group, how: ShardAxis | None, one: HeldGrad) -> Shard:
    """Return a gradient as a shard: of itself where tp replicates, else of the whole one."""
    if how is None:
        return Shard.of(one.grad)
    return _narrow_shard(group, how, one.shard_of(one.grad))


def _placed(shard: Shard) -> Tensor:
    """Return the whole tensor with this rank's shard in its place, and zeros elsewhere."""
    whole: Tensor = shard.pieces[0][1].new_zeros(shard.shape)
    for box, part in shard.pieces:
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


def shards_of_split(model: nn.Module) -> dict[str, Callable[[Tensor | Shard], Shard]]:
    """Return by name of each split parameter: the shard that a tensor laid out like it is.

    So is a shard of that tensor, as FSDP over a split model leaves it.
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


def _narrow_shard(group: Group, how: ShardAxis, part: Tensor | Shard) -> Shard:
    local = Shard.of(part) if isinstance(part, Tensor) else part
    start = dist.get_rank(group) // how.copies * local.shape[how.dim]
    return local.narrowed(how.dim, start, how.size)


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
