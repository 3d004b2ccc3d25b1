"""Observation of f and g on one rank, for exercise 1 of 07_tensor_parallel."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import come_late, watched_handles
from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.tensor_parallel.parts import changed, is_outside
from course_lib.checks.tensor_parallel.whole_pair import USES, Use, product
from course_lib.core import Event
from course_lib.ranks import record

Part = Callable[[Tensor], Tensor]


@dataclass
class Used:
    """The observation by one rank of one use.

    `around` is the gradient of x + together(x, nothing), `twice` that of two uses of one x;
    `num_runs` is how often part ran, forward and backward.
    """

    inside: Any
    out: Any
    part_grad: Any
    x_grad: Any
    around: Any
    twice: Any
    forward: list[Event]
    backward: list[Event]
    changed: tuple[str, ...]
    never_waited: int
    outside: bool
    num_runs: int


def observe_uses(rank: int, answer: Callable[[Tensor, Part], Any]) -> dict[str, Used]:
    """Run each use forward and backward; in both of the first one, the last rank comes late."""
    used = dict[str, Used]()
    for name, use in USES.items():
        with torch.set_grad_enabled(not use.no_grad):
            used[name] = _use_one(rank, answer, use, late=not used)
    return used


def _use_one(rank: int, answer: Callable[[Tensor, Part], Any], use: Use, late: bool) -> Used:
    x, up, seen = use.x.clone().requires_grad_(not use.frozen), use.up.clone(), dict[str, Any]()
    part, outside = _watched_part(use.matrix(rank).requires_grad_(), seen), False
    with watched_handles() as open_ones:
        if late:
            come_late(rank)
        with record() as forward:
            out = answer(x, part)
        kept = copied(out)
        if late:
            come_late(rank)
        with record() as backward:
            if isinstance(out, Tensor) and out.requires_grad:
                outside = is_outside(partial(out.backward, up))
    around = twice = None
    if isinstance(out, Tensor):
        around = _grad(use, lambda x: x + answer(x, _same))
        twice = _grad(use, lambda x: answer(x, _same) + answer(x, lambda inside: inside * 3.0))
    returned = seen.get("out", use.x), product(use.x, use.matrix(rank)) if "out" in seen else use.x
    return Used(
        inside=seen.get("inside"),
        out=kept,
        part_grad=seen.get("grad"),
        x_grad=x.grad,
        around=around,
        twice=twice,
        forward=calls_of(forward.events),
        backward=calls_of(backward.events),
        changed=changed(
            x=(x, use.x),
            what_part_returned=returned,
            the_gradient_from_above=(up, use.up),
            the_sum_returned_before=(out, kept) if isinstance(out, Tensor) else (x, use.x),
        ),
        never_waited=len(open_ones),
        outside=outside,
        num_runs=seen.get("num_runs", 0),
    )


def _watched_part(matrix: Tensor, seen: dict[str, Any]) -> Part:
    """Return a part that notes what it gets, what it returns, and the gradient of that."""

    def part(inside: Tensor) -> Tensor:
        seen["num_runs"] = seen.get("num_runs", 0) + 1
        seen["inside"], seen["out"] = copied(inside), product(inside, matrix)
        if seen["out"].requires_grad:
            seen["out"].register_hook(lambda grad: seen.__setitem__("grad", copied(grad)))
        return seen["out"]

    return part


def _same(inside: Tensor) -> Tensor:
    return inside.view_as(inside)


def _grad(use: Use, loss: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the gradient of a new x, which needs one if that of the use does."""
    x = use.x.clone().requires_grad_(not use.frozen)
    out = loss(x)
    if out.requires_grad:
        up = torch.ones_like(out)
        is_outside(partial(out.backward, up))  # PyTorch's warning is told elsewhere
    return x.grad
