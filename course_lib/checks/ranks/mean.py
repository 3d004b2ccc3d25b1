"""Exercise 3 of 00_ranks: the mean over all ranks, the first collective.

Rank r contributes one * 10**r. In float32 every sum, and every third or quarter of one, is exact,
and no mean is a whole number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import (
    DIGITS_LOST,
    Bytes,
    Demand,
    Numbers,
    Untouched,
)
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.ranks.parts import ELSEWHERE, KEEPS, STILL_THERE, Returned, watch_in_turn

FIRST, SECOND = "3 numbers", "3 other numbers"
INPUTS = {
    FIRST: torch.tensor([1.5, 3.75, 8.25]),
    SECOND: torch.tensor([2.25, -4.5, 0.75]),
    "a matrix of float64": torch.tensor(
        [[1.5, 2.25, 4.5, 0.75, -6.0], [-3.75, 0.1234567, 3.0, 1.25, 9.0]]
    ).double(),
    "1 number": torch.tensor([2.5]),
    "zeros": torch.zeros(2),
    "4 numbers of bfloat16": torch.tensor([1.5, 3.0, -2.5, 8.0]).bfloat16(),
}

SUMMED = Cause("That is the sum; for the mean, divide it by the number of ranks.")
CHANGED = Cause("all_reduce works in place: give it a clone of x.")
ALWAYS_4 = Cause("You divide by 4, which is right on 4 ranks only: use dist.get_world_size().")
BY_LENGTH = Cause("You divide by the size of x: divide by the number of ranks.")
ROUNDED = Cause("`//` rounds down to a whole number; divide with `/`.")
TWICE = Cause("That is divided by the number of ranks twice.")
NOTHING_CAME = Cause("That is this rank's own x, divided or not: nothing came from the others.")
ON_RANK_0 = Cause("Rank 0 is right and this one is not: every rank has to end with the mean.")
ONE_CALL = Cause(
    "all_reduce brings the sum to every rank: give it a tensor of x's shape and dtype, once. "
    "Nobody needs padding, another dtype, or a copy of everybody's tensor."
)
A_VIEW = Cause("A view keeps the whole tensor it was cut from: return a clone.")
ALIASED = Cause(
    "Return a new tensor, also on 1 rank: a later write into the mean must not change x."
)
DTYPE = Cause("The mean has the dtype of x: make every tensor like x, for example with x.clone().")
NOT_WAITED = Cause(
    "async_op=True gives a handle: the sum is there when its wait() returns, not before."
)
LOOK = Cause("Print what you have before and after the all_reduce.")


def _mean(rank: int, answer: Callable[[Tensor], Tensor]) -> dict[str, Returned]:
    return watch_in_turn(answer, {label: [one * 10.0**rank] for label, one in INPUTS.items()})


def _times(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: INPUTS[at.label] * factor(at)


def _rounding(at: At) -> float:
    """Return what the 8 roundings of `x * (1 / p)` on 4 ranks amount to: 1/3 is no float32."""
    return 4 * torch.finfo(INPUTS[at.label].dtype).eps


def _sum(at: At) -> float:
    return sum(10.0**rank for rank in range(at.world_size))


def _own(at: At) -> float:
    return 10.0**at.rank


def _of_the_first_call(at: At) -> Tensor | str:
    return INPUTS[FIRST] * (_sum(at) / at.world_size) if at.label == SECOND else ELSEWHERE


def _each_rounded(at: At) -> Tensor:
    parts = [INPUTS[at.label] * 10.0**rank // at.world_size for rank in range(at.world_size)]
    return torch.stack(parts).sum(0)


def _right_on_rank_0(at: At, got: Any, _item: None) -> bool:
    others = [other.seen.value for other in at.everyone]
    return at.rank > 0 and got.shape == others[0].shape and not torch.equal(got, others[0])


def _sizes(calls: Sequence[Any]) -> str:
    return " and ".join(f"{call.kind} of {call.num_bytes} bytes" for call in calls)


def _gathers_everything(x: Tensor) -> Tensor:
    everybody = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, x)
    return torch.stack(everybody).mean(0)


def _keeps_a_buffer(x: Tensor) -> Tensor:
    mean = _buffers.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(x)
    dist.all_reduce(mean)
    return mean.div_(dist.get_world_size())


def _keeps_the_mean(x: Tensor) -> Tensor:
    mean = x.clone()
    dist.all_reduce(mean)
    return _means.setdefault((x.shape, x.dtype), mean / dist.get_world_size())


_buffers: dict[Any, Tensor] = {}
_means: dict[Any, Tensor] = {}
COPY, CALL, DIVIDE = "x.clone()", "dist.all_reduce(mean)", "mean / dist.get_world_size()"

MEAN = Exercise(
    key="ranks-3",
    title="the mean over all ranks",
    check=OnRanks(
        observe_on_rank=_mean,
        expect=(
            Demand(lambda at: not at.seen.never_waited, "returns before its call ends", NOT_WAITED),
            Numbers(
                "value",
                _times(lambda at: _sum(at) / at.world_size),
                rtol=_rounding,
                dtype=DTYPE,
                causes=(
                    (KEEPS, _of_the_first_call),
                    (ROUNDED, lambda at: _times(_sum)(at) // at.world_size),
                    (ROUNDED, _each_rounded),
                    (TWICE, _times(lambda at: _sum(at) / at.world_size**2)),
                    (SUMMED, _times(_sum)),
                    (NOTHING_CAME, _times(_own)),
                    (NOTHING_CAME, _times(lambda at: _own(at) / at.world_size)),
                    (ALWAYS_4, _times(lambda at: _sum(at) / 4)),
                    (BY_LENGTH, _times(lambda at: _sum(at) / len(INPUTS[at.label]))),
                    (BY_LENGTH, _times(lambda at: _sum(at) / INPUTS[at.label].numel())),
                ),
                otherwise=((_right_on_rank_0, ON_RANK_0),),
                look=LOOK,
            ),
            Untouched(CHANGED),
            Demand(
                lambda at: (
                    len(at.seen.calls) <= 1
                    and all(call.num_bytes <= INPUTS[at.label].nbytes for call in at.seen.calls)
                ),
                lambda at: (
                    f"makes {len(at.seen.calls)} call{'s' * (len(at.seen.calls) > 1)}, "
                    f"{_sizes(at.seen.calls)}; the budget is one call of "
                    f"{INPUTS[at.label].nbytes} bytes"
                ),
                ONE_CALL,
            ),
            Demand(lambda at: not at.seen.aliased, "returns x itself, or a view of it", ALIASED),
            Bytes("held_bytes", lambda at: INPUTS[at.label].nbytes, A_VIEW),
            STILL_THERE,
        ),
        success="The same mean on 1 to 4 ranks, in one call of the size of x; x stays as it was.",
    ),
    wrong=(
        Edit(DIVIDE, "mean", SUMMED),
        Edit(COPY, "x", CHANGED),
        Edit("mean = x", "if dist.get_world_size() == 1:\n    return x\nmean = x", ALIASED),
        Edit(DIVIDE, "mean / 4", ALWAYS_4),
        Edit(
            COPY,
            "x.float() if x.dtype == torch.bfloat16 else x.clone()",
            ONE_CALL,
            also=((DIVIDE, "(mean / dist.get_world_size()).to(x.dtype)"),),
        ),
        Edit(DIVIDE, "mean / len(x)", BY_LENGTH),
        Edit(DIVIDE, "mean / x.numel()", BY_LENGTH),
        Edit(DIVIDE, "mean // dist.get_world_size()", ROUNDED),
        Edit(COPY, "x // dist.get_world_size()", ROUNDED, also=((DIVIDE, "mean"),)),
        Edit(DIVIDE, "mean / dist.get_world_size() ** 2", TWICE),
        Edit(CALL, "pass", NOTHING_CAME),
        Edit(CALL, "dist.reduce(mean, dst=0)", ON_RANK_0),
        Edit(CALL, CALL.replace(")", ", async_op=True)"), NOT_WAITED),
        Own(_gathers_everything, ONE_CALL),
        Own(_keeps_a_buffer, KEEPS),
        Own(_keeps_the_mean, KEEPS),
        Edit(DIVIDE, f"({DIVIDE}).round(decimals=4)", DIGITS_LOST),
        Edit(CALL, "dist.reduce(mean, dst=0)\ndist.broadcast(mean, src=0)", ONE_CALL),
        Edit(COPY, "x.clone().float()", DTYPE),
        Edit(COPY, "x.clone().float()", DIGITS_LOST, also=((DIVIDE, f"({DIVIDE}).to(x)"),)),
        Edit(
            COPY,
            "torch.stack([x, x])[0]",
            A_VIEW,
            also=((DIVIDE, "mean.div_(dist.get_world_size())"),),
        ),
    ),
)
