"""Save and load the state of an FSDP model: sharded (this rank's part) or full (as one process).

Saving shards needs no communication, and they fit a group of the same size only. The full state is
that of the plain module, so it fits a group of any size, and a single process. Notebook 10_fsdp.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.core.errors import CourseError
from course_lib.core.shards import Box, ParamShard, Shard
from course_lib.data_parallel.gradients import some_names
from course_lib.fsdp.dim0_layout import Dim0Layout
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.zero.state import COUNTERS

StateDict = dict[str, Any]


def sharded_params(
    param_groups: Sequence[FSDPParamGroup],
) -> Iterator[tuple[list[str], Dim0Layout, nn.Parameter, FSDPParamGroup]]:
    """Yield the names, layout and shard of every parameter, and its group."""
    for group in param_groups:
        for names, layout, shard in zip(group.names, group.layouts, group.shards, strict=True):
            yield names, layout, shard, group


def dim0_shard(layout: Dim0Layout, rank: int, tensor: Tensor) -> Shard:
    """Return a rank's rows of a parameter, or of its optimizer state, as a shard of the whole.

    Shapes:  [up to shard_rows, ...]
    """
    rows, tensor = layout.shard_shape(rank), tensor.detach()
    if not tensor.numel():
        return Shard(layout.shape)
    if not layout.shape:
        return Shard((), [(Box((), ()), tensor.view(()))])
    offsets = (rank * layout.shard_rows, *(0 for _ in rows[1:]))
    return Shard(layout.shape, [(Box(offsets, rows), tensor)])


def param_shards(param_groups: Sequence[FSDPParamGroup]) -> list[ParamShard]:
    """Return every parameter with this rank's rows of it. No communication."""
    return [
        ParamShard(tuple(names), shard, partial(dim0_shard, layout, group.member.rank))
        for names, layout, shard, group in sharded_params(param_groups)
    ]


def gather_whole(layout: Dim0Layout, shard: Tensor, param_group: FSDPParamGroup) -> Tensor:
    """Return a whole tensor from all ranks' shards of it.

    Shapes:  [up to shard_rows, ...] -> the parameter's
    Cost:    one all_gather
    """
    slot = shard.new_zeros(layout.slot_numel)
    layout.shard_in(slot, param_group.member.rank).copy_(shard.detach())
    slots = shard.new_empty(layout.p * layout.slot_numel)
    dist.all_gather_single(slots, slot, group=param_group.member.group)
    return layout.whole_in(slots).clone()


def plain_state(module: nn.Module) -> StateDict:
    """Return the module's state_dict(), with shards in the place of parameters."""
    state = module.state_dict(keep_vars=True)  # so that `refuse_shards` knows us
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in state.items()}


def refuse_shards(_module: nn.Module, _prefix: str, keep_vars: bool) -> None:
    """Refuse the wrapped module's own state_dict(): most of the model would be missing in it."""
    if not keep_vars:
        raise CourseError(
            "FSDP: need the weights of all ranks in a state_dict; got that of the wrapped module, "
            "or of one around it, with this rank's shards. Try model.full_state_dict(), or "
            "model.state_dict() for shards by rank."
        )


@torch.no_grad()
def full_state(module: nn.Module, param_groups: Sequence[FSDPParamGroup], keep: bool) -> StateDict:
    """Return the plain module's state_dict; without `keep` this rank only takes part."""
    tensors: StateDict = {}
    for names, layout, shard, group in sharded_params(param_groups):
        whole = gather_whole(layout, shard, group)
        tensors |= dict.fromkeys(names, whole) if keep else {}
    state = plain_state(module)
    return {name: tensors.get(name, value) for name, value in state.items()} if keep else {}


@torch.no_grad()
def load_full(
    module: nn.Module, param_groups: Sequence[FSDPParamGroup], state: Mapping[str, Any]
) -> None:
    """Load this rank's shards, and the buffers, from a plain module's state_dict."""
    ours, theirs = set(plain_state(module)), set(state)
    if ours != theirs:
        raise CourseError(
            f"FSDP.load_full_state_dict: need the names of the model; got "
            f"{some_names(sorted(theirs - ours))} too many and "
            f"{some_names(sorted(ours - theirs))} too few. Try the state_dict of the same model."
        )
    for names, layout, shard, group in sharded_params(param_groups):
        shape = tuple(state[names[0]].shape)
        if shape != layout.shape:
            raise CourseError(
                f"FSDP.load_full_state_dict: need the shape {layout.shape} for {names[0]}; got "
                f"{shape}. Try a model of the same sizes."
            )
        shard.copy_(layout.shard_of(state[names[0]], group.member.rank))
    _load_buffers(module, state)


