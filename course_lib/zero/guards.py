"""Guards of shards: code of PyTorch that would take one for the whole is told so.

An optimizer that looks at whole matrices, `clip_grad_norm_` and a GradScaler would each compute
with this rank's shard alone. PyTorch's own wrappers, applied to the same module, would average or
shard what is sharded already. Notebooks 09_zero, 10_fsdp.
"""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types

from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import splits_of, wrapper_of
from course_lib.data_parallel.elementwise import need_elementwise, refuse_whole, steps_as_torch
from course_lib.data_parallel.guarded import (
    CLIP,
    CLIP_VALUE,
    CLIP_WITH,
    DEVICE,
    MODULE_CLEAR,
    SCALER,
    STEP,
    GuardedParameter,
    refuse,
)

PASSIVE = (Tensor.grad.__get__, Tensor.requires_grad_)  # type: ignore[union-attr]


class Away(nn.Parameter):
    """A parameter whose values are not here: whatever computes with it is told so."""

    needs: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, list | tuple) else [result]
        if func not in PASSIVE and any(isinstance(one, Tensor) for one in found):
            raise CourseError(cls.needs)
        return result


class AwayParam(Away):
    """What a module has in forward in the place of a shard, while its unit is not gathered."""

    needs = (
        "FSDP: need weights inside the forward of their unit, where they are gathered; got one "
        "that is used outside. Try units= with a module that has both, or that leave it to the "
        "root."
    )


class ZeROParameter(GuardedParameter):
    """A parameter of a ZeRO engine, which moves its gradient to a flat parameter."""

    engine = "ZeRO"
    instead: ClassVar = {
        **dict.fromkeys((CLIP, CLIP_WITH, CLIP_VALUE), "engine.clip_grad_norm_(max_norm)"),
        SCALER: "bfloat16, which needs no scaler, or DDP and a ShardedOptimizer",
        MODULE_CLEAR: "engine.zero_grad()",
        STEP: "engine.step()",
    }

    @property
    def is_part(self) -> bool:
        """Whether an engine steps it: copies have none, and DDP may have replaced it."""
        return hasattr(wrapper_of(self), "flat_params")

    @property
    def is_kept(self) -> bool:
        """Whether the engine holds gradients to step; after the step it asks to be cleared."""
        return any(one.holds_grads and not one.stepped for one in wrapper_of(self).flat_params)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True. An optimizer asks when made. Raises: CourseError for another than the engine's"""
        reader = sys._getframe(1).f_locals.get("self")
        is_other = isinstance(reader, Optimizer) and not getattr(reader, "flat_params", ())
        if is_other and self.is_part:
            refuse("ZeRO", "shards", f"{type(reader).__name__}(params)", self.instead[STEP])
        return True

    def _check_taken(self, frame: FrameType) -> None:
        if frame.f_globals.get("__name__", "").startswith(("torch.", "course_lib.")):
            return
        engine = wrapper_of(self)
        if self.requires_grad and any(x.holds_grads for x in getattr(engine, "flat_params", ())):
            raise CourseError(
                "ZeRO: need code that knows of the shards of all ranks; got a reader of "
                "param.grad, which the engine has moved to its shards. Try "
                "engine.clip_grad_norm_(max_norm), or param.register_hook for each gradient."
            )


class FSDPShard(GuardedParameter):
    """This rank's shard of a parameter under FSDP, which an optimizer steps."""

    engine = "FSDP"
    instead: ClassVar = {
        **dict.fromkeys((CLIP, CLIP_WITH), "model.clip_grad_norm_(max_norm)"),
        **dict.fromkeys((CLIP_VALUE, STEP), ""),
        SCALER: "ShardedGradScaler of torch.distributed.fsdp.sharded_grad_scaler",
    }

    @property
    def is_part(self) -> bool:
        """Whether other ranks have other shards."""
        return any(len(ranks) > 1 for _, ranks in splits_of(self))

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True. An optimizer asks when made. Raises: CourseError if it may need whole tensors"""
        reader = sys._getframe(1).f_locals.get("self")
        if isinstance(reader, Optimizer) and self.is_part:
            refuse_whole(reader, "FSDP")
            if not steps_as_torch(type(reader)):
                need_elementwise(type(reader), "FSDP")
        return True


class FSDPGrad(Tensor):
    """The gradient of a shard, of which other ranks have other parts."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device. Raises: CourseError for get_total_norm, which asks for it first"""
        frame = sys._getframe(1)
        if frame.f_code.co_qualname == "_get_total_norm":
            refuse("FSDP", "shards", "torch.nn.utils.get_total_norm", FSDPShard.instead[CLIP])
        return cast(torch.device, DEVICE.__get__(self))

    def norm(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: it would be that of this rank's rows."""
        refuse("FSDP", "shards", "grad.norm()", FSDPShard.instead[CLIP])

    def __deepcopy__(self, _memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # a plain tensor


def refuse_gradient(shard: nn.Parameter, name: str) -> Any:
    """Refuse a gradient that autograd computes for a shard: it is not the mean over ranks.

    Return the node that accumulates it, which keeps its hook as long as it is kept.
    """

    def refuse(_grads: Any) -> None:
        raise CourseError(
            "FSDP: need computations with weights inside the forward of their unit, where they are "
            f"gathered; got one with this rank's shard of {name}. Try to call the whole model "
            "instead of a part of it, and weight_decay in the optimizer for an L2 term."
        )

    if not (shard.is_floating_point() or shard.is_complex()):
        return None
    trains = shard.requires_grad
    node = get_gradient_edge(shard.requires_grad_(True)).node
    node.register_prehook(refuse)
    shard.requires_grad_(trains)  # a frozen one may train later
    return node


# as PyTorch does for its DTensor: otherwise optimizers on GPUs would loop over the shards
_foreach_supported_types.append(FSDPShard)
