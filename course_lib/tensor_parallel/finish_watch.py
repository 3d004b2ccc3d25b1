"""A watch over `finish_gradients`: forgotten, or called twice, it would train another model.

One parameter stands for all of them: a hook on it sees every backward, and one on its
module the forward after a step. Notebook 07_tensor_parallel.
"""

from collections.abc import Container, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from course_lib.core.errors import CourseError

# beside the parameters, which are saved without them
_WATCHES: MutableMapping[Tensor, "FinishWatch"] = WeakIdKeyDictionary()


class FinishWatch:
    """Watches one parameter whose gradient `finish_gradients` sums.

    stepped_at   its version at the last backward that is not finished; None: all are
    finished     its gradient as `finish_gradients` has left it, and the version of that
    """

    def __init__(self) -> None:
        self.stepped_at: int | None = None
        self.finished: tuple[Tensor | None, int] = (None, -1)

    def after_backward(self, param: nn.Parameter) -> None:
        """Note a gradient. Raises: CourseError if it was added to one that is finished"""
        if self._is_finished(param, adds=1):
            raise _called("a backward after it")
        self.stepped_at = param._version

    def before_finish(self, param: nn.Parameter) -> None:
        """Check that the gradient is not finished yet. Raises: CourseError if it is"""
        if self._is_finished(param, adds=0):
            raise _called("a second call")

    def after_finish(self, param: nn.Parameter) -> None:
        """Note that the gradient is finished."""
        self.stepped_at = None
        if param.grad is not None:
            self.finished = param.grad, param.grad._version

    def before_forward(self, module: nn.Module, _args: Any) -> None:
        """Check that no step has used unfinished gradients. Raises: CourseError if one has"""
        changed = any(
            self.stepped_at not in (None, param._version)
            for param, _ in _watched(module.parameters(recurse=False))
        )
        if changed and torch.is_grad_enabled():
            raise _called("a step without it")

    def _is_finished(self, param: nn.Parameter, adds: int) -> bool:
        grad, version = self.finished
        return grad is not None and param.grad is grad and grad._version == version + adds


def watch_finish(model: nn.Module, params: Container[nn.Parameter]) -> None:
    """Watch the first trained one of the parameters whose gradients have to be finished."""
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.requires_grad and param in params:
                _WATCHES[param] = watch = FinishWatch()
                param.register_post_accumulate_grad_hook(watch.after_backward)
                module.register_forward_pre_hook(watch.before_forward)
                return


@contextmanager
def finishing(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Note that the block finishes the gradients. Raises: CourseError if they are finished"""
    found = _watched(params)
    for param, watch in found:
        watch.before_finish(param)
    yield
    for param, watch in found:
        watch.after_finish(param)


def _watched(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, FinishWatch]]:
    """Return the parameter that is watched, if it is one of these, with its watch."""
    pairs = ((param, _WATCHES.get(param)) for param in params)
    return [(param, watch) for param, watch in pairs if watch is not None]


def _called(got: str) -> CourseError:
    return CourseError(
        f"rank {dist.get_rank()}, tensor parallel: need finish_gradients(model) once per step, "
        f"after the last backward; got {got}. Try backward(), finish_gradients(model), step()."
    )
