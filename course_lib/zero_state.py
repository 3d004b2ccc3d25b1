"""What a ZeRO engine saves: this rank's shard of everything, or the state of one process.

Full parameters are put together a row at a time, on the host. Notebook 09_zero.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from course_lib.core.errors import CourseError

if TYPE_CHECKING:
    from course_lib.zero import ZeRO1


def own_state(engine: "ZeRO1") -> dict[str, Any]:
    """This rank's shards, what is not sharded, and the optimizer's own state."""
    return {
        "shards": [row.shard.clone() for row in engine.param_rows],
        "others": {name: tensor.clone() for name, tensor in _others(engine).items()},
        "optimizer": engine.optimizer.state_dict(),
    }


@torch.no_grad()
def load_own_state(engine: "ZeRO1", state: Mapping[str, Any]) -> None:
    """Take up what `own_state` has given."""
    kept = [[*shard.shape] for shard in state["shards"]]
    wanted = [[*row.shard.shape] for row in engine.param_rows]
    if kept != wanted:
        raise CourseError(
            f"{type(engine).__name__}.load_state_dict: need shards of {wanted[:3]}; got "
            f"{kept[:3]}. Try full_state_dict() and load_full_state_dict(), which fit any layout."
        )
    for row, shard in zip(engine.param_rows, state["shards"], strict=True):
        row.shard.copy_(shard)
        if not row.given_up:
            row.gather()
    for name, tensor in _others(engine).items():
        tensor.copy_(state["others"][name])
    engine.optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def full_state(engine: "ZeRO1") -> dict[str, Any]:
    """`model` as `module.state_dict()` of one process, and `optimizer` as its optimizer's."""
    values: dict[int, Tensor] = {}
    for row in engine.param_rows:
        if row.is_free:
            row.gather()
        values |= {id(param): _on_host(param) for param in row.params}
        row.free()
    model = engine.module.state_dict(keep_vars=True)
    return {
        "model": {
            name: values[id(tensor)] if id(tensor) in values else _on_host(tensor)
            for name, tensor in model.items()
        },
        "optimizer": engine.optimizer.full_state_dict(),
    }


@torch.no_grad()
def load_full_state(engine: "ZeRO1", state: Mapping[str, Any]) -> None:
    """Cut out of a full state what this rank owns."""
    model, saved = engine.module.state_dict(keep_vars=True), state["model"]
    if model.keys() != saved.keys():
        odd = sorted(model.keys() ^ saved.keys())
        raise CourseError(
            f"{type(engine).__name__}.load_full_state_dict: need the state of the same model; got "
            f"one that differs in {', '.join(odd[:4])}. Try the model that it was saved with."
        )
    values = {id(tensor): saved[name] for name, tensor in model.items()}
    for row in engine.param_rows:
        row.load([values[id(param)] for param in row.params])
    for name, tensor in _others(engine).items():
        tensor.copy_(saved[name])
    engine.optimizer.load_full_state_dict(state["optimizer"])


def _others(engine: "ZeRO1") -> dict[str, Tensor]:
    """Buffers, and frozen parameters that lie in no row."""
    in_rows = {id(param) for row in engine.param_rows for param in row.params}
    model = engine.module.state_dict(keep_vars=True)
    return {name: x.detach() for name, x in model.items() if id(x) not in in_rows}


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
