"""Guarded parameters: code that would take a part of a gradient for all of it is told so.

Before `finish()` each rank has a gradient of its own; under ZeRO and FSDP it has a shard, or
nothing; of a split model it has its part. `clip_grad_norm_` and a GradScaler would find another
norm, or skip another step, on each rank. So a guarded parameter looks at who reads it. Notebooks
05_data_parallel to 10_fsdp.
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch._C import TensorBase
from torch.optim.optimizer import _foreach_supported_types

from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import (
    MODEL_PARALLEL,
    TENSOR_PARALLEL,
    splits_of,
    wrapper_of,
)
from course_lib.data_parallel.elementwise import refuse_whole

CLIP, CLIP_VALUE = "torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"
CLIP_WITH, SCALER = "torch.nn.utils.clip_grads_with_norm_", "torch.amp.GradScaler"
MODULE_CLEAR, STEP = "module.zero_grad()", "optimizer.step()"
TORCH_DDP, FULLY_SHARD = "PyTorch's DistributedDataParallel", "PyTorch's FSDP"
READERS = {  # the code that reads a gradient, or the device as wrappers do, by its qualified name
    "clip_grad_norm_": CLIP,
    "_clip_grads_with_norm_": CLIP_WITH,
    "clip_grad_value_": CLIP_VALUE,
    "GradScaler._unscale_grads_": SCALER,
    "Module.zero_grad": MODULE_CLEAR,
    "DistributedDataParallel.__init__": TORCH_DDP,
    "_move_states_to_device": FULLY_SHARD,
    **{
        one._init_group.__qualname__: STEP
        for one in vars(optim).values()
        if hasattr(one, "_init_group")
    },
    "LBFGS._gather_flat_grad": STEP,
    "SparseAdam.step": STEP,
}
GRAD: Any = vars(TensorBase)["grad"]  # the properties that ours stand in front of
DEVICE: Any = vars(TensorBase)["device"]


class GuardedParameter(nn.Parameter):
    """A parameter of whose gradient this rank has a part; code that needs all of it is refused."""

    engine: ClassVar[str]
    part: ClassVar[str] = "shards"
    instead: ClassVar[Mapping[str, str]]  # what to try, by reader; "": this reader is right

    @property
    def grad(self) -> Tensor | None:
        """The gradient. Raises: CourseError for code that needs all of it"""
        code = (frame := sys._getframe(1)).f_code
        if code.co_qualname in READERS or code.co_name[0] == "<":  # all others fast
            self._check(frame)
        grad = GRAD.__get__(self)
        if grad is None:
            self._check_taken(frame)
        return cast("Tensor | None", grad)

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

    @property
    def is_kept(self) -> bool:
        """Whether a part of its gradient is kept where clearing `grad` does not reach it."""
        return False

    def _check_taken(self, frame: FrameType) -> None:
        """Check that code which finds no gradient does not take this for no gradient at all."""

    def _check(self, frame: FrameType) -> None:
        """Check that the code that reads does not take this part for the whole."""
        name = frame.f_code.co_qualname.partition(".<locals>")[0]  # also in a comprehension
        reader = READERS.get(name)
        if not reader or not self.is_part or (reader == MODULE_CLEAR and not self.is_kept):
            return
        if not frame.f_globals.get("__name__", "").startswith("torch."):  # a learner's own
            return
        if attempt := self.instead.get(reader, f"{self.engine} or {reader} alone"):
            refuse(self.engine, self.part, reader, attempt)


class DDPParameter(GuardedParameter):
    """A parameter whose gradient is this rank's own until `finish()`."""

    engine, part = "DDP", "gradients"
    instead: ClassVar = dict.fromkeys(
        (CLIP, CLIP_WITH, CLIP_VALUE, SCALER, STEP), "model.finish() first, outside of no_sync()"
    )

    @property
    def is_part(self) -> bool:
        """Whether it has a gradient which is not the mean yet."""
        return GRAD.__get__(self) is not None and getattr(wrapper_of(self), "is_unfinished", False)


