"""Save and load the state of an FSDP model: sharded (this rank's part) or full (as one process).

Saving shards needs no communication, and they fit a group of the same size only. The full state is
that of the plain module, so it fits a group of any size, and a single process. Notebook 10_fsdp.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.core.errors import CourseError
from course_lib.data_parallel.gradients import some_names
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.zero.flat_layout import FlatLayout
from course_lib.zero.state import COUNTERS, cut_into_shard

StateDict = dict[str, Any]


def gather_whole(param_group: FSDPParamGroup, shard: Tensor) -> list[Tensor]:
    """Return the whole tensors of a parameter group from all ranks' shards.

    Shapes:  [padded_numel / p] -> those of the parameters
    Cost:    one all_gather
    """
    flat = shard.new_empty(param_group.layout.padded_numel)
    dist.all_gather_single(flat, shard.detach(), group=param_group.member.group)
    return [view.clone() for view in param_group.layout.views(flat)]


@torch.no_grad()
def full_state(module: nn.Module, param_groups: Sequence[FSDPParamGroup], keep: bool) -> StateDict:
    """Return the plain module's state_dict; without `keep` this rank only takes part."""
    tensors: StateDict = {}
    for param_group in param_groups:
        for names, tensor in zip(
            param_group.names, gather_whole(param_group, param_group.shard), strict=True
        ):
            tensors |= dict.fromkeys(names, tensor) if keep else {}
    state = module.state_dict()
    return {name: tensors.get(name, value) for name, value in state.items()} if keep else {}


@torch.no_grad()
def load_full(
    module: nn.Module, param_groups: Sequence[FSDPParamGroup], state: Mapping[str, Any]
) -> None:
    """Load this rank's shards, and the buffers, from a plain module's state_dict."""
    ours, theirs = set(module.state_dict()), set(state)
    if ours != theirs:
        raise CourseError(
            f"FSDP.load_full_state_dict: need the names of the model; got "
            f"{some_names(sorted(theirs - ours))} too many and "
            f"{some_names(sorted(ours - theirs))} too few. Try the state_dict of the same model."
        )
    for param_group in param_groups:
        tensors = [state[names[0]] for names in param_group.names]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes != param_group.layout.shapes:
            raise CourseError(
                f"FSDP.load_full_state_dict: need the shapes {param_group.layout.shapes} for "
                f"{param_group.name}; got {shapes}. Try a model of the same sizes."
            )
        cut_into_shard(param_group.layout, param_group.member.rank, tensors, param_group.shard)
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])


def sharded_state(module: nn.Module, param_groups: Sequence[FSDPParamGroup]) -> StateDict:
    """Return this rank's shards, with what `merge_shards` needs to join them, and the buffers."""
    params = {name for param_group in param_groups for names in param_group.names for name in names}
    state = module.state_dict()
    return {
        "rank": param_groups[0].member.rank if param_groups else 0,
        "group_size": param_groups[0].member.size if param_groups else 1,
        "param_groups": {
            param_group.name: {
                "names": param_group.names,
                "shapes": param_group.layout.shapes,
                "shard": param_group.shard.detach().clone(),
            }
            for param_group in param_groups
        },
        "buffers": {name: value for name, value in state.items() if name not in params},
    }


@torch.no_grad()
def load_sharded(
    module: nn.Module, param_groups: Sequence[FSDPParamGroup], state: Mapping[str, Any]
) -> None:
    """Load `sharded_state` of the same rank of an equally large group."""
    ours = sharded_state(module, param_groups)
    same = all(ours[key] == state[key] for key in ("rank", "group_size"))
    if not same or _layouts(ours) != _layouts(state):
        raise CourseError(
            f"FSDP.load_state_dict: need the shards of rank {ours['rank']} of "
            f"{ours['group_size']}, for the same units; got rank {state['rank']} of "
            f"{state['group_size']}. Try load_full_state_dict(merge_shards(states))."
        )
    for param_group in param_groups:
        param_group.shard.copy_(state["param_groups"][param_group.name]["shard"])
    for name, buffer in module.named_buffers():
        if name in state["buffers"]:
            buffer.copy_(state["buffers"][name])


def merge_shards(states: Sequence[StateDict]) -> StateDict:
    """Return the plain module's state_dict from the `state_dict()` of every rank, in any order.

    Raises:  CourseError unless there is one of every rank of the group
    """
    by_rank = {state["rank"]: state for state in states}
    size = states[0]["group_size"] if states else 0
    if not states or len(states) != size or set(by_rank) != set(range(size)):
        raise CourseError(
            f"merge_shards: need the shards of all {size or 'the'} ranks; got {sorted(by_rank)}. "
            "Try one state_dict() from every rank."
        )
    merged: StateDict = dict(by_rank[0]["buffers"])
    for name, param_group in by_rank[0]["param_groups"].items():
        layout = FlatLayout(param_group["shapes"], size)
        flat = torch.cat([by_rank[rank]["param_groups"][name]["shard"] for rank in range(size)])
        for names, tensor in zip(param_group["names"], layout.views(flat), strict=True):
            merged |= dict.fromkeys(names, tensor)
    return merged


@torch.no_grad()
def full_optim_state(
    param_groups: Sequence[FSDPParamGroup], optimizer: Optimizer
) -> dict[str, StateDict]:
    """Return the optimizer state of whole parameters by name, from an optimizer of the shards.

    Cost:    an all_gather per parameter group and sharded tensor of its state
    """
    found: dict[str, StateDict] = {}
    for param_group in param_groups:
        kept = optimizer.state.get(param_group.shard, {})
        for key, value in kept.items():
            sharded = isinstance(value, Tensor) and value.shape == param_group.shard.shape
            count = len(param_group.names)
            values = gather_whole(param_group, value) if sharded else [value] * count
            for names, one in zip(param_group.names, values, strict=True):
                found.setdefault(names[0], {})[key] = one
    return found


@torch.no_grad()
def load_full_optim(
    param_groups: Sequence[FSDPParamGroup],
    optimizer: Optimizer,
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load `full_optim_state` into an optimizer of the shards, at any size of the group."""
    for param_group in param_groups:
        kept = [state.get(names[0], {}) for names in param_group.names]
        for key, value in kept[0].items():
            if key in COUNTERS or not isinstance(value, Tensor):
                optimizer.state[param_group.shard][key] = deepcopy(value)
                continue
            shard = torch.zeros_like(param_group.shard, dtype=value.dtype)
            whole = [one[key] for one in kept]
            cut_into_shard(param_group.layout, param_group.member.rank, whole, shard)
            optimizer.state[param_group.shard][key] = shard


def _layouts(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (param_group["names"], param_group["shapes"])
        for name, param_group in state["param_groups"].items()
    }
