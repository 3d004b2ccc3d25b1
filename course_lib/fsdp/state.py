"""Saving what FSDP has dealt out: every rank its shards, or all ranks together the whole.

Shards are saved without a word between the ranks, and fit a group of the same size only. The whole
state is that of the plain module, so it fits every group, and no group at all. Notebook 10_fsdp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.core.errors import CourseError
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.zero.flat_layout import FlatLayout

StateDict = dict[str, Any]


def whole_of(param_group: FSDPParamGroup, shard: Tensor) -> list[Tensor]:
    """What all ranks' shards of a param_group hold, parameter by parameter.

    Cost:    one all_gather
    """
    flat = shard.new_empty(param_group.layout.padded_numel)
    dist.all_gather_single(flat, shard.detach(), group=param_group.member.group)
    return [view.clone() for view in param_group.layout.views(flat)]


def shard_of(param_group: FSDPParamGroup, shard: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy this rank's part of whole parameters into a shard; nobody communicates."""
    for piece in param_group.layout.pieces(param_group.member.rank):
        piece.within(shard).copy_(piece.of(tensors[piece.index]))


@torch.no_grad()
def full_state(module: nn.Module, param_groups: Sequence[FSDPParamGroup], keep: bool) -> StateDict:
    """The plain module's state_dict; without `keep` this rank only helps, and gets nothing."""
    tensors: StateDict = {}
    for param_group in param_groups:
        for names, tensor in zip(
            param_group.names, whole_of(param_group, param_group.shard), strict=True
        ):
            tensors |= dict.fromkeys(names, tensor) if keep else {}
    state = module.state_dict()
    return {name: tensors.get(name, value) for name, value in state.items()} if keep else {}


@torch.no_grad()
def load_full(
    module: nn.Module, param_groups: Sequence[FSDPParamGroup], state: Mapping[str, Any]
) -> None:
    """Take this rank's shards, and the buffers, out of a plain module's state_dict."""
    ours, theirs = set(module.state_dict()), set(state)
    if ours != theirs:
        raise CourseError(
            f"FSDP.load_full_state_dict: need the names of the model; got {_some(theirs - ours)} "
            f"too many and {_some(ours - theirs)} too few. Try the state_dict of the same model."
        )
    for param_group in param_groups:
        tensors = [state[names[0]] for names in param_group.names]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes != param_group.layout.shapes:
            raise CourseError(
                f"FSDP.load_full_state_dict: need the shapes {param_group.layout.shapes} for {param_group.name}; "
                f"got {shapes}. Try a model of the same sizes."
            )
        shard_of(param_group, param_group.shard, tensors)
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])


def sharded_state(module: nn.Module, param_groups: Sequence[FSDPParamGroup]) -> StateDict:
    """This rank's shards, with all that is needed to put them together again, and the buffers."""
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
    """Go on from `sharded_state` of the same rank of an equal group."""
    ours = sharded_state(module, param_groups)
    same = all(ours[key] == state[key] for key in ("rank", "group_size"))
    if not same or _kinds(ours) != _kinds(state):
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
    """The plain module's state_dict out of the `state_dict()` of every rank, in any order.

    Raises: CourseError unless all ranks of the group are there
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
    """What an optimizer of the shards remembers of each parameter, put together, by name.

    Cost:    an all_gather a param_group for each thing it remembers of a number
    """
    found: dict[str, StateDict] = {}
    for param_group in param_groups:
        kept = optimizer.state.get(param_group.shard, {})
        for key, value in kept.items():
            sharded = isinstance(value, Tensor) and value.shape == param_group.shard.shape
            values = whole_of(param_group, value) if sharded else [value] * len(param_group.names)
            for names, one in zip(param_group.names, values, strict=True):
                found.setdefault(names[0], {})[key] = one
    return found


@torch.no_grad()
def load_full_optim(
    param_groups: Sequence[FSDPParamGroup],
    optimizer: Optimizer,
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Let an optimizer of the shards go on from `full_optim_state`, at any size of the group."""
    for param_group in param_groups:
        kept = [state.get(names[0], {}) for names in param_group.names]
        for key, value in kept[0].items():
            if key == "step" or not isinstance(value, Tensor):
                optimizer.state[param_group.shard][key] = value.clone() if key == "step" else value
                continue
            shard = torch.zeros_like(param_group.shard, dtype=value.dtype)
            shard_of(param_group, shard, [one[key] for one in kept])
            optimizer.state[param_group.shard][key] = shard


def _kinds(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (param_group["names"], param_group["shapes"])
        for name, param_group in state["param_groups"].items()
    }


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
