"""Shared by every data-parallel wrapper: `no_sync`, hooks on gradients, parameters without one.

NaiveDDP, DDP, ZeRO and FSDP all wait for gradients, may skip their communication, and must name the
parameters that got none. Notebooks 05_data_parallel to 10_fsdp.
"""

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError

PLAIN = int | float | str | bytes | None  # nothing is within
CLOSED = nn.Module | type | PLAIN
OF_MODULES = {*vars(nn.Module())}  # the attributes that every module has


class NoSync:
    """Mixin: inside `with model.no_sync():` gradients only accumulate on this rank.

    The wrapper reads `_syncs` before it communicates.
    """

    _syncs = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication until the block ends."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """Refuse PyTorch's DDP around this wrapper: it asks for this name when it is made."""
        if sys._getframe(1).f_code.co_qualname != "DistributedDataParallel.__init__":
            raise AttributeError(name="_ddp_params_and_buffers_to_ignore", obj=self)
        raise CourseError(
            "DistributedDataParallel: need a module without another "
            f"wrapper; got one with {type(self).__name__} in it, which averages gradients, too. "
            f"Try DistributedDataParallel or {type(self).__name__} alone."
        )


class NotCopied:
    """Mixin: a copy or a pickle of this object, or of a module with its hooks, is refused.

    It belongs to a process group, and gradients reach it through hooks, which copies do not have.
    `copy_instead` is what the message proposes.
    """

    copy_instead = "copy.deepcopy(model.module), also to average weights"

    def __getstate__(self) -> Any:
        raise CourseError(
            f"{type(self).__name__}: need a model outside of a process group to copy or pickle; "
            f"got one that communicates. Try {self.copy_instead}."
        )


def replaced_by(wrapper: Any) -> str:
    """Return the kind of the wrapper that has taken this one's module over; "" without one."""
    return vars(wrapper).get("_replaced_by", "")


def check_not_replaced(wrapper: Any) -> None:
    """Check that no other wrapper has taken the module over.

    Raises:  CourseError that names it
    """
    if other := replaced_by(wrapper):
        raise CourseError(
            f"rank {dist.get_rank()}, {type(wrapper).__name__}: need the wrapper that a module has "
            f"got last; got an earlier one, which {other} has replaced. Try the model that {other} "
            "returned."
        )


def call_when_accumulated(param: nn.Parameter, method: Callable[..., None], *args: Any) -> None:
    """Call `method(*args)` each time backward has accumulated into `param.grad`.

    A hook lives as long as its parameter. It holds the wrapper, whose bound method this is, weakly,
    so that the parameter does not keep it alive; one that is replaced is not called.
    """
    weak_method = weakref.WeakMethod(method)

    def hook(_param: Tensor) -> None:
        method = weak_method()
        if method is not None and not replaced_by(method.__self__):  # type: ignore[attr-defined]
            with torch.no_grad():
                method(*args)

    param.register_post_accumulate_grad_hook(hook)


def tensors_kept(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors with a gradient that a forward has left in attributes, such as a loss.

    Backward may begin with one of them, before the gradient of the modules' output is known.
    """
    own = (
        value for part in modules for name, value in vars(part).items() if name not in OF_MODULES
    )
    return [one for value in own for one in tensors_within(value) if one.grad_fn is not None]


def tensors_within(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in lists, dicts and objects, `depth` of them in each other."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, CLOSED):
        inside = value if isinstance(value, list | tuple | dict) else getattr(value, "__dict__", ())
        for one in inside.values() if isinstance(inside, dict) else inside:
            yield from tensors_within(one, depth - 1)


def need_plain_backward(where: str, attempt: str) -> None:
    """Check that backward computes no graph of its own: with it, it would use freed weights later.

    Raises:  CourseError if it does
    """
    if torch.is_grad_enabled():
        raise CourseError(
            f"{where}: need a backward that computes gradients only; got create_graph=True, whose "
            f"second backward would find weights freed. Try {attempt}."
        )


def all_zero(params: Iterable[Tensor]) -> bool:
    """Return whether zero_grad() has cleared the gradients of these parameters."""
    return not any(param.grad is not None and bool(param.grad.any()) for param in params)


def not_cleared(
    where: str, call: str, after: str = "a backward that raised an error"
) -> CourseError:
    """Return the error for gradients that should have been cleared; `call` would have done it."""
    return CourseError(
        f"rank {dist.get_rank()}, {where}: need {call} after {after}; got gradients that the next "
        f"ones would be added to. Try {call}, which reaches all that {where} holds, before the "
        "next forward."
    )


def require_gradients(missing: Sequence[str], where: str, attempt: str) -> None:
    """Check that no parameter lacks a gradient; `attempt` is what the message proposes.

    Raises:  CourseError that names the missing ones
    """
    if missing:
        raise CourseError(
            f"rank {dist.get_rank()}, {where}: need a gradient for every parameter; got none for "
            f"{some_names(missing)}. Try {attempt}."
        )


def require_known(module: nn.Module, known: Container[Tensor], where: str) -> None:
    """Check that every parameter to train was known when the module was wrapped.

    Raises:  CourseError that names those added or unfrozen since: they would differ between ranks
    """
    named = module.named_parameters()
    late = [name for name, param in named if param.requires_grad and param not in known]
    if late:
        raise CourseError(
            f"rank {dist.get_rank()}, {where}: need the parameters to train when the module is "
            f"wrapped; got {some_names(late)} later. Try to add layers, and requires_grad_(True), "
            f"before {where}(...)."
        )


def used_on_any_rank(used: Sequence[bool], device: torch.device | None, group: Group) -> list[bool]:
    """Return, for each parameter, whether any rank of the group has a gradient for it.

    Cost:    one all_reduce of 1 byte per parameter
    """
    flags = torch.tensor(used, dtype=torch.uint8, device=device)  # [num_params]
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]


def some_names(names: Sequence[str]) -> str:
    """Return the names for an error message: all of up to five, else four and how many more."""
    if len(names) <= 5:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:4])} and {len(names) - 4} more"


def need_dense(grad: Tensor | None, name: str, where: str) -> None:
    """Check that a gradient is not sparse: its numbers are summed with those of other ranks.

    Raises:  CourseError that names its parameter
    """
    if grad is not None and grad.is_sparse:
        raise CourseError(
            f"{where}: need dense gradients; got a sparse one for {name}. "
            "Try sparse=False in its nn.Embedding."
        )


def accumulate(param: nn.Parameter, grad: Tensor) -> None:
    """Add to the gradient of a parameter, and call the hooks on it, as autograd does."""
    for hook in list((param._backward_hooks or {}).values()):  # a hook may remove itself
        other = hook(grad)
        grad = grad if other is None else other
    param.grad = grad if param.grad is None else param.grad.add_(grad)
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        hook(param)