def sharded_state(module: nn.Module, param_groups: Sequence[FSDPParamGroup]) -> StateDict:
    """Return this rank's shards and the buffers by name, and what `merge_shards` has to know.

    shapes   of the whole parameters
    """
    state, shapes = plain_state(module), dict[str, tuple[int, ...]]()
    for names, layout, shard, _ in sharded_params(param_groups):
        state |= dict.fromkeys(names, shard.detach().clone())
        shapes |= dict.fromkeys(names, layout.shape)
    member = param_groups[0].member if param_groups else None
    rank, size = (member.rank, member.size) if member else (0, 1)
    return {"rank": rank, "group_size": size, "shapes": shapes, "state": state}


@torch.no_grad()
def load_sharded(
    module: nn.Module, param_groups: Sequence[FSDPParamGroup], state: Mapping[str, Any]
) -> None:
    """Load `sharded_state` of the same rank of an equally large group."""
    ours = sharded_state(module, param_groups)
    if "shapes" not in state:
        raise CourseError(
            "FSDP.load_state_dict: need what state_dict() of this rank has returned; got the state "
            "of a plain module. Try load_full_state_dict(state)."
        )
    if any(ours[key] != state[key] for key in ("rank", "group_size", "shapes")):
        raise CourseError(
            f"FSDP.load_state_dict: need the shards of rank {ours['rank']} of "
            f"{ours['group_size']}, for the same model; got rank {state['rank']} of "
            f"{state['group_size']}. Try load_full_state_dict(merge_shards(states))."
        )
    for names, _, shard, _ in sharded_params(param_groups):
        shard.copy_(state["state"][names[0]])
    _load_buffers(module, state["state"])


def merge_shards(states: Sequence[StateDict]) -> StateDict:
    """Return the plain module's state_dict from the `state_dict()` of every rank, in any order.

    Of ranks with equal shards, as in hybrid sharding, one is enough.

    Raises:  CourseError unless there is one of every rank of the group
    """
    by_rank = {state["rank"]: state for state in states}
    size = states[0]["group_size"] if states else 0
    if not states or set(by_rank) != set(range(size)):
        raise CourseError(
            f"merge_shards: need the shards of all {size or 'the'} ranks; got {sorted(by_rank)}. "
            "Try one state_dict() from every rank."
        )
    merged = dict(by_rank[0]["state"])
    for name, shape in by_rank[0]["shapes"].items():
        merged[name] = torch.cat([by_rank[rank]["state"][name] for rank in range(size)]).view(shape)
    return merged


@torch.no_grad()
def full_optim_state(
    param_groups: Sequence[FSDPParamGroup], optimizer: Optimizer
) -> dict[str, StateDict]:
    """Return the optimizer state of whole parameters by name, from an optimizer of the shards.

    Cost:    an all_gather per parameter and sharded tensor of its state
    """
    found: dict[str, StateDict] = {}
    for names, layout, shard, group in sharded_params(param_groups):
        for key, value in optimizer.state.get(shard, {}).items():
            sharded = isinstance(value, Tensor) and value.shape == shard.shape
            one = gather_whole(layout, value, group) if sharded else value
            found.setdefault(names[0], {})[key] = one
    return found


@torch.no_grad()
def load_full_optim(
    param_groups: Sequence[FSDPParamGroup],
    optimizer: Optimizer,
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load `full_optim_state` into an optimizer of the shards, at any size of the group."""
    for names, layout, shard, group in sharded_params(param_groups):
        for key, value in state.get(names[0], {}).items():
            sharded = isinstance(value, Tensor) and key not in COUNTERS
            optimizer.state[shard][key] = (
                layout.shard_of(value, group.member.rank).to(shard.device, copy=True)
                if sharded
                else deepcopy(value)
            )


def _load_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    extra = {name: value for name, value in state.items() if name.endswith("_extra_state")}
    if extra:  # of modules with set_extra_state()
        module.load_state_dict(extra, strict=False)
