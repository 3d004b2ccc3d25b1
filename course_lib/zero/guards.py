"""Guards of shards: code of PyTorch that would take one for the whole is told so.

An optimizer that looks at whole matrices, `clip_grad_norm_` and a GradScaler would each compute
with this rank's shard alone. PyTorch's own wrappers, applied to the same module, would average or
shard what is sharded already. Notebooks 09_zero, 10_fsdp.
"""

import sys
from typing import Any, ClassVar

from torch import nn, optim
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _foreach_supported_types

from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import splits_of, wrapper_of
from course_lib.data_parallel.guarded import (
    CLIP,
    CLIP_VALUE,
    CLIP_WITH,
    SCALER,
    GuardedParameter,
)

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop)  # and their state is simple enough to shard
WHOLE = (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam)  # whole, or sparse, tensors


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
