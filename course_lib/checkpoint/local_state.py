"""The state that a rank saves: names of the whole model's tensors, and this rank's shards of them.

The names are the same under every strategy: `model.<name in the plain state_dict>` and
`optimizer.<kind>.<name of the parameter>`, so that any strategy can load what another has saved.
Notebook 14_checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from course_lib.checkpoint.model_state import (
    is_model,
    model_shards,
    param_shards,
    places_of,
    unwrapped,
    whole_shard,
)
from course_lib.core.errors import CourseError
from course_lib.core.shards import ParamShard, Shape, Shard
from course_lib.zero.sharded_optimizer import ShardedOptimizer
from course_lib.zero.state import COUNTERS

MASTER = "fp32_master"  # the kind of optimizer state that is fp32 copies of 16-bit parameters
Keys = tuple[str, ...]
Leaf = tuple[Keys, Any, Mapping[Any, Any]]


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor's dtype, as in `float32`, and its shape."""

    dtype: str
    shape: Shape


@dataclass
class LocalState:
    """A state as names: this rank's shards, and plain values.

    shards      by the name of the whole tensor; tied names have one and the same Shard
    values      the plain values, nested as they are in the state
    complete    beginnings of names of which a checkpoint must have no others
    optimizers  those of optimizer state, which has the dtype of what is stepped, as in PyTorch: it
                is rounded where another dtype was saved
    """

    shards: dict[str, Shard] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    complete: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)

    def metas(self) -> dict[str, WholeTensor]:
        """Return dtype and shape of every tensor of which this rank has a piece."""
        return {
            name: WholeTensor(dtype_name(shard.pieces[0][1].dtype), shard.shape)
            for name, shard in self.shards.items()
            if shard.pieces
        }


def is_master(name: str) -> bool:
    """Return whether a name is that of an fp32 copy of a 16-bit parameter.

    A checkpoint may have it and the state not, or the reverse: plain optimizers have no such copy.
    """
    return f".{MASTER}." in name


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def collect(state: Mapping[Any, Any]) -> LocalState:
    """Return the shards and values of a state: a nested mapping of what is to be saved.

    A leaf is a tensor, which all ranks have whole, a Shard, an nn.Module or anything with
    `.shards()` or `.param_shards()`, an Optimizer with its module beside it, or a plain value.
    The tensors of the shards are those of the model and the optimizer, not copies.

    Raises:  CourseError for a leaf that cannot be saved
    """
    local, seen = LocalState(), set[str]()
    for path, leaf, beside in leaves_of(state):
        name, before = ".".join(path), len(local.shards)
        if name in seen:
            raise _twice(name)
        seen.add(name)
        found: dict[str, Shard] = {}
        if isinstance(leaf, Shard | Tensor):
            found = {name: leaf if isinstance(leaf, Shard) else whole_shard(leaf)}
        elif isinstance(leaf, Optimizer):
            local.complete.append(f"{name}.")
            local.optimizers.append(f"{name}.")
            found = {f"{name}.{key}": x for key, x in _optim_shards(leaf, beside).items()}
            put_value(local.values, path, {"type": _type_of(leaf), "param_groups": _settings(leaf)})
        elif is_model(leaf):
            local.complete.append(f"{name}.")
            found = {f"{name}.{key}": shard for key, shard in model_shards(leaf).items()}
        else:
            put_value(local.values, path, _plain(leaf, name))
        local.shards |= found
        if len(local.shards) < before + len(found):
            raise _twice(name)
    return local


def _twice(name: str) -> CourseError:
    return CourseError(
        f"checkpoint: need a name of its own for each part of the state; got two for {name!r}. "
        "Try keys without dots."
    )


