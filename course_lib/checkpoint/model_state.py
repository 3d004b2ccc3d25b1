"""Names and shards of a model: the parameters and buffers that this rank has of it.

The names are those of the plain module's state_dict, whatever wraps or splits it. Notebook
14_checkpoint.
"""

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from course_lib.core.shards import Box, InWhole, ParamShard, Shard, same_shard
from course_lib.data_parallel.naive_ddp import NaiveDDP
from course_lib.ddp.ddp import DDP
from course_lib.tensor_parallel.state import shards_of_split


def is_model(leaf: Any) -> bool:
    """Return whether a leaf is a module, or something that says which shards it has."""
    if isinstance(leaf, Optimizer | Shard):
        return False
    return isinstance(leaf, nn.Module) or _says(leaf, "shards") or _says(leaf, "param_shards")


def _says(model: Any, method: str) -> bool:
    return callable(getattr(model, method, None))


def whole_shard(tensor: Tensor) -> Shard:
    """Return a tensor that every rank has whole as a shard; of a DTensor, this rank's part."""
    tensor = tensor.detach()
    dtensors = sys.modules.get("torch.distributed.tensor")  # not loaded: there is no DTensor
    if dtensors is None or not isinstance(tensor, dtensors.DTensor):
        return Shard.of(tensor)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    part = tensor.to_local()
    shape = tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    return Shard(shape, [(Box(tuple(offsets), tuple(sizes)), part)] if part.numel() else [])


def param_shards(model: Any) -> list[ParamShard]:
    """Return every parameter of a model as this rank has it."""
    model = unwrapped(model)
    if hasattr(model, "places"):  # it knows more than its module
        return list(model.param_shards())
    if _says(model, "param_shards"):  # shards of what tensor parallelism may have left
        split = shards_of_split(model.module)
        return [
            one.at(InWhole(one.names, split.get(one.names[0], same_shard)))
            for one in model.param_shards()
        ]
    params = dict(model.named_parameters(remove_duplicate=False))
    return [
        ParamShard((), params[place.names[0]], whole_shard).at(place)
        for place in places_of(model).values()
        if place.names[0] in params
    ]


def places_of(model: Any) -> dict[int, InWhole]:
    """Return by the id of each parameter of a model: where it stands in the whole one."""
    if hasattr(model, "places"):
        return {id(param): place for param, place in model.places.items()}
    plain = model if isinstance(model, nn.Module) else model.module  # of a ZeRO engine
    split = shards_of_split(plain)
    return {
        number: InWhole(names, split.get(names[0], same_shard))
        for number, names in names_by_id(plain).items()
    }


def model_shards(model: Any) -> dict[str, Shard]:
    """Return this rank's shards of all that a model's state_dict has: parameters and buffers."""
    model = unwrapped(model)
    if hasattr(model, "places"):
        return dict(model.shards())
    if _says(model, "shards"):
        split = shards_of_split(model.module) if hasattr(model, "module") else {}
        return {name: split.get(name, same_shard)(one) for name, one in model.shards().items()}
    found = dict[str, Shard]()
    for one in param_shards(model):
        found |= dict.fromkeys(one.names, one.shard_of(one.local))
    plain = model.module if _says(model, "param_shards") else model
    for name, tensor in plain.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and name not in found:
            found[name] = whole_shard(tensor)
    return found


def unwrapped(model: Any) -> Any:
    """Return the module in a wrapper that copies it to all ranks."""
    while isinstance(model, NaiveDDP | DDP | DistributedDataParallel):
        model = model.module
    return model


def names_by_id(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the names of each tensor of a state_dict; a tied one has several."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names
