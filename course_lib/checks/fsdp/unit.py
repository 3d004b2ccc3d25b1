"""Exercise 1 of 10_fsdp: a module's parameters in one flat parameter, allocated only while used.

The planted mistakes are in `unit_answers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import held_bytes, run
from course_lib.checks.fsdp import unit_answers as planted
from course_lib.checks.fsdp.parts import (
    MODULES,
    NUMBER_BYTES,
    WORLD_SIZES,
    batch,
    calls_in,
    close,
    expect_calls,
    expect_near,
    grad_of,
    not_followed,
    row_bytes,
    row_of,
)
from course_lib.checks.zero.parts import (
    alive_bytes,
    flat,
    only_new,
    shard_numel,
    shard_of,
    unwaited_calls,
)
from course_lib.ranks import Ranks, record

FREE = (
    "Never freed: the flat parameter's storage still has its bytes. Point each parameter at "
    "something empty, then flat.untyped_storage().resize_(0)."
)
SAME = (
    "Autograd has saved views of the flat parameter, and they keep its memory alive, or read what "
    "is no longer there: fill the same tensor again, after resize_, and never make a new one."
)
HOLDS = "Somebody holds the originals: an attribute, a list, or the parameters themselves."
STALE = "That is what the shard was before the optimizer's step: gather self.shard, each time."
NOT_WAITED = "The numbers may come after gather() has returned: call wait() on the handle, in it."
RAISED = (
    "Before it is filled, the flat parameter needs its bytes again: "
    "flat.untyped_storage().resize_, in bytes, not in numbers."
)


@dataclass(frozen=True)
class SampleLayout:
    """A rank and a module, for sentences and sizes."""

    kind: type[nn.Module]
    rank: int
    p: int

    @property
    def row(self) -> Tensor:
        """Return the module's numbers in one flat tensor."""
        return row_of(self.kind)

    @property
    def own_bytes(self) -> int:
        """Return the bytes of a shard."""
        return shard_numel(self.row.numel(), self.p) * NUMBER_BYTES

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of the whole flat parameter."""
        return row_bytes(self.row.numel(), self.p)

    def __str__(self) -> str:
        numel = self.row.numel()
        return f"rank {self.rank} of {self.p}, a unit of {numel} number{'s' * (numel > 1)}"


def _use(rank: int, answer: Callable[..., Any], p: int) -> None:
    for kind in MODULES:
        with only_new():
            _watch(SampleLayout(kind, rank, p), answer)


def _watch(at: SampleLayout, answer: Callable[..., Any]) -> None:
    """Take a unit through all its phases and judge each at once: what comes after would crash."""
    module = at.kind()
    params = list(module.parameters())
    unit = answer(module)
    _expect_shard(unit, at)
    _expect_alive(at, "before the first gather()", at.own_bytes)
    with record() as log, not_followed(at), unwaited_calls() as unwaited:
        unit.gather()
    if unwaited:
        raise CheckFailed(f"{at}: gather() has started {unwaited.popitem()[1]}. {NOT_WAITED}")
    _expect_params(params, at)
    says = "One all_gather of the flat parameter, into it, from self.shard."
    expect_calls(f"{at}, gather()", calls_in(log.events), [("all_gather", at.whole_bytes)], says)
    _expect_alive(at, "while gathered", at.own_bytes + at.whole_bytes)
    kept, grads = _backward(at.rank, unit, module, params)
    if kept:
        why = FREE if alive_bytes(*grads, enough=at.own_bytes) > at.own_bytes else SAME
        raise CheckFailed(f"{at}: free() after forward leaves {kept} bytes of it. {why}")
    _expect_grads(grads, at)
    del grads
    unit.shard.data.add_(1)
    unit.gather()
    _expect_params(params, at, step=1)
    unit.free()
    _expect_alive(at, "after the last free()", at.own_bytes)


def _backward(
    rank: int, unit: Any, module: nn.Module, params: list[nn.Parameter]
) -> tuple[int, list[Tensor]]:
    """Return the flat parameter's bytes that forward saved, and the gradients after backward."""
    rows = {param.untyped_storage()._cdata for param in params}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x, above = batch(rank)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(x.requires_grad_())
    unit.free()
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in saved}
    kept = sum(size for key, size in storages.items() if key in rows)
    saved.clear()
    unit.gather()
    out.backward(above[:, : out.shape[1]])
    grads = [grad_of(param).clone() for param in params]
    for param in params:
        param.grad = None
    unit.free()
    return kept, grads