def _type_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class; of a sharded one, that of what steps the shards."""
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    return type(inner).__name__


@torch.no_grad()
def make_room(state: Mapping[Any, Any], saved: Mapping[str, WholeTensor]) -> None:
    """Allocate the optimizer state that a checkpoint has, as a new optimizer has none.

    State that the checkpoint does not have is dropped.
    """
    for path, leaf, beside in _optimizers(state):
        _make_optim_room(".".join(path), leaf, beside, saved)


@contextmanager
def optimizers_kept(state: Mapping[Any, Any]) -> Iterator[None]:
    """Give the optimizers their state back if the block raises."""
    found = [_stepped(leaf, beside)[0] for _, leaf, beside in _optimizers(state)]
    before = [dict(one.state) for one in found]
    try:
        yield
    except BaseException:
        for one, kept in zip(found, before, strict=True):
            one.state.clear()
            one.state.update(kept)
        raise


def check_groups(state: Mapping[Any, Any], values: Mapping[str, Any]) -> None:
    """Check that a checkpoint has settings for the parameter groups of every optimizer.

    Raises:  CourseError for an optimizer with other groups, and where none was saved
    """
    for path, leaf, _ in _optimizers(state):
        need = f"{_type_of(leaf)} with {len(leaf.param_groups)} parameter groups"
        groups, kind = _saved_groups(path, values), _saved_at((*path, "type"), values)
        fits = all(map(_settings_fit, leaf.param_groups, groups))
        if len(groups) != len(leaf.param_groups) or kind != _type_of(leaf) or not fits:
            got = f"{kind or 'none'} with {len(groups)}" if fits else f"{kind} with others"
            raise CourseError(
                f"load: need {need} for {'.'.join(path)}; the checkpoint has {got}. Try the "
                "optimizer that it was saved with."
            )


def _settings_fit(group: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return whether saved settings have the types of a group's own: numbers for numbers."""

    def kind(value: Any) -> Any:
        if isinstance(value, bool):
            return bool
        return float if isinstance(value, int | float | Tensor) else type(value)

    pairs = [(group[key], saved[key]) for key in group.keys() & saved.keys() - {"params"}]
    return all(
        kind(own) is kind(other) or None in (own, other) or isinstance(own, tuple | list)
        for own, other in pairs
    )


def finish_load(
    state: Mapping[Any, Any], values: Mapping[str, Any], saved: Mapping[str, WholeTensor]
) -> None:
    """Set the optimizers' settings, and masters that were not saved, after the tensors are filled.

    `check_groups` has to be called before.
    """
    for path, leaf, _ in _optimizers(state):
        _set_settings(path, leaf, values)
        if isinstance(leaf, ShardedOptimizer):
            leaf.share_settings()
            if not any(map(is_master, saved)):
                leaf.masters_from_params()


def leaves_of(state: Mapping[Any, Any], above: Keys = ()) -> Iterator[Leaf]:
    """Yield the path and value of each leaf of a nested mapping, and the mapping it stands in."""
    for key, value in state.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, path)
        else:
            yield path, value, state


# --- optimizers


def _optimizers(state: Mapping[Any, Any]) -> list[tuple[Keys, Optimizer, Mapping[Any, Any]]]:
    return [leaf for leaf in leaves_of(state) if isinstance(leaf[1], Optimizer)]


def _stepped(optimizer: Optimizer, beside: Mapping[Any, Any]) -> tuple[Optimizer, list[ParamShard]]:
    """Return the optimizer that has the state, and what it steps, named by the module beside it."""
    models = [leaf for leaf in beside.values() if is_model(leaf)]
    if len(models) != 1:
        raise CourseError(
            f"checkpoint: need an optimizer beside the one module that it trains; got "
            f'{len(models)} modules. Try {{"model": model, "optimizer": optimizer}}.'
        )
    model = unwrapped(models[0])
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.inner, optimizer.param_shards(places_of(model))
    shards = param_shards(model)
    known = {id(one.local) for one in shards}
    strange = [x for group in optimizer.param_groups for x in group["params"] if id(x) not in known]
    if strange:
        raise CourseError(
            f"checkpoint: need an optimizer of the parameters of the module beside it; got "
            f"{len(strange)} other ones, the first of shape {list(strange[0].shape)}. "
            "Try the module that the optimizer was made for."
        )
    return optimizer, shards


