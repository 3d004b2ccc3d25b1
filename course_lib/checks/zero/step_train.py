"""Run zero-2 on a rank: steps of one object, alone or with another one beside it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from course_lib.checks.ddp.parts import Bag
from course_lib.checks.on_ranks import calls_of
from course_lib.checks.zero.parts import (
    BESIDE,
    alive_bytes,
    flat,
    like,
    named,
    only_new,
    same,
    shard_numel,
    telling,
    unwaited_calls,
)
from course_lib.core import Event
from course_lib.ranks import record

LR, MOMENTUM = 0.5, 0.9
# the gradients of a step are its times the slopes; float32 has not the digits of the fourth
TIMES = (1.0, 2.0, 0.0, 3.0 + 2**-30, math.nan)
BESIDE_END = 7.0 - LR * len(TIMES)  # each number of the other one: its gradient is 1


@dataclass(frozen=True)
class PlainModel:
    """Model that is trained: the second parameter is frozen, the first one tied."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    beside: bool = False  # another one is trained in turn

    def made(self) -> Bag:
        """Return the model, whose numbers are all different."""
        module = Bag(self.sizes, odd=True)
        with torch.no_grad():
            for i, param in enumerate(module.weights):
                param.copy_(module.pattern(i) + 10 * i)
        return module.to(self.dtype)

    @property
    def numel(self) -> int:
        """Return how many numbers are trained."""
        return sum(self.sizes) - self.sizes[1]

    def __str__(self) -> str:
        words = f"{self.numel} trained numbers in {named(self.dtype)}"
        return f"{words}, {BESIDE}" if self.beside else words


MODELS = (
    PlainModel((3, 2, 1, 4, 5), torch.float64),
    PlainModel((3, 2, 1, 4, 5), torch.float64, beside=True),
    PlainModel((1, 2, 1), torch.float64),  # fewer numbers than ranks
    PlainModel((3, 2, 1, 4, 5), torch.bfloat16),
)


@dataclass
class Trained:
    """The training of one model on one rank; `rows` are the trained numbers, also at the start."""

    model: PlainModel
    rows: list[Tensor]
    calls: list[Event]
    unwaited: list[str]
    frozen_changed: bool
    grads_changed: bool
    grad_mode: bool
    stepped: list[torch.dtype]
    num_state: int
    alive_bytes: int
    beside: Tensor | None  # the numbers of the other one, if there is one


def train(_rank: int, answer: Callable[..., Any], model: PlainModel) -> dict[str, Trained]:
    """Take some steps, those of another object in turn; then look at what is alive."""
    module, made, grads_changed = model.made(), list[Optimizer](), False
    trained, frozen = [module.weights[i] for i in module.trained], module.weights[1]
    before = frozen.detach().clone()

    def make_optimizer(params: Any) -> Optimizer:
        made.append(torch.optim.SGD(params, lr=LR, momentum=MOMENTUM))
        return made[-1]

    with telling(str(model)), only_new(), unwaited_calls() as unwaited:
        stepper = answer(module, make_optimizer)
        rows, calls = [flat(trained)], list[Event]()
        beside = Bag((1, 1, 7)).to(model.dtype) if model.beside else None
        other = beside and answer(beside, lambda params: torch.optim.SGD(params, lr=LR))
        for times in TIMES:
            grads = [like(module.weights[i], module.slope(i) * times) for i in module.trained]
            for param, grad in zip(trained, grads, strict=True):
                param.grad = grad.clone()
            with record() as log:
                stepper.step()
            calls += calls_of(log.events)
            _step_beside(beside, other)
            grads_changed |= any(map(_has_changed, trained, grads))
            rows.append(flat(trained))
        grad_mode = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        numbers = flat([beside.weights[i] for i in beside.trained]) if beside else None
        del grads, grad, other, beside, param
        module.zero_grad()
        known = [] if numbers is None else [numbers]
        enough = 3 * shard_bytes(model, dist.get_world_size())
        alive = alive_bytes(module, *rows, before, *known, enough=enough)
    dtypes, num_states = _held(made)
    seen = Trained(
        model,
        rows,
        calls,
        list(unwaited.values()),
        not torch.equal(before, frozen.detach()),
        grads_changed,
        grad_mode,
        dtypes,
        num_states,
        alive,
        numbers,
    )
    return {str(model): seen}


def _step_beside(beside: Bag | None, other: Any) -> None:
    """Take a step of the other object, with gradients of 1."""
    for param in beside.parameters() if beside else ():
        param.grad = torch.ones_like(param)
    if other:
        other.step()


def _held(made: Sequence[Optimizer]) -> tuple[list[torch.dtype], int]:
    """Return the dtypes of what the optimizers step, and how many numbers they keep of it."""
    groups = [group for optimizer in made for group in optimizer.param_groups]
    states = [state for optimizer in made for state in optimizer.state.values()]
    num_states = sum(one.numel() for state in states for one in state.values() if one is not None)
    return [param.dtype for group in groups for param in group["params"]], num_states


def _has_changed(param: Tensor, grad: Tensor) -> bool:
    """Return whether the gradient is another one, or was written to, the same numbers even."""
    return param.grad is None or not same(param.grad, grad) or param.grad._version > 0


def shard_bytes(model: PlainModel, p: int) -> int:
    return shard_numel(model.numel, p) * model.dtype.itemsize
