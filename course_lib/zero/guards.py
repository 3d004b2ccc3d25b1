"""Guards: code of PyTorch that would take a part of a gradient for all of it is told so.

An optimizer that looks at whole matrices, `clip_grad_norm_` and a GradScaler read the parameters'
gradients. Under ZeRO and FSDP these are shards, or nothing: each rank would find another norm, or
skip another step. PyTorch's own wrappers, applied to the same module, would average or shard what
is sharded already. So a guarded parameter looks at who reads it. Notebooks 09_zero, 10_fsdp.
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn, optim
from torch._C import TensorBase
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _foreach_supported_types

from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import splits_of, wrapper_of

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop)  # and their state is simple enough to shard
WHOLE = (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam)  # whole, or sparse, tensors
CLIP, CLIP_VALUE = "torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"
CLIP_WITH, SCALER = "torch.nn.utils.clip_grads_with_norm_", "torch.amp.GradScaler"
TORCH_DDP, FULLY_SHARD = "PyTorch's DistributedDataParallel", "PyTorch's FSDP"
READERS = {  # the code that reads a gradient, or the device as wrappers do, by its qualified name
    "clip_grad_norm_": CLIP,
    "_clip_grads_with_norm_": CLIP_WITH,
    "clip_grad_value_": CLIP_VALUE,
    "GradScaler._unscale_grads_": SCALER,
    "DistributedDataParallel.__init__": TORCH_DDP,
    "_move_states_to_device": FULLY_SHARD,
}
GRAD: Any = vars(TensorBase)["grad"]  # the properties that ours stand in front of
DEVICE: Any = vars(TensorBase)["device"]


class GuardedParameter(nn.Parameter):
    """A parameter of whose gradient this rank has a part; code that needs all of it is refused."""

    engine: ClassVar[str]
    instead: ClassVar[Mapping[str, str]]  # what to try, by reader; "": this reader is right

    @property
    def grad(self) -> Tensor | None:
        """The gradient. Raises: CourseError for code that needs all of it"""
        self._check(sys._getframe(1))
        return cast(Tensor | None, GRAD.__get__(self))

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device. Raises: CourseError for another wrapper, which asks for it when it is made"""
        self._check(sys._getframe(1))
        return cast(torch.device, DEVICE.__get__(self))

    @property
    def is_part(self) -> bool:
        """Whether other ranks have other parts."""
        return True

    def _check(self, frame: FrameType) -> None:
        """Check that the code that reads does not take this part for the whole."""
        name = frame.f_code.co_qualname.partition(".<locals>")[0]  # also in a comprehension
        reader = READERS.get(name)
        if not reader or not self.is_part:
            return
        if not frame.f_globals.get("__name__", "").startswith("torch."):  # a learner's own
            return
        if attempt := self.instead.get(reader, f"{self.engine} or {reader} alone"):
            raise CourseError(
                f"{self.engine}: need code that knows of the shards of all ranks; got {reader}, "
                f"which sees this rank's alone. Try {attempt}."
            )


class ZeROParameter(GuardedParameter):
    """A parameter of a ZeRO engine, which moves its gradient to a flat parameter."""

    engine = "ZeRO"
    instead: ClassVar = {
        **dict.fromkeys((CLIP, CLIP_WITH, CLIP_VALUE), "engine.clip_grad_norm_(max_norm)"),
        SCALER: "bfloat16, which needs no scaler, or DDP and a ShardedOptimizer",
    }

    @property
    def is_part(self) -> bool:
        """Whether an engine steps it: copies have none, and DDP may have replaced it."""
        return hasattr(wrapper_of(self), "flat_params")


class FSDPShard(GuardedParameter):
    """This rank's shard of a parameter under FSDP, which an optimizer steps."""

    engine = "FSDP"
    instead: ClassVar = {
        **dict.fromkeys((CLIP, CLIP_WITH), "model.clip_grad_norm_(max_norm)"),
        CLIP_VALUE: "",
        SCALER: "ShardedGradScaler of torch.distributed.fsdp.sharded_grad_scaler",
    }

    @property
    def is_part(self) -> bool:
        """Whether other ranks have other shards."""
        return any(len(ranks) > 1 for _, ranks in splits_of(self))

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True. An optimizer asks when it is made. Raises: CourseError if it needs whole tensors"""
        reader = sys._getframe(1).f_locals.get("self")
        if isinstance(reader, WHOLE) and self.is_part:
            need_elementwise(type(reader), "FSDP")
        return True


class ReplacedParameter(nn.Parameter):
    """A parameter that FSDP has replaced by a shard: an optimizer made before would train nothing.

    It gets no gradient any more, and whoever looks for one is told so.
    """

    def _refuse(self, *_: Any) -> None:
        raise CourseError(
            "FSDP: need an optimizer of the shards; got one of a parameter that FSDP has replaced "
            "by its shard, so it would train nothing. Try model = FSDP(module) first, then the "
            "optimizer of model.parameters()."
        )

    grad: Any = property(_refuse, _refuse, _refuse)


def guard(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Make a plain parameter one of these kinds, in place."""
    if type(param) is nn.Parameter or isinstance(param, GuardedParameter):
        param.__class__ = kind


def need_elementwise(optimizer_cls: type[Optimizer], where: str = "ShardedOptimizer") -> None:
    """Check that an optimizer steps each number by itself; its class may say so: `elementwise`.

    Raises:  CourseError for one whose step needs whole tensors
    """
    if getattr(optimizer_cls, "elementwise", False):
        return
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, ELEMENTWISE)):
        raise CourseError(
            f"{where}: need an optimizer that steps each number by itself, such as "
            f"{', '.join(cls.__name__ for cls in ELEMENTWISE)}; got "
            f"{getattr(optimizer_cls, '__name__', repr(optimizer_cls))}. A shard holds pieces of "
            "tensors. Try torch.optim.AdamW, or elementwise = True in a class of your own."
        )


# as PyTorch does for its DTensor: otherwise optimizers on GPUs would loop over the shards
_foreach_supported_types.append(FSDPShard)
