"""State dicts of one process, out of what ranks have gathered; and the bytes that a rank holds."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.training.parts import groups_of

State = dict[str, Any]


def held_bytes(params: Iterable[nn.Parameter], optimizer: Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank, each storage once."""
    params = list(params)
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    return {
        "params": _bytes(params),
        "grads": _bytes([param.grad for param in params]),
        "optim_state": _bytes([x for x in state if isinstance(x, Tensor) and x.dim()]),
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    local = [getattr(x, "_local_tensor", x) for x in tensors if x is not None]  # of a DTensor
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}
    return sum(storages.values())


def whole_state(
    model: Mapping[str, Any],
    names: list[str],
    kept: Mapping[str, Mapping[str, Any]],
    optimizer: Optimizer,
) -> State | None:
    """State dicts of one process out of whole tensors by name."""
    if dist.get_rank():
        return None
    state = {n: _on_host(kept[name]) for n, name in enumerate(names) if kept.get(name)}
    groups = groups_of(optimizer.state_dict(), len(names))
    return {"model": _on_host(model), "optimizer": {"state": state, "param_groups": groups}}


def _on_host(values: Mapping[str, Any]) -> State:
    """Copies: a count of steps that parameters share would be counted up by each of them."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }


def by_name(state: State, names: list[str]) -> dict[str, State]:
    """What a saved optimizer remembers of each parameter, by its name."""
    return {names[number]: kept for number, kept in state["optimizer"]["state"].items()}
