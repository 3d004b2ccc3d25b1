"""ZeRO-3's all-gathers: hooks that gather a module's parameters, and free them after its use.

Every module with parameters of its own gets hooks. Forward gathers its flat parameters and frees
them again; autograd saves views of the flat tensors only, which keep no memory. Backward gathers
them when the gradient of the module's output is complete, and frees them when that of its input is,
or when all gradients of the flat parameter are. Notebook 09_zero.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from course_lib.collectives.coalesced import group_alike
from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import check_compiled
from course_lib.data_parallel.gradients import (
    need_plain_backward,
    tensors_kept,
    tensors_within,
)
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.offload import Offload


class GatherHooks:
    """Gathers and frees the flat parameters of all modules, of up to most_bytes each.

    A parameter that several modules share belongs to the first one's flat parameter, which they all
    gather. A module can compute with its own parameters only: those of others are freed.

    Raises: CourseError for a parameter shared by a module and another one inside it, and for
            PyTorch's nn.MultiheadAttention, which reads the parameters of its child
    """

    def __init__(
        self, module: nn.Module, group: Group, most_bytes: float, offload: Offload | None
    ) -> None:
        self.flat_params: list[FlatParam] = []
        flat_param_of: dict[nn.Parameter, FlatParam] = {}
        _check(module)
        for path, part in module.named_modules():
            for flat_param in _flat_params_of(path, part, flat_param_of, group, most_bytes):
                flat_param.keep_only_shard(offload)
                self.flat_params.append(flat_param)
                flat_param_of.update(dict.fromkeys(flat_param.params, flat_param))
            own = {
                id(flat_param_of[param]): flat_param_of[param]
                for param in part.parameters(recurse=False)
            }
            if own:
                flat_params = list(own.values())
                before = partial(_before_forward, flat_params)
                part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                part.register_forward_hook(partial(_after_forward, flat_params))

    def free(self) -> None:
        """Free everything still gathered, for example where backward did not reach a module."""
        _free(self.flat_params)


def _flat_params_of(
    path: str,
    part: nn.Module,
    known: dict[nn.Parameter, FlatParam],
    group: Group,
    most_bytes: float,
) -> list[FlatParam]:
    """Return flat parameters for the module's own parameters not yet in one; frozen ones apart."""
    flat_params = []
    for trained in (True, False):
        named = [
            (name, param)
            for name, param in part.named_parameters(path, recurse=False)
            if param not in known and param.requires_grad is trained
        ]
        parts = group_alike([param for _, param in named], most_bytes)
        flat_params += [
            FlatParam([named[number] for number in numbers], group) for numbers in parts
        ]
    return flat_params


def _before_forward(flat_params: list[FlatParam], part: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gather before forward; backward ends, and frees, when the inputs' gradients are complete."""
    _gather(flat_params)
    if not torch.is_grad_enabled():
        return None
    views: list[Tensor] = []

    def view_of(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            views.append(tensor := tensor.view_as(tensor))
        return tensor

    inputs = tree_map_only(Tensor, view_of, (args, kwargs))
    if views:
        register_multi_grad_hook(views, lambda _grads: _free(flat_params))
    return inputs


def _after_forward(flat_params: list[FlatParam], part: nn.Module, args: Any, output: Any) -> None:
    """Free after forward; gather again when the output's gradient is complete."""
    _free(flat_params)
    tensors = [one for leaf in tree_leaves(output) for one in tensors_within(leaf)]
    if not tensors and torch.is_grad_enabled():
        raise CourseError(
            "ZeRO3: need tensors as a module's output, or tuples, lists and dicts of them; "
            f"got {type(output).__name__} of {type(part).__name__}. Try a tuple."
        )
    for tensor in (*tensors, *tensors_kept([part])):
        if tensor.requires_grad:
            tensor.register_hook(partial(_before_backward, flat_params))


def _before_backward(flat_params: list[FlatParam], _grad: Tensor) -> None:
    need_plain_backward("ZeRO3", "ZeRO2")
    _gather(flat_params)


@torch.no_grad()
def _gather(flat_params: Sequence[FlatParam]) -> None:
    for flat_param in flat_params:
        if flat_param.is_free:
            flat_param.gather()


def _free(flat_params: Sequence[FlatParam]) -> None:
    for flat_param in flat_params:
        if not flat_param.is_free:
            flat_param.free()


def _check(module: nn.Module) -> None:
    """Check that no module frees parameters while another one computes with them."""
    hooked = [part for part in module.modules() if part._parameters]
    attempt = "ZeRO2, or FSDP with torch.compile(block) as its units"
    check_compiled(module, hooked, "ZeRO3", attempt)
    owners: dict[nn.Parameter, list[str]] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            raise CourseError(
                "ZeRO3: need modules that use their own parameters only; got "
                f"{path or 'the model'}, an nn.MultiheadAttention, which reads those of its "
                "out_proj. Try ZeRO2, or FSDP."
            )
        for name, param in part.named_parameters(path, recurse=False):
            _need_apart(name, owners.setdefault(param, []), path)


def _need_apart(name: str, owners: list[str], path: str) -> None:
    """Check that an inner module does not free what the outer one still uses."""
    for owner in owners:
        if path.startswith(f"{owner}." if owner else ""):
            raise CourseError(
                f"ZeRO3: need a parameter to belong to modules that lie apart; got {name}, which "
                f"{owner or 'the model'} and {path} inside it share. Try ZeRO2."
            )
    owners.append(path)
