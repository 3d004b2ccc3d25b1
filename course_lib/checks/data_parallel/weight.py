"""Exercise 4 of 05_data_parallel: the weight of a batch among batches of other sizes.

Rank r's loss is 2 * 10**r, so that a wrong number tells whose loss and which weight are in it.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.data_parallel.parts import OTHER_CALL, budget
from course_lib.checks.ddp.parts import come_late, watched_handles
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
from course_lib.ranks import record

PLAIN, ZERO_LOSS, DIVERGED, HALF = "losses", "zero losses", "diverged losses", "float16 losses"
LOSSES = {
    PLAIN: (2.0, 20.0, 200.0, 2000.0),
    ZERO_LOSS: (0.0,) * 4,
    DIVERGED: (math.inf, math.nan),
    HALF: (0.0625, 0.125),  # times 60,000 items they still fit
}
SIZES: dict[int, tuple[tuple[str, Sequence[int]], ...]] = {
    4: ((PLAIN, (3, 3, 3, 1)), (PLAIN, (0, 0, 5, 0)), (ZERO_LOSS, (3, 3, 3, 1))),
    3: ((PLAIN, (2, 0, 4)), (PLAIN, (0, 7, 2)), (ZERO_LOSS, (2, 0, 4))),
    2: (
        (PLAIN, (3, 5)),
        (PLAIN, (70_000, 3_000)),
        (ZERO_LOSS, (3, 5)),
        (DIVERGED, (1, 1)),
        (PLAIN, (3, 1)),  # each number of items has come before, with another total
        (HALF, (60_000, 40_000)),
        (PLAIN, (0, 0)),
    ),
    1: ((PLAIN, (4,)), (ZERO_LOSS, (4,)), (PLAIN, (0,))),
}
ROUNDING, HALF_ROUNDING = 1e-6, 1e-2  # the weight may be a number in float32

EQUAL = Cause("Every rank counts the same: an item of a short batch weighs more.")
NOT_TIMES_P = Cause("The mean over ranks divides by p once more: multiply by p.")
TIMES_ITEMS = Cause("Multiplied by its items: now divide by the items of all ranks.")
ONE_BATCH = Cause(
    "Divided by the items of one batch, rank 0's or the longest: take the sum over all ranks."
)
OWN_ITEMS = Cause("Divided by this rank's own items: all_reduce brings the sum of all.")
UPSIDE_DOWN = Cause("The fraction is upside down: b_r belongs in the numerator.")
TIMES_FOUR = Cause("Multiplied by 4: use the number of ranks, whatever it is.")
ROUNDED = Cause("Rounded down: divide with /, not with //.")
NOT_TIMES_ITEMS = Cause("Divided by all items, but not multiplied by this rank's items and by p.")
COUNT_ROUNDED = Cause(
    "Right for few items only: count them in whole numbers, not in the dtype of the loss (bfloat16 "
    "has all whole numbers up to 256, float16 up to 2048)."
)
CACHED = Cause(
    "That is the total of an earlier call: this rank had as many items then, the others had not. "
    "Count anew in every call."
)
LOOK = Cause("Scale this rank's own loss, by b_r * p / (the sum of all b_r).")
NAN_OF_NONE = Cause("The mean over no items is 0/0, and 0 * nan is nan: return a zero.")
HIDDEN = Cause(
    "The loss of real items is nan or infinite, as of a model that has diverged: scale it like any "
    "other, without nan_to_num or clamp, or nobody would notice. Only no items count zero."
)
NO_ITEMS = Cause(
    "A rank may have no items, and perhaps none has any: 0/0 is nan or an error, and the loss of "
    "no items is nan. Return a zero before you divide."
)
NO_TENSOR = Cause("Return a tensor that backward can follow, also where there are no items.")
ONE_NUMBER = Cause(
    "A loss has no dimensions: divide by total.item(), or by a total without brackets."
)
NO_GRAPH = Cause(
    "Keep the graph of the loss: no detach(), no item(), no new tensor, and "
    "leave backward() to the caller."
)
OTHER_SLOPE = Cause("The value is right, its gradient is not: scale the loss itself.")
EVERY_RANK = Cause(
    "A rank without items still has to count: all ranks call all_reduce, whatever they have."
)
NOT_WAITED = Cause("With async_op=True the sum has only begun: call wait() on what it returns.")
CALLERS = Cause(
    "Do not change loss itself, which the caller prints: return a new tensor, and leave backward() "
    "to the caller."
)
ONCE = Cause("One number is enough: the sum of all num_items.")


@dataclass
class Weighed:
    """Result for the loss of one rank: the scaled loss, and `slope`, its gradient by the loss."""

    sizes: Sequence[int]
    losses: Sequence[float]
    dtype: torch.dtype
    scaled: Any
    slope: Any
    touched: str
    calls: list[Event]
    never_waited: int


def _weigh(rank: int, answer: Callable[..., Any]) -> dict[str, Weighed]:
    """Weigh batches of several sizes, of losses that are numbers, zero, nan and infinite."""
    cases = dict[str, Weighed]()
    for kind, sizes in SIZES[dist.get_world_size()]:
        if not cases:
            come_late(rank)
        losses, dtype = LOSSES[kind], torch.float16 if kind == HALF else torch.float64
        words = [f"{loss:g}" if n else "nan" for loss, n in zip(losses, sizes, strict=False)]
        name = kind if kind == HALF else PLAIN
        where = f"{name} {', '.join(words)} of {', '.join(map(str, sizes))} items"
        cases[where] = _one(answer, rank, sizes, losses, dtype)
    return cases


def _one(
    answer: Callable[..., Any],
    rank: int,
    sizes: Sequence[int],
    losses: Sequence[float],
    dtype: torch.dtype,
) -> Weighed:
    leaf = torch.tensor(losses[rank], dtype=dtype, requires_grad=True)
    loss = (leaf * torch.ones(min(sizes[rank], 8), dtype=dtype)).mean()
    before = loss.detach().clone()
    with record() as log, watched_handles() as open_ones:
        got = answer(loss, sizes[rank])
    touched = "" if leaf.grad is None else "backward has been called"
    if not loss.isclose(before, 0, 0, equal_nan=True):
        touched = "loss has changed"
    slope = None
    if isinstance(got, Tensor) and got.requires_grad:
        with contextlib.suppress(RuntimeError):  # the answer has used up the graph
            (slope,) = torch.autograd.grad(got.sum(), leaf, allow_unused=True)
    got = got.detach().clone() if isinstance(got, Tensor) else got
    return Weighed(sizes, losses, dtype, got, slope, touched, calls_of(log.events), len(open_ones))


def _loss(at: At) -> float:
    return at.seen.losses[at.rank] if _mine(at) else 0.0


def _mine(at: At) -> int:
    return at.seen.sizes[at.rank]


def _share(at: At) -> float:
    return _mine(at) / max(1, sum(at.seen.sizes))


def _number(at: At, value: float) -> Tensor:
    return torch.tensor(value, dtype=at.seen.dtype)


def _rounding(at: At) -> float:
    return HALF_ROUNDING if at.seen.dtype == torch.float16 else ROUNDING


def _earlier_share(at: At) -> float:
    """Return the share by the total of the first call in which the rank had as many items."""
    cases = (sizes for _, sizes in SIZES[at.world_size])
    first = next(sizes for sizes in cases if sizes[at.rank] == _mine(at))
    return _mine(at) / max(1, sum(first))


def _times(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: _number(at, _loss(at) * factor(at))


def _hides(at: At, got: Tensor, _item: Any) -> bool:
    return not math.isfinite(_loss(at)) and bool(got.isfinite())


def _mean_of_all(loss: Tensor, num_items: int) -> Tensor:
    both = torch.stack([loss.nan_to_num() * num_items, torch.tensor(float(num_items))])
    total = both.detach().clone()
    dist.all_reduce(total)
    return total[0] / total[1] + 0 * both[0]


FACTOR = "num_items * dist.get_world_size() / total.item()"
SUMS, ZERO = "dist.all_reduce(total)", "loss.nan_to_num() * 0"

WEIGHT = Exercise(
    key="data_parallel-4",
    title="uneven batch",
    check=OnRanks(
        observe_on_rank=_weigh,
        worlds=(4, 3, 2, 1),
        trouble=(("hang", "", EVERY_RANK), ("raised", "ZeroDivisionError", NO_ITEMS)),
        expect=(
            Demand(
                lambda at: not at.seen.never_waited, "an all-reduce was not waited for", NOT_WAITED
            ),
            Numbers(
                "scaled",
                _times(lambda at: _share(at) * at.world_size),
                rtol=_rounding,
                what="the scaled loss",
                shape=ONE_NUMBER,
                predicates=(
                    (
                        lambda _at, got, _item: got is not None and not torch.is_tensor(got),
                        NO_TENSOR,
                    ),
                    (lambda at, got, _item: not sum(at.seen.sizes) and got.isnan(), NO_ITEMS),
                    (lambda at, got, _item: not _mine(at) and got.isnan(), NAN_OF_NONE),
                    (_hides, HIDDEN),
                ),
                causes=(
                    (EQUAL, _times(lambda at: min(1, _mine(at)))),
                    (CACHED, _times(lambda at: _earlier_share(at) * at.world_size)),
                    (NOT_TIMES_P, _times(_share)),
                    (TIMES_ITEMS, _times(_mine)),
                    (ONE_BATCH, _times(lambda at: _mine(at) / max(1, at.seen.sizes[0]))),
                    (ONE_BATCH, _times(lambda at: _mine(at) / max(1, *at.seen.sizes))),
                    (
                        ONE_BATCH,
                        _times(lambda at: at.world_size * _mine(at) / max(1, *at.seen.sizes)),
                    ),
                    (OWN_ITEMS, _times(lambda at: at.world_size * min(1, _mine(at)))),
                    (
                        UPSIDE_DOWN,
                        _times(lambda at: sum(at.seen.sizes) / max(1, _mine(at) * at.world_size)),
                    ),
                    (TIMES_FOUR, _times(lambda at: 4 * _share(at))),
                    (ROUNDED, _times(lambda at: _share(at) * at.world_size // 1)),
                    (NOT_TIMES_ITEMS, _times(lambda at: 1 / max(1, sum(at.seen.sizes)))),
                ),
                otherwise=((lambda at, _got, _item: max(at.seen.sizes) > 256, COUNT_ROUNDED),),
                look=LOOK,
            ),
            Demand(lambda at: at.seen.slope is not None, "no gradient comes to the loss", NO_GRAPH),
            Demand(lambda at: not at.seen.touched, lambda at: at.seen.touched, CALLERS),
            Numbers(
                "slope",
                lambda at: _number(at, _share(at) * at.world_size),
                rtol=_rounding,
                what="the gradient by the loss",
                predicates=((lambda at, *_: not math.isfinite(_loss(at)), HIDDEN),),
                look=OTHER_SLOPE,
            ),
            *budget("all_reduce", [8], ONCE),
        ),
        success="Each item counts the same in batches of 0 to 70,000, for 8 bytes.",
    ),
    wrong=(
        Edit(FACTOR, "1", EQUAL),
        Edit(" * dist.get_world_size()", "", NOT_TIMES_P),
        Edit(FACTOR, "num_items", TIMES_ITEMS),
        Own(_mean_of_all, LOOK),
        Edit("num_items == 0", "False", NAN_OF_NONE),
        Edit(SUMS, f"{SUMS}\nshare = num_items / total.item()", NO_ITEMS),
        Edit(SUMS, f"if dist.get_world_size() == 1:\n    return loss * 1\n{SUMS}", NO_ITEMS),
        Edit(
            f"return {ZERO}",
            "loss = loss.nan_to_num()",
            NO_ITEMS,
            also=((f"({FACTOR})", "num_items * dist.get_world_size() / total"),),
        ),
        Edit("loss * (", "loss.nan_to_num() * (", HIDDEN),
        Edit("loss * (", "loss.nan_to_num(posinf=float('inf')) * (", HIDDEN),
        Edit("loss * (", "loss.clamp(max=6e4) * (", HIDDEN),
        Edit(SUMS, f"if num_items:\n    {SUMS}", EVERY_RANK),
        Edit("loss * (", "loss.detach() * (", NO_GRAPH),
        Edit(ZERO, "loss.new_zeros((), requires_grad=True)", NO_GRAPH),
        Edit(ZERO, "0.0", NO_TENSOR),
        Edit(
            SUMS,
            "dist.broadcast(total, src=0)\ntotal.clamp_(min=1)",
            ONE_BATCH,
            also=((" * dist.get_world_size()", ""),),
        ),
        Edit(
            SUMS,
            "dist.all_reduce(total, op=dist.ReduceOp.MAX)",
            ONE_BATCH,
            also=((" * dist.get_world_size()", ""),),
        ),
        Edit("(total)", "(total, op=dist.ReduceOp.MAX)", ONE_BATCH),
        Edit(SUMS, "pass", OWN_ITEMS),
        Edit("dist.get_world_size()", "4", TIMES_FOUR),
        Edit(" / total", " // total", ROUNDED),
        Edit(FACTOR, "total.item() / num_items / dist.get_world_size()", UPSIDE_DOWN),
        Edit(FACTOR, "1 / total.item()", NOT_TIMES_ITEMS),
        Edit(
            SUMS,
            "counts = [torch.zeros_like(total) for _ in range(dist.get_world_size())]\n"
            "dist.all_gather(counts, total)\ntotal = sum(counts)",
            OTHER_CALL,
        ),
        Edit(
            "torch.tensor(num_items)",
            "torch.tensor([num_items] * 8)",
            ONCE,
            also=(("total.item", "total[0].item"),),
        ),
        Edit("(num_items)", "(num_items, dtype=torch.bfloat16)", COUNT_ROUNDED),
        Edit("(num_items)", "(num_items, dtype=loss.dtype)", COUNT_ROUNDED),
        Edit(
            "loss, num_items):",
            "loss, num_items, totals={}):",
            CACHED,
            also=(
                (SUMS, f"if num_items not in totals:\n    {SUMS}\n    totals[num_items] = total"),
                ("/ total", "/ totals[num_items]"),
            ),
        ),
        Edit("num_items == 0", "num_items <= 1 and loss.isnan()", HIDDEN),
        Edit("(total)", "(total, async_op=True)", NOT_WAITED),
        Edit("loss * (", "loss.mul_(", CALLERS),
        Edit(
            "return loss * (",
            "with torch.no_grad():\n    loss *= (",
            CALLERS,
            ((".item())", ".item())\nreturn loss"),),
        ),
        Edit(".item())", ")", ONE_NUMBER, also=(("tensor(num_items)", "tensor([num_items])"),)),
        Edit("num_items == 0", "num_items == 0 or loss == 0", OTHER_SLOPE),
        Edit(
            "return loss * (",
            "scaled = loss * (",
            CALLERS,
            also=((".item())", ".item())\nscaled.backward(retain_graph=True)\nreturn scaled"),),
        ),
    ),
)