def check_unit(answer: Callable[..., Any]) -> str:
    """Check 1 to 3 ranks, a tied weight, few numbers: values, messages, bytes, gradients."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            run(ranks, _use, answer, p, on={"raised": RAISED})
    return "Equal shards, one all_gather, the same tensor; between uses it has no bytes."


def _expect_shard(unit: Any, at: SampleLayout) -> None:
    shard = getattr(unit, "shard", None)
    if not isinstance(shard, Tensor):
        raise CheckFailed("need self.shard, a tensor of this rank's numbers; there is none.")
    held = held_bytes(shard)
    if held != shard.nbytes:
        raise CheckFailed(
            f"{at}: the shard is {shard.nbytes} bytes, and lies in {held}: a slice is a view of "
            "the flat parameter, whose bytes free() takes away. Try clone()."
        )
    says = "Numbers shard_slice(rank) of the flat parameter; a shard rounds up, then zeros."
    expect_near(shard.detach(), shard_of(at.row, at.rank, at.p), f"{at}, self.shard", says)


def _expect_params(params: list[nn.Parameter], at: SampleLayout, step: int = 0) -> None:
    when = "gathered after the shard has changed" if step else "gathered"
    parts = at.row.split([param.numel() for param in at.kind().parameters()])
    for got, like, part in zip(params, at.kind().parameters(), parts, strict=True):
        says = _why(flat(params), step, at)
        wanted = part.view(like.shape) + step
        expect_near(got.detach(), wanted, f"{at}, a parameter when {when}", says)


def _why(got: Tensor, step: int, at: SampleLayout) -> str:
    n, row = shard_numel(at.row.numel(), at.p), at.row
    own = torch.zeros_like(row)
    mine = slice(at.rank * n, (at.rank + 1) * n)
    own[mine] = row[mine]
    if got.numel() < row.numel():
        return "It is empty: after the all_gather, param.data = view for each parameter."
    if step and close(got, row):
        return STALE
    if close(got, own):
        return "Only this rank's own part is in it: the others' come with an all_gather."
    if close(got, row):
        return "Each parameter in its own shape: layout.views(flat) has them."
    return (
        "What is sent is self.shard: a flat parameter that was freed has lost its numbers. Then "
        "layout.views(flat) gives the parameters, in their order."
    )


def _expect_alive(at: SampleLayout, when: str, most: int) -> None:
    found = alive_bytes(enough=most)
    if found <= most:
        return
    if most > at.own_bytes:
        says = "Views of the flat parameter need no memory of their own: no clone()."
    elif found >= at.own_bytes + 2 * at.whole_bytes - NUMBER_BYTES * at.p or "last" in when:
        says = FREE
    else:
        says = FREE if found == at.own_bytes + at.whole_bytes else HOLDS
    raise CheckFailed(f"{at}: {found} bytes are alive {when}; need {most}. {says}")


def _expect_grads(grads: list[Tensor], at: SampleLayout) -> None:
    module, (x, above) = at.kind(), batch(at.rank)
    out = module(x)
    out.backward(above[:, : out.shape[1]])
    for got, param in zip(grads, module.parameters(), strict=True):
        expect_near(got, grad_of(param), f"{at}, a gradient after free() and gather()", SAME)


UNIT = Exercise(
    key="fsdp-1",
    title="a flat unit",
    check=check_unit,
    reference=planted.FlatUnit,
    mistakes=planted.mistakes(Mistake),
)
