"""Checkpoints of a `MegatronEngine` in Megatron-Core's own format, `dist_checkpointing`.

Its model knows where each shard stands in the whole tensor; the state of PyTorch's optimizer has
the same shards, as in Megatron-Core's `FP32Optimizer`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def sharded_state(chunks: Sequence[Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state to save or to fill, as Megatron-Core's shards of whole tensors."""
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    models = {f"model{n}": chunk.module.sharded_state_dict() for n, chunk in enumerate(chunks)}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state: Any = optimizer.state_dict()
    steps = {float(one["step"]) for one in state["state"].values() if "step" in one}
    of_param = get_param_id_to_sharded_param_map(models, params)
    optim_state_to_sharding_state(state, of_param, exclude_keys=("step",))
    return {**models, "optimizer": state, "steps": max(steps, default=None)}


def save_sharded(chunks: Sequence[Any], optimizer: Optimizer, folder: str) -> None:
    """Write the engine's model and optimizer; every rank calls it."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded_state(chunks, optimizer), folder)


def load_sharded(chunks: Sequence[Any], optimizer: Optimizer, folder: str) -> None:
    """Load what `save_sharded` has written; every rank calls it."""
    from megatron.core import dist_checkpointing

    _make_state(optimizer)
    found = dist_checkpointing.load(sharded_state(chunks, optimizer), folder)
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(found[f"model{number}"])
    state = found["optimizer"]
    if found["steps"] is not None:
        for kept in state["state"].values():
            kept["step"] = torch.tensor(found["steps"])
    optimizer.load_state_dict(state)


def _make_state(optimizer: Optimizer) -> None:
    """Let a new optimizer allocate its state, by a step that changes nothing."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before: list[Tensor] = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for param, was in zip(params, before, strict=True):
            param.copy_(was)
