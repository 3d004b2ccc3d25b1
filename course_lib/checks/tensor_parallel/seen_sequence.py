"""Observation of the pair on one rank, for exercise 6 of 07_tensor_parallel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import come_late, watched_handles
from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.tensor_parallel.parts import changed
from course_lib.checks.tensor_parallel.whole_sequence import USES, SequenceUse
from course_lib.core import Event
from course_lib.ranks import record

Part = Callable[[Tensor], Tensor]
Region = Callable[[Tensor, Part, int], Any]


@dataclass
class SequenceUsed:
    """The observation by one rank of one use; `twice` is the gradient of two uses of one x."""

    inside: Any
    out: Any
    part_grad: Any
    x_grad: Any
    twice: Any
    forward: list[Event]
    backward: list[Event]
    changed: tuple[str, ...]
    never_waited: int
    num_runs: int


def observe_sequence(rank: int, answer: Region) -> dict[str, SequenceUsed]:
    """Run each use forward and backward; in both of the first one, the last rank comes late."""
    used = dict[str, SequenceUsed]()
    for name, use in USES.items():
        with torch.set_grad_enabled(not use.no_grad):
            used[name] = _use_one(rank, answer, use, late=not used)
    return used


def _use_one(rank: int, answer: Region, use: SequenceUse, late: bool) -> SequenceUsed:
    p, seq = dist.get_world_size(), use.x.shape[1]
    x, up = use.own(use.x, p, rank), use.own(use.up, p, rank)
    given, above = x.clone(), up.clone()
    x.requires_grad_(not use.frozen)
    seen = dict[str, Any]()
    part = _watched_part(use.matrix(rank).requires_grad_(), use.x, seen)
    with watched_handles("all_gather") as gathers, watched_handles("reduce_scatter") as scatters:
        if late:
            come_late(rank)
        with record() as forward:
            out = answer(x, part, seq)
        kept = copied(out)
        if late:
            come_late(rank)
        with record() as backward:
            fits = _fits(out, up) and _fits(seen.get("inside"), use.x)
            if fits and out.requires_grad:
                out.backward(up)
    x_grad = copied(x.grad)
    returned = seen.get("out", use.x), seen.get("returned", use.x)
    return SequenceUsed(
        inside=seen.get("inside"),
        out=kept,
        part_grad=seen.get("grad"),
        x_grad=x_grad,
        twice=_grad_of_two(use, answer, given) if fits else None,
        forward=calls_of(forward.events),
        backward=calls_of(backward.events),
        changed=changed(
            x=(x, given),
            what_part_returned=returned,
            the_gradient_from_above=(up, above),
            the_sum_returned_before=(out, kept) if isinstance(out, Tensor) else (x, given),
        ),
        never_waited=len(gathers) + len(scatters),
        num_runs=seen.get("num_runs", 0),
    )


def _watched_part(matrix: Tensor, x: Tensor, seen: dict[str, Any]) -> Part:
    """Return a part that notes what it gets, what it returns, and the gradient of that."""

    def part(inside: Tensor) -> Tensor:
        seen["num_runs"] = seen.get("num_runs", 0) + 1
        seen["inside"] = copied(inside)
        seen["out"] = (inside if _fits(inside, x) else inside.sum().expand_as(x)) @ matrix
        seen["returned"] = copied(seen["out"])
        if seen["out"].requires_grad:
            seen["out"].register_hook(lambda grad: seen.__setitem__("grad", copied(grad)))
        return seen["out"]

    return part


def _fits(got: Any, need: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == need.shape


def _grad_of_two(use: SequenceUse, answer: Region, given: Tensor) -> Tensor | None:
    """Return the gradient of a new x that is used twice: as it is, and times 3."""
    x, seq = given.clone().requires_grad_(not use.frozen), use.x.shape[1]
    out = answer(x, lambda inside: inside * 1.0, seq)
    out = out + answer(x, lambda inside: inside * 3.0, seq)
    if out.requires_grad:
        out.backward(torch.ones_like(out))
    return x.grad
