"""Exercise 3 of 00_ranks: the mean over all ranks, the first collective.

Rank r contributes one * 10**r. No mean is a whole number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.cases import NO_RESULT
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import EVERY_RANK, KEEPS_DTYPE, REDUCES
from course_lib.checks.ranks.parts import KEEPS, VALUE, call_in_turn
from course_lib.checks.watch import ALWAYS, CHANGED, UNWAITED
from course_lib.core import Event

INPUTS = {
    "3 numbers": torch.tensor([1.5, 3.75, 8.25]),
    "3 other numbers": torch.tensor([2.25, -4.5, 0.75]),
    "a matrix of float64": torch.tensor(
        [[1.5, 2.25, 4.5, 0.75, -6.0], [-3.75, 0.1234567, 3.0, 1.25, 9.0]]
    ).double(),
    "1 number": torch.tensor([2.5]),
    "a nan": torch.tensor([torch.nan, 1.5]),
}
ON_OTHERS, IN_BFLOAT16 = "zeros on rank 0", "4 numbers of bfloat16"
SMALL = torch.tensor([12.0, 24.0, -24.0, 48.0]).bfloat16()  # times r + 1, its means are exact
ALIAS, MORE_BYTES, BUDGET = "shares its memory with x", "bytes kept beyond those of x", "budget"

SUMMED = Cause("That is the sum; for the mean, divide it by the number of ranks.")
X_CHANGED = Cause(
    "all_reduce works in place: give it a clone of x, and leave the rest as it was, too."
)
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
LOOK = Cause("Print what you have before and after the all_reduce.")


def _observe(rank: int, answer: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    inputs = {label: [one * 10.0**rank] for label, one in INPUTS.items()}
    inputs |= {ON_OTHERS: [torch.full((2,), 1.5 * rank)], IN_BFLOAT16: [SMALL * (rank + 1)]}
    return call_in_turn(answer, inputs, _facets)


def _facets(calls: Sequence[Event], result: Any, x: Tensor) -> dict[str, Any]:
    sizes = [call.num_bytes for call in calls]
    budget = {"calls too many": len(sizes) - 1, "bytes too many": max(sizes, default=0) - x.nbytes}
    memory = result.untyped_storage() if isinstance(result, Tensor) else torch.UntypedStorage()
    return {
        BUDGET: {what: max(0, count) for what, count in budget.items()},
        ALIAS: memory.data_ptr() == x.untyped_storage().data_ptr(),
        MORE_BYTES: max(0, memory.nbytes() - x.nbytes),
    }


# --- wrong answers


def _gathers_everything(x: Tensor) -> Tensor:
    everybody = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, x)
    return torch.stack(everybody).mean(0)


def _keeps_a_buffer(x: Tensor) -> Tensor:
    mean = _buffers.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(x)
    dist.all_reduce(mean)
    return mean.div_(dist.get_world_size())


_buffers: dict[Any, Tensor] = {}
COPY, CALL, DIVIDE = "x.clone()", "dist.all_reduce(mean)", "mean / dist.get_world_size()"
IN_PLACE = (DIVIDE, "mean.div_(dist.get_world_size())")

MEAN = Exercise(
    key="ranks-3",
    title="the mean over all ranks",
    check=ByExample(
        observe_on_rank=_observe,
        facets=(UNWAITED, VALUE, CHANGED, BUDGET, ALIAS, MORE_BYTES, *ALWAYS),
        looks=(
            *((VALUE, LOOK), (CHANGED, X_CHANGED), (BUDGET, ONE_CALL), (ALIAS, ALIASED)),
            *((MORE_BYTES, A_VIEW), ("mismatch", EVERY_RANK)),
        ),
        success="The same mean on 1 to 4 ranks, in one call of the size of x; x stays as it was.",
    ),
    wrong=(
        Edit(DIVIDE, "mean", SUMMED),
        Edit(COPY, "x", X_CHANGED),
        Edit("mean = x", "if dist.get_world_size() == 1:\n    return x\nmean = x", ALIASED),
        Edit(DIVIDE, "mean / len(x)", BY_LENGTH),
        Edit(DIVIDE, "mean / x.numel()", BY_LENGTH),
        Edit(DIVIDE, "mean // dist.get_world_size()", ROUNDED),
        Edit(DIVIDE, "mean / dist.get_world_size() ** 2", TWICE),
        Edit(CALL, "pass", NOTHING_CAME),
        Edit(CALL, "pass", NOTHING_CAME, also=((DIVIDE, "mean"),)),
        Edit(CALL, "dist.reduce(mean, dst=0)", ON_RANK_0),
        Edit(COPY, "x.clone().float()", DTYPE),
        Edit(COPY, "torch.stack([x, x])[0]", A_VIEW, also=(IN_PLACE,)),
        Edit("return mean", "mean", NO_RESULT),
        Own(_gathers_everything, ONE_CALL),
        Own(_keeps_a_buffer, KEEPS),
        *KEEPS_DTYPE,
        *(one for one in REDUCES if one.name != "waits at once"),
    ),
)
