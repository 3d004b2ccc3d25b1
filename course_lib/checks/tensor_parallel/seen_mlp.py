"""Observation of the split MLP on one rank, for exercise 2 of 07_tensor_parallel."""

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.tensor_parallel.parts import bytes_kept, changed, is_outside
from course_lib.checks.tensor_parallel.whole_mlp import CASES, NAMES, RATE, Case
from course_lib.core import Event
from course_lib.ranks import record


@dataclass
class Used:
    """The observation by one rank of one split MLP."""

    params: list[Any]
    others: list[str] = field(default_factory=list)
    out: Any = None
    grads: list[Any] = field(default_factory=list)
    x_grad: Any = None
    later: list[Any] = field(default_factory=list)
    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    changed: tuple[str, ...] = ()
    kept_bytes: int = 0
    alive: list[str] = field(default_factory=list)
    outside: bool = False


def use(rank: int, answer: Callable[..., Any]) -> dict[str, Used]:
    """Split each case's MLP; run it forward and backward."""
    del rank
    return {name: _use_one(answer, case) for name, case in CASES.items()}


def _use_one(answer: Callable[..., Any], case: Case) -> Used:
    (up, down), x, above = case.layers, case.x.requires_grad_(), case.above
    for param in (up.bias, down.weight):
        param.grad = torch.ones_like(param)  # the caller's, who is in the middle of a step
    before = _state(up, down, kept=None), _state(up, down, kept=down.bias)
    model, kept_bytes = bytes_kept(functools.partial(answer, up, down))
    params: list[Any] = [getattr(model, name, None) for name in NAMES]
    used = Used(copied(params), kept_bytes=kept_bytes)
    used.others = [
        f"{name} as an nn.Parameter; got {'nothing' if param is None else type(param).__name__}"
        for name, param in zip(NAMES, params, strict=True)
        if not isinstance(param, nn.Parameter)
    ]
    if used.others:
        return used
    with record() as forward:
        out = model(x)
    used.out = copied(out)
    with record() as backward:
        if isinstance(out, Tensor) and out.requires_grad:
            used.outside = is_outside(functools.partial(out.backward, above))
    used.forward, used.backward = calls_of(forward.events), calls_of(backward.events)
    used.x_grad, used.grads = x.grad, copied([param.grad for param in params])
    used.later, frozen_x = _later(model, params, case)
    shared = down.bias is not None and params[3].data_ptr() == down.bias.data_ptr()
    used.changed = changed(
        x=(x, case.x),
        an_x_that_needs_no_gradient=(frozen_x, case.x),
        the_gradient_from_above=(above, case.above),
    )
    if _state(up, down, down.bias if shared else None) != before[shared]:
        used.changed += ("up or down (weights, grad, requires_grad or mode)",)
    weights = {"up": weakref.ref(up.weight), "down": weakref.ref(down.weight)}
    del up, down, param
    if any(weight() is not None for weight in weights.values()):
        gc.collect()
    used.alive = [name for name, weight in weights.items() if weight() is not None]
    return used


def _later(model: nn.Module, params: list[Any], case: Case) -> tuple[list[Any], Tensor]:
    """Do a step of SGD; return the outputs that whole_mlp.LATER names, and the frozen x."""
    frozen_x = case.x
    with torch.no_grad():
        outputs = [model.eval()(frozen_x)]
        for param in params:
            if param.grad is not None:
                param -= RATE * param.grad
    outputs.append(model.train()(case.x.requires_grad_()))
    with torch.no_grad():
        outputs.append(model.eval()(frozen_x))
    return copied([*outputs, model.train()(frozen_x)]), frozen_x


def _state(up: nn.Linear, down: nn.Linear, kept: Any) -> list[Any]:
    """Return what the caller knows of two layers, but for values of a bias that is `kept`."""
    params = [*up.named_parameters(), *down.named_parameters()]
    state = list[Any]([up.training, down.training])
    for name, param in params:
        state += [name, id(param), param.requires_grad]
        if kept is None or param.data_ptr() != kept.data_ptr():
            state += [param.tolist(), None if param.grad is None else param.grad.tolist()]
    return state
