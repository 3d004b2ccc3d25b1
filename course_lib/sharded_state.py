"""What a sharded optimizer saves: its own shard, or everything in the form of one process.

A rank's state is about pieces of parameters. Put side by side, pieces are the state that the plain
optimizer would have; cut again, by however many ranks, they are shards. Notebook 09_zero.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core.errors import CourseError
from course_lib.flat_rows import FlatRow
from course_lib.flat_shards import Piece

if TYPE_CHECKING:
    from course_lib.sharded_optimizer import ShardedOptimizer

COUNTERS = ("step",)  # what the state counts once a parameter, and not once a number


def own_state(optimizer: "ShardedOptimizer") -> dict[str, Any]:
    """A copy of this rank's shard: the inner optimizer's state, and masters that are copies."""
    optimizer.share_settings()
    return {
        "rank": dist.get_rank(optimizer.process_group),
        "group_size": dist.get_world_size(optimizer.process_group),
        "inner": deepcopy(optimizer.inner.state_dict()),
        "masters": [row.master.clone() for row in optimizer.rows if has_copy(row)],
    }


@torch.no_grad()
def load_own_state(optimizer: "ShardedOptimizer", state: dict[str, Any]) -> None:
    """Take up what `own_state` has given. Raises: CourseError for another rank's."""
    group = optimizer.process_group
    mine = (dist.get_rank(group), dist.get_world_size(group))
    saved = (state.get("rank"), state.get("group_size"))
    if saved != mine:
        raise CourseError(
            f"rank {dist.get_rank()}, ShardedOptimizer.load_state_dict: need the shard of rank "
            f"{mine[0]} of {mine[1]}; got rank {saved[0]} of {saved[1]}. "
            "Try full_state_dict() and load_full_state_dict(), which fit any number of ranks."
        )
    optimizer.inner.load_state_dict(state["inner"])
    take_settings(optimizer, optimizer.inner.param_groups)
    for row in optimizer.rows:
        row.refresh()
    copies = [row for row in optimizer.rows if has_copy(row)]
    for row, master in zip(copies, state["masters"], strict=True):
        row.master.copy_(master)


def full_state(optimizer: "ShardedOptimizer") -> dict[str, Any]:
    """The state that the plain optimizer would have, put together out of all ranks' pieces."""
    mine: dict[int, tuple[int, dict[str, Any]]] = {}
    for number, row, piece, master in owned(optimizer):
        values = {"master": master} if has_copy(row) else {}
        values |= optimizer.inner.state.get(master, {})
        on_host = {
            key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        mine[number] = (piece.start, on_host)
    shards: list[Any] = [None] * dist.get_world_size(optimizer.process_group)
    dist.all_gather_object(shards, mine, group=optimizer.process_group)
    shapes = {number: row.layout.shapes[index] for number, row, index in numbered(optimizer)}
    state = {
        number: _together([shard[number] for shard in shards if number in shard], shape)
        for number, shape in sorted(shapes.items())
    }
    masters = {n: values.pop("master") for n, values in state.items() if "master" in values}
    full = {
        "state": {n: values for n, values in state.items() if values},
        "param_groups": _settings(optimizer),
    }
    return {**full, "masters": masters} if masters else full


@torch.no_grad()
def load_full_state(optimizer: "ShardedOptimizer", full: dict[str, Any]) -> None:
    """Cut out of a full state what this rank's pieces need."""
    numbers = [[*group["params"]] for group in full["param_groups"]]
    wanted = [group["params"] for group in _settings(optimizer)]
    if numbers != wanted:
        raise CourseError(
            "ShardedOptimizer.load_full_state_dict: need the state of parameter groups of "
            f"{[*map(len, wanted)]} parameters; got {[*map(len, numbers)]}. "
            "Try the same model and the same groups."
        )
    take_settings(optimizer, full["param_groups"])
    optimizer.share_settings()
    optimizer.inner.state.clear()
    for row in optimizer.rows:
        row.refresh()
    for number, row, piece, master in owned(optimizer):
        if has_copy(row) and number in full.get("masters", {}):
            master.copy_(piece.of(full["masters"][number]))
        if number in full["state"]:
            optimizer.inner.state[master] = {
                key: _cut(key, value, piece, master) for key, value in full["state"][number].items()
            }
    for row in optimizer.rows:
        if has_copy(row) and full.get("masters"):
            row.publish()


def numbered(optimizer: "ShardedOptimizer") -> Iterator[tuple[int, FlatRow, int]]:
    """Each parameter: its number in the plain optimizer's state, its row, its index there."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    number_of = {param: number for number, param in enumerate(params)}
    for row in optimizer.rows:
        for index, param in enumerate(row.params):
            yield number_of[param], row, index


def owned(optimizer: "ShardedOptimizer") -> Iterator[tuple[int, FlatRow, Piece, Tensor]]:
    """Each piece that this rank owns: the parameter's number, row, piece and master."""
    number_of = {(id(row), index): number for number, row, index in numbered(optimizer)}
    for row in optimizer.rows:
        for piece, master in zip(row.pieces, row.masters, strict=True):
            yield number_of[id(row), piece.index], row, piece, master


def has_copy(row: FlatRow) -> bool:
    """Do the masters say more than the parameters: are they fp32 copies?"""
    return row.master.dtype != row.flat.dtype


def take_settings(optimizer: "ShardedOptimizer", groups: list[dict[str, Any]]) -> None:
    """Learning rate and so on out of saved groups."""
    for ours, saved in zip(optimizer.param_groups, groups, strict=True):
        ours.update({**saved, "params": ours["params"]})


def _settings(optimizer: "ShardedOptimizer") -> list[dict[str, Any]]:
    """The parameter groups as a plain optimizer saves them: parameters by number."""
    found, first = [], 0
    for group in optimizer.param_groups:
        last = first + len(group["params"])
        found.append({**group, "params": list(range(first, last))})
        first = last
    return found


def _together(pieces: list[tuple[int, dict[str, Any]]], shape: tuple[int, ...]) -> dict[str, Any]:
    """The state of a whole parameter out of its pieces: (start, values)."""
    pieces.sort(key=lambda piece: piece[0])
    whole: dict[str, Any] = dict(pieces[0][1]) if pieces else {}
    for key, value in whole.items():
        if isinstance(value, Tensor) and key not in COUNTERS:
            whole[key] = torch.cat([values[key] for _, values in pieces]).view(shape)
    return whole


def _cut(key: str, value: Any, piece: Piece, master: Tensor) -> Any:
    """The part of a parameter's saved state that belongs to a piece."""
    if not isinstance(value, Tensor):
        return value
    if key in COUNTERS:
        return value.clone()
    return piece.of(value).to(master, copy=True)
