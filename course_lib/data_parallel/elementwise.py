"""Optimizers on shards: only those that step each number by itself have the numbers of one process.

A shard of ZeRO, FSDP or tensor parallelism holds pieces of tensors; Muon needs whole matrices,
Adafactor the means of their rows and columns. Notebooks 07_tensor_parallel, 09_zero, 10_fsdp.
"""

from typing import Any

from torch import optim
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from course_lib.core.errors import CourseError

ELEMENTWISE = (
    *(SGD, Adam, AdamW, Adagrad, RMSprop),
    *(optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.Rprop),
)
WHOLE = (optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam)  # whole, or sparse, tensors


def steps_as_torch(optimizer_cls: type[Optimizer]) -> bool:
    """Return whether the step of an optimizer is one of PyTorch's, and not a learner's own."""
    return optimizer_cls.step.__module__.startswith("torch.optim.")


def need_elementwise(optimizer_cls: type[Optimizer], where: str = "ShardedOptimizer") -> None:
    """Check that an optimizer steps each number by itself; its class may say so: `elementwise`.

    Raises:  CourseError for one whose step needs whole tensors
    """
    if getattr(optimizer_cls, "elementwise", False):
        return
    known = isinstance(optimizer_cls, type) and issubclass(optimizer_cls, ELEMENTWISE)
    if not (known and steps_as_torch(optimizer_cls)):
        name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
        raise CourseError(
            f"{where}: need an optimizer that steps each number by itself, such as "
            f"{', '.join(cls.__name__ for cls in ELEMENTWISE[:5])}; got "
            f"{name}{' with a step of its own' if known else ''}. A shard holds pieces of "
            "tensors. Try torch.optim.AdamW, or elementwise = True in a class of your own."
        )


def refuse_whole(optimizer: Any, where: str) -> None:
    """Refuse an optimizer of PyTorch that is known to need whole tensors.

    Raises:  CourseError for one
    """
    if isinstance(optimizer, WHOLE):
        need_elementwise(type(optimizer), where)
