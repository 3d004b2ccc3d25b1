"""Activation recomputation: save the inputs of a part of the model, recompute the rest in backward.

It trades compute for memory. A recomputed part saves its inputs and the random state; backward runs
its forward again and then its backward. Full recompute saves one tensor per block and runs forward
twice; selective recompute repeats only the attention scores, which are large and cheap. Mixed
precision, the other way to save bytes, is in `mixed_precision.py`. Notebook 03_recompute.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib.core.errors import CourseError
from course_lib.models import BERT, GPT
from course_lib.models.gpt import Attention


def recompute(fn: Callable[..., Any], *args: Any) -> Any:
    """Return fn(*args), saving only args for backward, which calls fn a second time.

    The numbers are those of fn(*args) to the last bit, dropout and autocast included. `fn` returns
    a tensor or a tuple with tensors in it; its parameters get their gradients as usual. Tensors
    that need a gradient have to be args themselves: not in a list, not captured by fn.

    Saves:   the tensors among args and 5 KB of random state
    Cost:    one more forward of fn, during backward
    Raises:  CourseError for a tensor hidden in a list, or another kind of output; in backward,
             under torch.autograd.grad, which cannot reach the parameters of fn
    Source:  Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost), section 4
    """
    for index, arg in enumerate(args):
        if isinstance(arg, list | tuple) and any(isinstance(part, Tensor) for part in arg):
            raise CourseError(
                f"recompute: need tensors as arguments of their own; argument {index} is a "
                f"{type(arg).__name__} with tensors in it. Try recompute(fn, *tensors)."
            )
    if not torch.is_grad_enabled():
        return fn(*args)
    anchor = torch.empty(0, requires_grad=True)  # so that backward runs even if no arg needs a grad
    return _Recompute.apply(fn, anchor, *args)


class _Recompute(torch.autograd.Function):
    """Call of fn whose graph is built only in backward."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], _anchor: Tensor, *args: Any) -> Any:
        """Call fn without recording: its intermediate tensors are freed when it returns."""
        is_tensor = [isinstance(arg, Tensor) for arg in args]
        tensors = [arg for arg, one in zip(args, is_tensor, strict=True) if one]
        ctx.fn, ctx.is_tensor = fn, is_tensor
        ctx.others = [arg for arg, one in zip(args, is_tensor, strict=True) if not one]
        ctx.save_for_backward(*tensors)  # which detects in-place changes
        ctx.set_materialize_grads(False)  # None, not zeros, for an output that nobody used
        ctx.surroundings = _Surroundings.now(tensors)
        with ctx.surroundings.autocast(keep_casts=False):
            return _checked(fn(*args))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Call fn again, now recording, and run the backward of what it recorded."""
        if not torch.autograd._is_checkpoint_valid():
            raise CourseError(
                "recompute: need loss.backward(); got torch.autograd.grad, which cannot reach "
                "the parameters of what is recomputed. Try loss.backward() and param.grad."
            )
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        args = [_leaf(next(tensors)) if one else next(others) for one in ctx.is_tensor]
        with torch.enable_grad(), ctx.surroundings.restored():
            outputs = ctx.fn(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        if used:
            torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])
        return None, None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)


def _leaf(tensor: Tensor) -> Tensor:
    """Return the same numbers as a leaf of a new graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _checked(outputs: Any) -> Any:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    if not any(isinstance(part, Tensor) for part in parts):
        raise CourseError(
            "recompute: need fn to return a tensor or a tuple with tensors in it; got "
            f"{type(outputs).__name__}. Try a tuple."
        )
    return outputs


@dataclass(frozen=True)
class _Surroundings:
    """Random state and autocast: what a function's result depends on besides its arguments."""

    cpu_random: Tensor
    gpu_random: dict[int, Tensor]
    autocasts: dict[str, dict[str, Any]]

    @classmethod
    def now(cls, tensors: Iterable[Tensor]) -> "_Surroundings":
        """Record the current state, of the CPU and of the tensors' GPUs."""
        devices = {tensor.device for tensor in tensors}
        gpus = sorted({device.index for device in devices if device.type == "cuda"})
        return cls(
            torch.get_rng_state(),
            {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus},
            {
                kind: _autocast_of(kind)
                for kind in {"cpu", *(device.type for device in devices)}
                if torch.amp.is_autocast_available(kind)
            },
        )

    @contextmanager
    def autocast(self, *, keep_casts: bool) -> Iterator[None]:
        """Restore autocast.

        Casts of weights that are made while autograd records nothing must not be cached
        (`keep_casts=False`): the next use of the weight would get a copy without a gradient.
        """
        with ExitStack() as stack:
            for kind, was in self.autocasts.items():
                if was["enabled"] or torch.is_autocast_enabled(kind):
                    caches = was["cache_enabled"] and keep_casts
                    stack.enter_context(torch.autocast(kind, **was | {"cache_enabled": caches}))
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore random state and autocast; afterwards the random state is as it was before."""
        with torch.random.fork_rng(devices=list(self.gpu_random)):
            torch.set_rng_state(self.cpu_random)
            for gpu, state in self.gpu_random.items():
                torch.cuda.set_rng_state(state, gpu)
            with self.autocast(keep_casts=True):
                yield


def _autocast_of(kind: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def recompute_none(model: GPT | BERT) -> None:
    """Save all activations: undo the effect of the functions below."""
    vars(model).pop("run_blocks", None)
    for module in model.modules():
        if isinstance(module, Attention):
            vars(module).pop("attend", None)


def recompute_selective(model: GPT | BERT) -> None:
    """Recompute only `Attention.attend` (scores, softmax, dropout): large to save, cheap to redo.

    Source:  Korthikanti et al. 2022 (Reducing Activation Recomputation), section 5
    """
    recompute_none(model)
    for module in model.modules():
        if isinstance(module, Attention):
            vars(module)["attend"] = partial(recompute, module.attend)


def recompute_segments(model: GPT | BERT, num_blocks: int) -> None:
    """Save only the input of every num_blocks-th block, and recompute these blocks together.

    Saves:   ceil(num_layers / num_blocks) block inputs; in backward also num_blocks whole blocks
    Raises:  CourseError if num_blocks is below 1
    """
    _check_every("recompute_segments", num_blocks)
    recompute_none(model)
    vars(model)["run_blocks"] = partial(_run_segments, num_blocks)


def recompute_full(model: GPT | BERT) -> None:
    """Recompute each block by itself: save one tensor per block."""
    recompute_segments(model, 1)


def recompute_some(model: GPT | BERT, every: int) -> None:
    """Recompute every `every`-th block and save the activations of the others.

    Raises: CourseError if `every` is below 1
    """
    _check_every("recompute_some", every)
    recompute_none(model)
    vars(model)["run_blocks"] = partial(_run_some, every)


def _run_segments(num_blocks: int, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for start in range(0, len(blocks), num_blocks):
        x = recompute(_run, list(blocks)[start : start + num_blocks], x)
    return x


def _run_some(every: int, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for index, block in enumerate(blocks):
        x = recompute(block, x) if index % every == 0 else block(x)
    return x


def _run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _check_every(where: str, count: int) -> None:
    if count < 1:
        raise CourseError(f"{where}: need a number of blocks above 0; got {count}. Try 1.")