class OwnGrads:
    """Gradients that are a rank's own, from backward to `finish()`: their parameters are guarded.

    `wrapper` is their DDP. Those of a backward in `no_sync()` are among them.
    """

    def __init__(self, wrapper: nn.Module) -> None:
        self._where, self._params = type(wrapper).__name__, [*wrapper.parameters()]
        self._versions: list[int] = []  # of the parameters, when the first gradient was there

    @property
    def exist(self) -> bool:
        """Whether there is one that nobody has cleared."""
        return bool(self._versions) and any(param.grad is not None for param in self._params)

    def begin(self) -> None:
        """Note that backward has computed one."""
        if not self._versions:
            self._versions = self._versions_now()
            for param in self._params:
                guard(param, DDPParameter)

    def end(self) -> None:
        """Note that all of them are means, or cleared."""
        self._versions = []
        for param in self._params:
            guard(param, nn.Parameter)

    def check_not_stepped(self) -> None:
        """Check that nobody has changed the parameters meanwhile.

        Raises:  CourseError if one has: the replicas would differ
        """
        if self._versions and self._versions_now() != self._versions:
            raise CourseError(
                f"rank {dist.get_rank()}, {self._where}: need finish() after backward; got "
                "parameters that have changed before it. Try model.finish() before the step, and "
                "model.zero_grad() at once for gradients that nobody wants."
            )

    def _versions_now(self) -> list[int]:
        return [param._version for param in self._params]


class PartParameter(GuardedParameter):
    """A shard of tensor parallelism, or a parameter of one of a pipeline's stages."""

    engine, part = "tensor and pipeline parallelism", "gradients"
    instead: ClassVar = {
        **dict.fromkeys(
            (CLIP, CLIP_WITH),
            "clip_grad_norm_across(part, mesh, max_norm) of course_lib.mesh, where mesh is a "
            "RankMesh(Mesh(pp=..., tp=...))",
        ),
        SCALER: "bfloat16, which needs no scaler",
        **dict.fromkeys((CLIP_VALUE, STEP, TORCH_DDP, FULLY_SHARD), ""),
    }
    device = DEVICE  # nobody who asks is refused

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True. An optimizer asks when made. Raises: CourseError if it needs whole tensors"""
        reader = sys._getframe(1).f_locals.get("self")
        if any(way == TENSOR_PARALLEL and len(ranks) > 1 for way, ranks in splits_of(self)):
            refuse_whole(reader, TENSOR_PARALLEL)
        return True


class ReplacedParameter(nn.Parameter):
    """A parameter that a method has replaced by its shard: an optimizer of it would train nothing.

    It gets no gradient any more, and whoever looks for one is told so.
    """

    method, make = "FSDP", "FSDP(module)"

    def _refuse(self, *_: Any) -> None:
        raise CourseError(
            f"{self.method}: need an optimizer of the shards; got one of a parameter that "
            f"{self.method} has replaced by its shard, so it would train nothing. Try model = "
            f"{self.make} first, then the optimizer of model.parameters()."
        )

    grad: Any = property(_refuse, _refuse, _refuse)


class SplitParameter(ReplacedParameter):
    """The same for tensor parallelism."""

    method, make = TENSOR_PARALLEL, "parallelize(model, mesh)"


# otherwise optimizers on GPUs would loop over the parameters
_foreach_supported_types.append(PartParameter)


def refuse(engine: str, part: str, reader: str, attempt: str) -> NoReturn:
    """Raise the error for a reader that takes this rank's part of a gradient for all of it."""
    raise CourseError(
        f"{engine}: need code that knows of the {part} of all ranks; got {reader}, "
        f"which sees this rank's alone. Try {attempt}."
    )


def guard(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Make a plain parameter one of these kinds, in place; no part of a split model is plain."""
    if type(param) is nn.Parameter or isinstance(param, GuardedParameter):
        if kind is nn.Parameter and is_part_of_split(param):
            kind = PartParameter
        param.__class__ = kind


def is_part_of_split(param: nn.Parameter) -> bool:
    """Return whether other ranks have other parts of the model, or of this parameter."""
    return any(way in MODEL_PARALLEL and len(ranks) > 1 for way, ranks in splits_of(param))
