"""Parameters that are there only while their module computes: gather, use, free.

Each module with parameters of its own gets hooks. Forward gathers its rows and frees them again;
what autograd keeps of them are views of the rows, so it keeps no memory. Backward gathers them
when the gradient of the module's output is there, and frees them when that of its input is, or
when all of the row's own gradients are. Notebook 09_zero.
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
from course_lib.zero.flat_param import FlatRow
from course_lib.zero.offload import Offload


class ModuleRows:
    """The rows of all modules, of up to most_bytes each; only this rank's shards are kept.

    A parameter that several modules share lies in the first one's row, which they all gather. A
    module can compute with its own parameters only: another one's are away.

    Raises: CourseError for a parameter shared by a module and another one inside it, and for
            PyTorch's nn.MultiheadAttention, which reads the parameters of its child
    """

    def __init__(
        self, module: nn.Module, group: Group, most_bytes: float, offload: Offload | None
    ) -> None:
        self.rows: list[FlatRow] = []
        row_of: dict[nn.Parameter, FlatRow] = {}
        _check(module)
        for path, part in module.named_modules():
            for row in _rows_of(path, part, row_of, group, most_bytes):
                row.give_up(offload)
                self.rows.append(row)
                row_of.update(dict.fromkeys(row.params, row))
            own = {id(row_of[param]): row_of[param] for param in part.parameters(recurse=False)}
            if own:
                rows = list(own.values())
                part.register_forward_pre_hook(partial(_before, rows), with_kwargs=True)
                part.register_forward_hook(partial(_after, rows))

    def free(self) -> None:
        """Free what is still there: say, after a backward that did not come by."""
        _free(self.rows)


def _rows_of(
    path: str,
    part: nn.Module,
    known: dict[nn.Parameter, FlatRow],
    group: Group,
    most_bytes: float,
) -> list[FlatRow]:
    """Rows for the module's own parameters that have none yet; frozen ones lie apart."""
    rows = []
    for trained in (True, False):
        named = [
            (name, param)
            for name, param in part.named_parameters(path, recurse=False)
            if param not in known and param.requires_grad is trained
        ]
        parts = group_alike([param for _, param in named], most_bytes)
        rows += [FlatRow([named[number] for number in numbers], group) for numbers in parts]
    return rows


def _before(rows: list[FlatRow], part: nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward begins: gather. The inputs' gradients will tell the end of backward."""
    _gather(rows)
    if not torch.is_grad_enabled():
        return None
    leaves, tree = tree_flatten((args, kwargs))
    places = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if places:
        passed = _Entrance.apply(partial(_free, rows), *(leaves[n] for n in places))
        for n, tensor in zip(places, passed, strict=True):
            leaves[n] = tensor
    return tree_unflatten(leaves, tree)


def _after(rows: list[FlatRow], part: nn.Module, args: Any, output: Any) -> None:
    """Forward ends: free. The output's gradient will tell that backward begins."""
    _free(rows)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not tensors and torch.is_grad_enabled():
        raise CourseError(
            "ZeRO3: need tensors as a module's output, or tuples, lists and dicts of them; "
            f"got {type(output).__name__} of {type(part).__name__}. Try a tuple."
        )
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: _gather(rows))


class _Entrance(torch.autograd.Function):
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
def _gather(rows: Sequence[FlatRow]) -> None:
    for row in rows:
        if row.is_free:
            row.gather()


def _free(rows: Sequence[FlatRow]) -> None:
    for row in rows:
        if not row.is_free:
            row.free()


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
