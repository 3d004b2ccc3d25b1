"""ZeRO stage 1: every rank keeps the optimizer's state of its shard, and steps only that.

After a step the parameters are gathered, so all ranks have them all. Gradients come from where they
always came from: `ShardedOptimizer` is an optimizer to put behind DDP. Notebook 09_zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from course_lib.collectives.coalesced import group_alike
from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.zero.flat_layout import Piece
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.offload import Offload

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop)
COUNTERS = ("step",)  # what the state counts once a parameter, and not once a number


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **defaults)` with 1/p of its state on each rank of the group.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Gradients have to be means over the group already, as DDP leaves them. Its all_reduce and our
    all_gather are 1.5 times the bytes of DDP alone; `ZeRO1` needs only a reduce_scatter before. A
    parameter without a gradient is left out, as PyTorch does. Parameters in 16 bits have fp32
    masters in the shard. Schedules of the learning rate change `param_groups`, as ever.

    offload   the state, and the step, are in the host's memory
    flat_params      how the parameters lie; one flat parameter for each dtype if not given

    Cost:    one all_gather a flat_param and step, of all parameters' bytes together
    Raises:  CourseError for an optimizer whose step looks at whole tensors; MeshError
    Source:  Rajbhandari et al. 2020 (ZeRO), section 5.1
    """

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
        super().__init__(params, defaults)
        trained = [param for group in self.param_groups for param in group["params"]]
        need_some([param for param in trained if param.is_floating_point()])
        self.process_group = group
        self.flat_params = (
            list(flat_params) if flat_params is not None else _flat_params_of(trained, group)
        )
        self.offload = (
            Offload(self.flat_params[0].flat.device) if offload is True else offload or None
        )
        self.inner = self._shard(optimizer_cls, defaults)

    def _shard(self, optimizer_cls: type[Optimizer], defaults: dict[str, Any]) -> Optimizer:
        """The optimizer of this rank's pieces, in the same parameter groups."""
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
        """Only for the constructor: later the shards are cut."""
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
        for flat_param in self.flat_params:
            flat_param.check_place()
            flat_param.copy_grads_to_masters()
        self.share_settings()
        self.inner.step()
        for flat_param in self.flat_params:
            flat_param.copy_masters_to_params()
        return loss

    def share_settings(self) -> None:
        """What a schedule has changed here holds for the shards."""
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Make the norm of the whole gradient max_norm at most; return what it was.

        Cost:    one all_reduce of one number: the shards' squares add up
        """
        squares = self.flat_params[0].flat.new_zeros((), dtype=torch.float64)
        for flat_param in self.flat_params:
            for _, grad in flat_param.grads():
                squares += torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2
        dist.all_reduce(squares, group=self.process_group)
        norm = squares.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as nn.utils.clip_grad_norm_
        for flat_param in self.flat_params:
            for grad in flat_param.all_grads():
                grad.mul_(factor.to(grad.dtype))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, whole ones and shards."""
        super().zero_grad(set_to_none)
        for flat_param in self.flat_params:
            flat_param.clear_grads()

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state: for the same rank of a group of the same size."""
        self.share_settings()
        return {
            "rank": dist.get_rank(self.process_group),
            "group_size": dist.get_world_size(self.process_group),
            "inner": deepcopy(self.inner.state_dict()),
            "masters": [
                flat_param.master.clone() for flat_param in self.flat_params if has_copy(flat_param)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict()`. Raises: CourseError for another rank's."""
        group = self.process_group
        mine = (dist.get_rank(group), dist.get_world_size(group))
        saved = (state_dict.get("rank"), state_dict.get("group_size"))
        if saved != mine:
            raise CourseError(
                f"rank {dist.get_rank()}, ShardedOptimizer.load_state_dict: need the shard of rank "
                f"{mine[0]} of {mine[1]}; got rank {saved[0]} of {saved[1]}. "
                "Try full_state_dict() and load_full_state_dict(), which fit any number of ranks."
            )
        self.inner.load_state_dict(state_dict["inner"])
        self._take_settings(self.inner.param_groups)
        for flat_param in self.flat_params:
            flat_param.refresh()
        copies = [flat_param for flat_param in self.flat_params if has_copy(flat_param)]
        for flat_param, master in zip(copies, state_dict["masters"], strict=True):
            flat_param.master.copy_(master)

    def full_state_dict(self) -> dict[str, Any]:
        """What `optimizer_cls` would save in one process, on every rank, in the host's memory.

        With parameters in 16 bits also `masters`, the fp32 ones.

        Cost:    one all_gather_object of the state
        """
        mine: dict[int, tuple[int, dict[str, Any]]] = {}
        for number, flat_param, piece, master in self._owned():
            values = {"master": master} if has_copy(flat_param) else {}
            values |= self.inner.state.get(master, {})
            on_host = {
                key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
            mine[number] = (piece.start, on_host)
        shards: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(shards, mine, group=self.process_group)
        shapes = {
            number: flat_param.layout.shapes[index]
            for number, flat_param, index in self._numbered()
        }
        state = {
            number: _together([shard[number] for shard in shards if number in shard], shape)
            for number, shape in sorted(shapes.items())
        }
        masters = {n: values.pop("master") for n, values in state.items() if "master" in values}
        full = {
            "state": {n: values for n, values in state.items() if values},
            "param_groups": self._settings(),
        }
        return {**full, "masters": masters} if masters else full

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `full_state_dict()` of any world size, or the plain optimizer's state."""
        numbers = [[*group["params"]] for group in state_dict["param_groups"]]
        wanted = [group["params"] for group in self._settings()]
        if numbers != wanted:
            raise CourseError(
                "ShardedOptimizer.load_full_state_dict: need the state of parameter groups of "
                f"{[*map(len, wanted)]} parameters; got {[*map(len, numbers)]}. "
                "Try the same model and the same groups."
            )
        self._take_settings(state_dict["param_groups"])
        self.share_settings()
        self.inner.state.clear()
        for flat_param in self.flat_params:
            flat_param.refresh()
        for number, flat_param, piece, master in self._owned():
            if has_copy(flat_param) and number in state_dict.get("masters", {}):
                master.copy_(piece.of(state_dict["masters"][number]))
            if number in state_dict["state"]:
                self.inner.state[master] = {
                    key: _cut(key, value, piece, master)
                    for key, value in state_dict["state"][number].items()
                }
        for flat_param in self.flat_params:
            if has_copy(flat_param) and state_dict.get("masters"):
                flat_param.copy_masters_to_params()

    def _numbered(self) -> Iterator[tuple[int, FlatParam, int]]:
        """Each parameter: its number in the plain optimizer's state, its flat_param, its index there."""
        params = [param for group in self.param_groups for param in group["params"]]
        number_of = {param: number for number, param in enumerate(params)}
        for flat_param in self.flat_params:
            for index, param in enumerate(flat_param.params):
                yield number_of[param], flat_param, index

    def _owned(self) -> Iterator[tuple[int, FlatParam, Piece, Tensor]]:
        """Each piece that this rank owns: the parameter's number, flat_param, piece and master."""
        number_of = {
            (id(flat_param), index): number for number, flat_param, index in self._numbered()
        }
        for flat_param in self.flat_params:
            for piece, master in zip(flat_param.pieces, flat_param.masters, strict=True):
                yield number_of[id(flat_param), piece.index], flat_param, piece, master

    def _take_settings(self, groups: list[dict[str, Any]]) -> None:
        """Learning rate and so on out of saved groups."""
        for ours, saved in zip(self.param_groups, groups, strict=True):
            ours.update({**saved, "params": ours["params"]})

    def _settings(self) -> list[dict[str, Any]]:
        """The parameter groups as a plain optimizer saves them: parameters by number."""
        found, first = [], 0
        for group in self.param_groups:
            last = first + len(group["params"])
            found.append({**group, "params": list(range(first, last))})
            first = last
        return found


def _flat_params_of(params: Sequence[nn.Parameter], group: Group) -> list[FlatParam]:
    """One flat_param for each dtype and device."""
    named = [(f"parameter {number}", param) for number, param in enumerate(params)]
    return [FlatParam([named[number] for number in part], group) for part in group_alike(params)]


def need_elementwise(optimizer_cls: type[Optimizer]) -> None:
    """Raises: CourseError for an optimizer whose step looks at whole tensors."""
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, ELEMENTWISE)):
        raise CourseError(
            "ShardedOptimizer: need an optimizer that steps each number by itself, one of "
            f"{', '.join(cls.__name__ for cls in ELEMENTWISE)}; got "
            f"{getattr(optimizer_cls, '__name__', repr(optimizer_cls))}. A shard holds pieces of "
            "tensors. Try torch.optim.AdamW."
        )


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
    """Raises: CourseError for a model without anything to train."""
    if not params:
        raise CourseError(
            "ShardedOptimizer: need parameters with floating numbers to train; got none. "
            "Try model.parameters()."
        )


def has_copy(flat_param: FlatParam) -> bool:
    """Do the masters say more than the parameters: are they fp32 copies?"""
    return flat_param.master.dtype != flat_param.flat.dtype


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
