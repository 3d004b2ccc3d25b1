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
from course_lib.fsdp.param_group import Row
from course_lib.zero.flat_layout import FlatLayout

State = dict[str, Any]


def whole_of(row: Row, shard: Tensor) -> list[Tensor]:
    """What all ranks' shards of a row hold, parameter by parameter.

    Cost:    one all_gather
    """
    flat = shard.new_empty(row.layout.padded_numel)
    dist.all_gather_single(flat, shard.detach(), group=row.place.group)
    return [view.clone() for view in row.layout.views(flat)]


def shard_of(row: Row, shard: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy this rank's part of whole parameters into a shard; nobody communicates."""
    for piece in row.layout.pieces(row.place.me):
        piece.within(shard).copy_(piece.of(tensors[piece.index]))


@torch.no_grad()
def full_state(module: nn.Module, rows: Sequence[Row], keep: bool) -> State:
    """The plain module's state_dict; without `keep` this rank only helps, and gets nothing."""
    tensors: State = {}
    for row in rows:
        for names, tensor in zip(row.names, whole_of(row, row.shard), strict=True):
            tensors |= dict.fromkeys(names, tensor) if keep else {}
    state = module.state_dict()
    return {name: tensors.get(name, value) for name, value in state.items()} if keep else {}


@torch.no_grad()
def load_full(module: nn.Module, rows: Sequence[Row], state: Mapping[str, Any]) -> None:
    """Take this rank's shards, and the buffers, out of a plain module's state_dict."""
    ours, theirs = set(module.state_dict()), set(state)
    if ours != theirs:
        raise CourseError(
            f"FSDP.load_full_state_dict: need the names of the model; got {_some(theirs - ours)} "
            f"too many and {_some(ours - theirs)} too few. Try the state_dict of the same model."
        )
    for row in rows:
        tensors = [state[names[0]] for names in row.names]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes != row.layout.shapes:
            raise CourseError(
                f"FSDP.load_full_state_dict: need the shapes {row.layout.shapes} for {row.name}; "
                f"got {shapes}. Try a model of the same sizes."
            )
        shard_of(row, row.shard, tensors)
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])


def sharded_state(module: nn.Module, rows: Sequence[Row]) -> State:
    """This rank's shards, with all that is needed to put them together again, and the buffers."""
    params = {name for row in rows for names in row.names for name in names}
    state = module.state_dict()
    return {
        "rank": rows[0].place.me if rows else 0,
        "group_size": rows[0].place.p if rows else 1,
        "rows": {
            row.name: {
                "names": row.names,
                "shapes": row.layout.shapes,
                "shard": row.shard.detach().clone(),
            }
            for row in rows
        },
        "buffers": {name: value for name, value in state.items() if name not in params},
    }


@torch.no_grad()
def load_sharded(module: nn.Module, rows: Sequence[Row], state: Mapping[str, Any]) -> None:
    """Go on from `sharded_state` of the same rank of an equal group."""
    ours = sharded_state(module, rows)
    same = all(ours[key] == state[key] for key in ("rank", "group_size"))
    if not same or _kinds(ours) != _kinds(state):
        raise CourseError(
            f"FSDP.load_state_dict: need the shards of rank {ours['rank']} of "
            f"{ours['group_size']}, for the same units; got rank {state['rank']} of "
            f"{state['group_size']}. Try load_full_state_dict(merge_shards(states))."
        )
    for row in rows:
        row.shard.copy_(state["rows"][row.name]["shard"])
    for name, buffer in module.named_buffers():
        if name in state["buffers"]:
            buffer.copy_(state["buffers"][name])


def merge_shards(states: Sequence[State]) -> State:
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
    merged: State = dict(by_rank[0]["buffers"])
    for name, row in by_rank[0]["rows"].items():
        layout = FlatLayout(row["shapes"], size)
        flat = torch.cat([by_rank[rank]["rows"][name]["shard"] for rank in range(size)])
        for names, tensor in zip(row["names"], layout.views(flat), strict=True):
            merged |= dict.fromkeys(names, tensor)
    return merged


@torch.no_grad()
def full_optim_state(rows: Sequence[Row], optimizer: Optimizer) -> dict[str, State]:
    """What an optimizer of the shards remembers of each parameter, put together, by name.

    Cost:    an all_gather a row for each thing it remembers of a number
    """
    found: dict[str, State] = {}
    for row in rows:
        kept = optimizer.state.get(row.shard, {})
        for key, value in kept.items():
            sharded = isinstance(value, Tensor) and value.shape == row.shard.shape
            values = whole_of(row, value) if sharded else [value] * len(row.names)
            for names, one in zip(row.names, values, strict=True):
                found.setdefault(names[0], {})[key] = one
    return found


@torch.no_grad()
def load_full_optim(
    rows: Sequence[Row], optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Let an optimizer of the shards go on from `full_optim_state`, at any size of the group."""
    for row in rows:
        kept = [state.get(names[0], {}) for names in row.names]
        for key, value in kept[0].items():
            if key == "step" or not isinstance(value, Tensor):
                optimizer.state[row.shard][key] = value.clone() if key == "step" else value
                continue
            shard = torch.zeros_like(row.shard, dtype=value.dtype)
            shard_of(row, shard, [one[key] for one in kept])
            optimizer.state[row.shard][key] = shard


def _kinds(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (row["names"], row["shapes"]) for name, row in state["rows"].items()}


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
