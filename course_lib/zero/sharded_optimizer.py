"""ZeRO stage 1: every rank keeps the optimizer state of its shard, and steps only that shard.

After a step the parameters are all-gathered, so every rank has all of them. Gradients have to be
averaged before: `ShardedOptimizer` is an optimizer to use with DDP. Notebook 09_zero.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.collectives.coalesced import group_alike
from course_lib.collectives.group import Group, member_of, sources_of
from course_lib.core.errors import CourseError
from course_lib.core.shards import InWhole, ParamShard
from course_lib.data_parallel.composition import (
    check_norm_is_whole,
    check_same_parameters,
    wrapper_of,
)
from course_lib.data_parallel.elementwise import need_elementwise
from course_lib.data_parallel.gradients import NotCopied
from course_lib.data_parallel.guarded import refuse
from course_lib.zero.clip import clip_shards
from course_lib.zero.flat_layout import Piece
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.offload import Offload
from course_lib.zero.state import (
    cut_state,
    join_state,
    need_keys,
    numbered_groups,
    on_host,
    range_shard,
)


class ShardedOptimizer(NotCopied, Optimizer):
    """`optimizer_cls(params, **defaults)` with 1/p of its state on each rank of the group.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Gradients have to be means over the group already, as DDP computes them. DDP's all_reduce and
    this all_gather send 1.5 times the bytes of DDP alone; `ZeRO1` replaces the all_reduce by a
    reduce_scatter. A parameter without a gradient is skipped, as in PyTorch. Parameters in 16 bits
    have fp32 masters of this rank's shard. Learning-rate schedulers change `param_groups` as usual.

    offload       keep the state, and compute the step, in the host's memory
    flat_params   the flat parameters to use; default: one for each dtype and device

    Cost:    one all_gather per flat parameter and step, of all parameters' bytes together
    Raises:  CourseError for an optimizer whose step needs whole tensors; MeshError
    Source:  Rajbhandari et al. 2020 (ZeRO), section 5.1
    """

    elementwise = True
    copy_instead = "full_state_dict()"

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        group: Group = None,
        *,
        offload: bool | Offload = False,
        flat_params: Sequence[FlatParam] | None = None,
        **defaults: Any,
    ) -> None:
        member_of(group, "ShardedOptimizer")
        need_elementwise(optimizer_cls)
        params = list(params)
        need_some(params)
        self.flat_params = [*(flat_params or ())]  # guarded parameters ask for them now
        self.engine: weakref.ref[Any] | None = None  # it has to reduce the gradients
        super().__init__(params, defaults)
        trained = [param for group in self.param_groups for param in group["params"]]
        need_some([param for param in trained if param.is_floating_point()])
        self.process_group = group
        if flat_params is None:
            named = ((f"parameter {n}", param) for n, param in enumerate(trained))
            check_same_parameters(named, group, "ShardedOptimizer")
            self.flat_params = _flat_params_of(trained, group)
        self.offload = (
            Offload(self.flat_params[0].flat.device) if offload is True else offload or None
        )
        self.inner = self._shard(optimizer_cls, defaults)
        self.defaults = self.inner.defaults  # schedulers look up what the optimizer knows

    def _shard(self, optimizer_cls: type[Optimizer], defaults: dict[str, Any]) -> Optimizer:
        """Return the optimizer of this rank's pieces, in the same parameter groups."""
        number_of = {
            param: number
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        inner = [{**group, "params": []} for group in self.param_groups]
        _need_groups(self.flat_params, number_of)
        for flat_param in self.flat_params:
            for piece, master in zip(
                flat_param.pieces, flat_param.make_masters(self.offload), strict=True
            ):
                inner[number_of[flat_param.params[piece.index]]]["params"].append(master)
        optimizer = optimizer_cls(inner, **defaults)
        for ours, theirs in zip(self.param_groups, optimizer.param_groups, strict=True):
            ours.update({**theirs, "params": ours["params"]})
        return optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; possible only in the constructor, before the shards are cut."""
        if hasattr(self, "inner"):
            raise CourseError(
                "ShardedOptimizer: need all parameters at once; got a group after the shards were "
                "cut. Try ShardedOptimizer([group, other_group], ...)."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's shard with its part of the gradients, then gather the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._complete_grads("step")
        self._follow_params()
        for flat_param in self.flat_params:
            flat_param.check_views()
            flat_param.copy_grads_to_masters()
        self.share_settings()
        self.inner.step()
        for flat_param in self.flat_params:
            flat_param.copy_masters_to_params()
        return loss

    def share_settings(self) -> None:
        """Copy the settings that a scheduler has changed here to the optimizer of the shards."""
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the whole gradient so that its norm is at most max_norm; return the norm before.

        Cost:    one all_reduce of one number
        """
        params = (param for one in self.flat_params for param in one.params)
        check_norm_is_whole(params, "ShardedOptimizer")
        self._complete_grads("clip_grad_norm_")
        shards = [grad for one in self.flat_params for _, grad in one.grads()]
        grads = [grad for one in self.flat_params for grad in one.all_grads()]
        device = self.flat_params[0].flat.device
        return clip_shards(shards, max_norm, self.process_group, device, scaled=grads)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, whole ones and shards, or set those that exist to zeros."""
        if engine := self._engine():
            engine.begin_round()
        super().zero_grad(set_to_none)
        for flat_param in self.flat_params:
            flat_param.clear_grads(to_zeros=not set_to_none)

    def _engine(self) -> Any:
        """Return the engine whose optimizer this is, or None."""
        engine = self.engine and self.engine()
        if self.engine and engine is None:
            raise CourseError(
                "ShardedOptimizer: need the engine that it belongs to, which reduces the gradients;"
                " got one that is gone. Try to keep the engine, and engine.step()."
            )
        return engine

    def _complete_grads(self, method: str) -> None:
        """Let an engine reduce the gradients. Raises: CourseError if DDP has not finished"""
        if engine := self._engine():
            engine.finish()
        elif getattr(wrapper_of(self.flat_params[0].params[0]), "is_unfinished", False):
            refuse("DDP", "gradients", f"ShardedOptimizer.{method}", "model.finish() first")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state: for the same rank of an equally large group."""
        self.share_settings()
        self._follow_params()
        return {
            "rank": dist.get_rank(self.process_group),
            "group_size": dist.get_world_size(self.process_group),
            "inner": deepcopy(self.inner.state_dict()),
            "masters": [one.master.clone() for one in self.flat_params if one.has_fp32_master],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `state_dict()`.

        Raises:  CourseError for that of another rank or of another group size
        """
        keys, group = ("inner", "masters", "rank", "group_size"), self.process_group
        attempt = "optimizer.state_dict(), or load_full_state_dict() for that of a plain optimizer"
        need_keys(state_dict, keys, "ShardedOptimizer.load_state_dict", attempt)
        mine = (dist.get_rank(group), dist.get_world_size(group))
        saved = (state_dict["rank"], state_dict["group_size"])
        if saved != mine:
            raise CourseError(
                f"rank {dist.get_rank()}, ShardedOptimizer.load_state_dict: need the shard of rank "
                f"{mine[0]} of {mine[1]}; got rank {saved[0]} of {saved[1]}. "
                "Try full_state_dict() and load_full_state_dict(), which fit any number of ranks."
            )
        self.inner.load_state_dict(state_dict["inner"])
        self._load_settings(self.inner.param_groups)
        for flat_param in self.flat_params:
            flat_param.copy_params_to_masters()
        copies = [flat_param for flat_param in self.flat_params if flat_param.has_fp32_master]
        for flat_param, master in zip(copies, state_dict["masters"], strict=True):
            flat_param.master.copy_(master)

    def full_state_dict(self) -> dict[str, Any]:
        """Return on every rank what `optimizer_cls` would save in one process, on the host.

        With parameters in 16 bits it has one more entry, `masters`: the fp32 values by number.

        Cost:    one all_gather_object of the state
        """
        self._follow_params()
        mine: dict[int, tuple[int, dict[str, Any]]] = {}
        for number, flat_param, piece, master in self._owned():
            values = {"master": master} if flat_param.has_fp32_master else {}
            values |= self.inner.state.get(master, {})
            mine[number] = (piece.start, {key: on_host(value) for key, value in values.items()})
        self._need_one_group("full_state_dict")
        shards: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(shards, mine, group=self.process_group)
        shapes = {
            number: flat_param.layout.shapes[index]
            for number, flat_param, index in self._numbered()
        }
        state = {
            number: join_state([shard[number] for shard in shards if number in shard], shape)
            for number, shape in sorted(shapes.items())
        }
        masters = {n: values.pop("master") for n, values in state.items() if "master" in values}
        full = {
            "state": {n: values for n, values in state.items() if values},
            "param_groups": numbered_groups(self.param_groups),
        }
        return {**full, "masters": masters} if masters else full

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `full_state_dict()` of any world size, or the state of the plain optimizer."""
        self._need_one_group("load_full_state_dict")
        where = "ShardedOptimizer.load_full_state_dict"
        need_keys(state_dict, ("state", "param_groups"), where, "optimizer.full_state_dict()")
        numbers = [[*group["params"]] for group in state_dict["param_groups"]]
        wanted = [group["params"] for group in numbered_groups(self.param_groups)]
        if numbers != wanted:
            raise CourseError(
                f"{where}: need the state of parameter groups of "
                f"{[*map(len, wanted)]} parameters; got {[*map(len, numbers)]}. "
                "Try the same model and the same groups."
            )
        self._load_settings(state_dict["param_groups"])
        self.share_settings()
        self.inner.state.clear()
        for flat_param in self.flat_params:
            flat_param.copy_params_to_masters()
        for number, flat_param, piece, master in self._owned():
            if flat_param.has_fp32_master and number in state_dict.get("masters", {}):
                master.copy_(piece.of(state_dict["masters"][number]))
            if number in state_dict["state"]:
                self.inner.state[master] = {
                    key: cut_state(key, value, piece, master)
                    for key, value in state_dict["state"][number].items()
                }
        for flat_param in self.flat_params:
            if flat_param.has_fp32_master and state_dict.get("masters"):
                flat_param.copy_masters_to_params()

    def param_shards(self, places: Mapping[int, InWhole]) -> list[ParamShard]:
        """Return the pieces that this rank steps, for a checkpoint.

        places   by the id of each parameter: where it stands in the whole model
        """
        self._follow_params()
        found = []
        for _, flat_param, piece, master in self._owned():
            place = places[id(flat_param.params[piece.index])]
            shard_of = partial(range_shard, flat_param.layout.shapes[piece.index], piece.start)
            found.append(ParamShard((), master, shard_of).at(place))
        return found

    @torch.no_grad()
    def masters_from_params(self) -> None:
        """Set all masters to the parameters' values, after these were loaded."""
        for flat_param in self.flat_params:
            flat_param.copy_params_to_masters()

    @property
    def fp32_masters(self) -> list[Tensor]:
        """The masters that are copies of 16-bit parameters: state to save, too."""
        return [x for one in self.flat_params if one.has_fp32_master for x in one.masters]

    def _follow_params(self) -> None:
        """Take over what others have written into the parameters."""
        for flat_param in self.flat_params:
            flat_param.follow_params()

    def _numbered(self) -> Iterator[tuple[int, FlatParam, int]]:
        """Yield each parameter's number in a plain optimizer, flat parameter and index in it."""
        params = [param for group in self.param_groups for param in group["params"]]
        number_of = {param: number for number, param in enumerate(params)}
        for flat_param in self.flat_params:
            for index, param in enumerate(flat_param.params):
                yield number_of[param], flat_param, index

    def _owned(self) -> Iterator[tuple[int, FlatParam, Piece, Tensor]]:
        """Yield this rank's pieces: the parameter's number, flat parameter, piece and master."""
        number_of = {
            (id(flat_param), index): number for number, flat_param, index in self._numbered()
        }
        for flat_param in self.flat_params:
            for piece, master in zip(flat_param.pieces, flat_param.masters, strict=True):
                yield number_of[id(flat_param), piece.index], flat_param, piece, master

    def _need_one_group(self, method: str) -> None:
        """Check that all ranks hold the same parameters, which is what a full state has."""
        if any(sources_of(param) for one in self.flat_params for param in one.params):
            raise CourseError(
                f"ShardedOptimizer.{method}: need the same parameters on all ranks; got experts "
                "that are divided over them. Try course_lib.checkpoint."
            )

    def _load_settings(self, groups: list[dict[str, Any]]) -> None:
        """Copy learning rate and other settings from saved parameter groups."""
        for ours, saved in zip(self.param_groups, groups, strict=True):
            ours.update({**saved, "params": ours["params"]})


def _flat_params_of(params: Sequence[nn.Parameter], group: Group) -> list[FlatParam]:
    """Return one flat parameter for each dtype and device."""
    named = [(f"parameter {number}", param) for number, param in enumerate(params)]
    return [FlatParam([named[number] for number in part], group) for part in group_alike(params)]


def _need_groups(flat_params: Sequence[FlatParam], number_of: Mapping[nn.Parameter, int]) -> None:
    named = [
        item
        for flat_param in flat_params
        for item in zip(flat_param.names, flat_param.params, strict=True)
    ]
    missing = [name for name, param in named if param not in number_of]
    if missing:
        raise CourseError(
            "ShardedOptimizer: need every trained parameter in a parameter group; got none for "
            f"{', '.join(missing)}. Try requires_grad_(False) for what is not trained."
        )


def need_some(params: Sequence[Any]) -> None:
    """Check that there is something to train.

    Raises:  CourseError without any parameters
    """
    if not params:
        raise CourseError(
            "ShardedOptimizer: need parameters with floating numbers to train; got none. "
            "Try model.parameters()."
        )
