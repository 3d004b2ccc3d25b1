"""Refuse wrappers that do not fit together: every wrapper asks here before it communicates.

All ranks of a data-parallel group need the same parameters. So whoever splits a parameter marks it
with the ranks that hold the other parts, and a wrapper over two of these ranks is an error: it
would average, or broadcast, parts of different numbers. Notebooks 05_data_parallel to 11_mesh.
"""

import weakref
from collections.abc import Collection, Iterable, MutableMapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from course_lib.collectives.group import Group, group_of, sources_of
from course_lib.core.errors import CourseError, MeshError
from course_lib.data_parallel.gradients import NoSync

Split = tuple[str, tuple[int, ...]]  # which method split a parameter, and over which global ranks
TENSOR_PARALLEL, PIPELINE = "tensor parallelism", "a pipeline"
EXPERT_PARALLEL = "expert parallelism"
MODEL_PARALLEL = TENSOR_PARALLEL, PIPELINE, EXPERT_PARALLEL  # these do not average gradients
FOREIGN = (  # modules of PyTorch's own wrappers
    *("torch.nn.parallel.", "torch.distributed.fsdp."),
    "torch.distributed._composable.replicate",
)
# which wrapper averages the gradient of a parameter: beside it, as copies have none
_WRAPPERS: MutableMapping[Tensor, weakref.ref[Any]] = WeakIdKeyDictionary()


def mark_split(
    param: Tensor, method: str, ranks: Iterable[int], source: Tensor | None = None
) -> None:
    """Note that `param` is this rank's part of a parameter, cut out of `source`, split over ranks.

    The mark is made of plain values, so that a parameter can be pickled as before.
    """
    earlier = splits_of(param if source is None else source)
    vars(param)["_splits"] = (*earlier, (method, tuple(ranks)))


def splits_of(param: Tensor) -> tuple[Split, ...]:
    """Return who has split a parameter so far, the first one first."""
    return vars(param).get("_splits", ())


def mark_wrapped(params: Iterable[nn.Parameter], wrapper: Any) -> None:
    """Note that a wrapper averages the gradients of these parameters as long as it lives.

    It replaces those before it, so that a notebook's cell that wraps a module can be run again.
    """
    for param in params:
        if param.requires_grad:
            if earlier := wrapper_of(param):
                vars(earlier)["_replaced_by"] = type(wrapper).__name__
            _WRAPPERS[param] = weakref.ref(wrapper)


def wrapper_of(param: Tensor) -> Any:
    """Return the wrapper that averages the gradient of a parameter, or None."""
    reference = _WRAPPERS.get(param)
    return reference and reference()


def check_wrappable(module: nn.Module, group: Group, where: str) -> None:
    """Check that `where` may average the gradients of a module over a group.

    Raises:  CourseError if a wrapper is a part of it, or has split its parameters; MeshError if
             tensor parallelism or a pipeline has split them over ranks of this group
    """
    if not isinstance(module, nn.Module):
        _refuse(where, "an nn.Module", f"an object of {type(module).__name__}", "its module")
    for part in module.modules():
        kind = type(part)
        if isinstance(part, NoSync) or any(c.__module__.startswith(FOREIGN) for c in kind.__mro__):
            name = kind.__name__
            got = f"one with {name} in it, which averages gradients, too"
            _refuse(where, "a module without another wrapper", got, f"{where}(module) alone")
    for name, param in module.named_parameters():
        if is_lazy(param):
            got = f"{name}, which has none yet"
            _refuse(where, "parameters with shapes", got, "one forward of the module before")
        for method, _ in splits_of(param):
            if method not in MODEL_PARALLEL:
                _refuse_part(name, method, where)
    check_same_parameters(module.named_parameters(), group, where)


def check_same_parameters(named: Iterable[tuple[str, Tensor]], group: Group, where: str) -> None:
    """Check that no two ranks of a group hold different parts of a parameter.

    Raises:  CourseError for a shard of data parallelism; MeshError for one of a split model
    """
    everyone = dist.get_process_group_ranks(group)
    for name, param in named:
        if hasattr(param, "placements"):  # a DTensor, whose class takes long to import
            _refuse_part(name, "PyTorch's DTensor", where)
        ranks = dist.get_process_group_ranks(group_of(param, group))
        if (sources := sources_of(param)) and len(ranks) * sources != len(everyone):
            raise MeshError(
                f"{where}: need a group of {len(ranks)} * {sources} ranks, those that hold expert "
                f"{name} and those that share experts with them; got ranks {everyone}. Try "
                "group=mesh.copies, as in expert_groups(mesh)."
            )
        for method, others in splits_of(param):
            if len({*ranks} & {*others}) < 2:
                continue
            if method not in MODEL_PARALLEL:
                _refuse_part(name, method, where)
            raise MeshError(
                f"{where}: need a group whose ranks hold the same parameters; got ranks {ranks}, "
                f"and {method} has split the model with {name} over ranks {[*others]}. Try group=, "
                "with the data-parallel ranks alone."
            )


def check_norm_is_whole(params: Iterable[Tensor], where: str) -> None:
    """Check that the gradients' norm over a data-parallel group is that of the whole gradient.

    Raises:  MeshError if tensor parallelism or a pipeline has split the model over several ranks
    """
    for param in params:
        for method, ranks in splits_of(param):
            if method in MODEL_PARALLEL and len(ranks) > 1:
                raise MeshError(
                    f"{where}.clip_grad_norm_: need gradients of which this group holds all parts; "
                    f"got some that {method} has split over ranks {[*ranks]}. Try DDP and "
                    "clip_grad_norm_across(module, mesh, max_norm) of course_lib.mesh."
                )


def check_compiled(
    module: nn.Module, hooked: Collection[nn.Module], where: str, attempt: str
) -> None:
    """Check that no module whose hooks gather and free parameters lies in compiled code.

    `torch.compile(part)` calls the hooks of `part` outside of the compiled code, those of modules
    in it inside; `part.compile()` calls both inside.

    Raises:  CourseError if there is one
    """
    for name, part in module.named_modules():
        around = hasattr(part, "_orig_mod")
        if around or part._compiled_call_impl is not None:
            inside = [*part.modules()][around:]
            if any(one in hooked for one in inside):
                got = f"{name or 'the module'} compiled, with modules in it that gather and free"
                _refuse(where, "compiled code that gathers no parameters", got, attempt)


def _refuse_part(name: str, method: str, where: str) -> None:
    got = f"{name}, of which a rank holds a shard or nothing ({method})"
    _refuse(where, "whole parameters", got, f"{where} on a module made anew, or {method} alone")


def _refuse(where: str, need: str, got: str, attempt: str) -> None:
    raise CourseError(f"{where}: need {need}; got {got}. Try {attempt}.")