def _optim_shards(optimizer: Optimizer, beside: Mapping[Any, Any]) -> dict[str, Shard]:
    """Return this rank's shards of the optimizer state as `<kind>.<name of the parameter>`."""
    inner, shards = _stepped(optimizer, beside)
    found = {}
    masters = optimizer.fp32_masters if isinstance(optimizer, ShardedOptimizer) else []
    copies = {id(master) for master in masters}
    for one in shards:
        if id(one.local) in copies:
            found[f"{MASTER}.{one.names[0]}"] = one.shard_of(one.local)
        for kind, value in inner.state.get(one.local, {}).items():
            if not isinstance(value, Tensor | None):
                raise CourseError(
                    f"checkpoint: need optimizer state of tensors; got a {type(value).__name__} "
                    f"as {kind!r} of {one.names[0]}. Try torch.optim.AdamW."
                )
            if value is not None:
                as_local = value.shape == one.local.shape and kind not in COUNTERS
                shard = one.shard_of(value) if as_local else whole_shard(value)
                found[f"{kind}.{one.names[0]}"] = shard
    return found


def _make_optim_room(
    prefix: str, optimizer: Optimizer, beside: Mapping[Any, Any], saved: Mapping[str, WholeTensor]
) -> None:
    inner, shards = _stepped(optimizer, beside)
    kinds = {
        name.split(".")[prefix.count(".") + 1] for name in saved if name.startswith(f"{prefix}.")
    }
    groups = {id(x): group for group in inner.param_groups for x in group["params"]}
    for one in shards:
        if id(one.local) not in groups:
            continue  # it is not trained here: state of it, if there is, is one too many
        room = {}
        for kind in kinds - {MASTER}:
            meta = saved.get(f"{prefix}.{kind}.{one.names[0]}")
            if meta is not None:
                room[kind] = _room(kind, meta, one, groups[id(one.local)])
        inner.state.pop(one.local, None)
        if room:
            inner.state[one.local] = room


def _room(kind: str, meta: WholeTensor, one: ParamShard, group: Mapping[str, Any]) -> Tensor:
    """Return memory for one kind of state of a parameter, on this rank."""
    dtype = getattr(torch, meta.dtype)
    if kind not in COUNTERS and meta.shape == one.shard_of(one.local).shape:
        return torch.zeros_like(one.local)  # what pads a shard stays 0
    on_device = group.get("capturable") or group.get("fused")
    device = one.local.device if on_device else torch.device("cpu")
    return torch.zeros(meta.shape, dtype=dtype, device=device)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return learning rates and the like of each parameter group, as plain values."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) else _plain(value, f"param_groups.{key}")
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _saved_groups(path: Keys, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups in a checkpoint's values."""
    saved = _saved_at((*path, "param_groups"), values)
    is_one = isinstance(saved, list) and all(isinstance(one, dict) for one in saved)
    return saved if is_one else []


def _saved_at(path: Keys, values: Any) -> Any:
    """Return the value at a path of nested mappings, or None."""
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _set_settings(path: Keys, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, _saved_groups(path, values), strict=True):
        for key in group.keys() & saved.keys() - {"params"}:
            if isinstance(group[key], Tensor):
                group[key].fill_(saved[key])
            else:
                group[key] = tuple(saved[key]) if isinstance(group[key], tuple) else saved[key]


# --- plain values


def put_value(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value at a path into nested dicts."""
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value


def _plain(value: Any, name: str) -> Any:
    """Return a value as JSON gives it back. Raises: CourseError for what is not plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, name) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one, name) for key, one in value.items()}
    raise CourseError(
        f"checkpoint: need tensors, modules, optimizers or plain values; got a "
        f"{type(value).__name__} as {name}. Try its state_dict()."
    )
