"""Parameters that are there only while their module computes: gather, use, free.

Each module with parameters of its own gets hooks. Forward gathers its flat_params and frees them again;
what autograd keeps of them are views of the flat_params, so it keeps no memory. Backward gathers them
when the gradient of the module's output is there, and frees them when that of its input is, or
when all of the flat_param's own gradients are. Notebook 09_zero.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from course_lib.collectives.coalesced import group_alike
from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.offload import Offload


class GatherHooks:
    """The flat_params of all modules, of up to most_bytes each; only this rank's shards are kept.

    A parameter that several modules share lies in the first one's flat_param, which they all gather. A
    module can compute with its own parameters only: another one's are away.

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
                part.register_forward_pre_hook(partial(_before, flat_params), with_kwargs=True)
                part.register_forward_hook(partial(_after, flat_params))

    def free(self) -> None:
        """Free what is still there: say, after a backward that did not come by."""
        _free(self.flat_params)


def _flat_params_of(
    path: str,
    part: nn.Module,
    known: dict[nn.Parameter, FlatParam],
    group: Group,
    most_bytes: float,
) -> list[FlatParam]:
    """Rows for the module's own parameters that have none yet; frozen ones lie apart."""
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


def _before(flat_params: list[FlatParam], part: nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward begins: gather. The inputs' gradients will tell the end of backward."""
    _gather(flat_params)
    if not torch.is_grad_enabled():
        return None
    leaves, tree = tree_flatten((args, kwargs))
    indices = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if indices:
        passed = _BackwardEnd.apply(partial(_free, flat_params), *(leaves[n] for n in indices))
        for n, tensor in zip(indices, passed, strict=True):
            leaves[n] = tensor
    return tree_unflatten(leaves, tree)


def _after(flat_params: list[FlatParam], part: nn.Module, args: Any, output: Any) -> None:
    """Forward ends: free. The output's gradient will tell that backward begins."""
    _free(flat_params)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not tensors and torch.is_grad_enabled():
        raise CourseError(
            "ZeRO3: need tensors as a module's output, or tuples, lists and dicts of them; "
            f"got {type(output).__name__} of {type(part).__name__}. Try a tuple."
        )
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: _gather(flat_params))


class _BackwardEnd(torch.autograd.Function):
    """Hands tensors through; in backward calls `leave` when the gradients of all are there."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.leave = leave
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.leave()
        return None, *grads


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
    """Does every module compute with parameters that nobody else frees meanwhile?"""
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
    """An inner module would free what the outer one still uses."""
    for owner in owners:
        if path.startswith(f"{owner}." if owner else ""):
            raise CourseError(
                f"ZeRO3: need a parameter to belong to modules that lie apart; got {name}, which "
                f"{owner or 'the model'} and {path} inside it share. Try ZeRO2."
            )
    owners.append(path)
