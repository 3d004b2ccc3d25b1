"""Exercise 4 of 05_data_parallel: the weight of a batch among batches of other sizes.

Rank r's loss is 2 * 10**r, so that a wrong number tells whose loss and which weight are in it.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.cases import NO_RESULT
from course_lib.checks.data_parallel.parts import BUDGET, beyond, properties
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import NAN
from course_lib.checks.watch import ALWAYS, CHANGED, UNWAITED, Watch
from course_lib.ranks import record

PLAIN, ZERO_LOSS, DIVERGED, HALF = "losses", "zero losses", "diverged losses", "float16 losses"
LOSSES = {
    PLAIN: (2.0, 20.0, 200.0, 2000.0),
    ZERO_LOSS: (0.0,) * 4,
    DIVERGED: (math.inf, math.nan),
    HALF: (0.0625, 0.125),  # times their items, which are powers of 2, they are exact
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
        (HALF, (98_304, 32_768)),
        (PLAIN, (0, 0)),
    ),
    1: ((PLAIN, (4,)), (ZERO_LOSS, (4,)), (PLAIN, (0,))),
}
SCALED, SLOPE, LOSS_GRAD = "scaled loss", "its gradient by the loss", "gradient of loss"

EQUAL = Cause("Every rank counts the same: an item of a short batch weighs more.")
NOT_TIMES_P = Cause("The mean over ranks divides by p once more: multiply by p.")
TIMES_ITEMS = Cause("Multiplied by its items: now divide by the items of all ranks.")
ONE_BATCH = Cause("Divided by the items of the longest batch: take the sum over all ranks.")
OWN_ITEMS = Cause("Divided by this rank's own items: all_reduce brings the sum of all.")
UPSIDE_DOWN = Cause("The fraction is upside down: b_r belongs in the numerator.")
COUNT_ROUNDED = Cause(
    "Right for few items only: count them in whole numbers, not in the dtype of the loss (bfloat16 "
    "has all whole numbers up to 256, float16 up to 2048)."
)
LOOK = Cause("Scale this rank's own loss, by b_r * p / (the sum of all b_r).")
NAN_OF_NONE = Cause("The mean over no items is 0/0, and 0 * nan is nan: return a zero.")
NO_ITEMS = Cause(
    "A rank may have no items, and perhaps none has any: 0/0 is nan or an error, and the loss of "
    "no items is nan. Return a zero before you divide."
)
NO_TENSOR = Cause("Return a tensor that backward can follow, also where there are no items.")
ONE_NUMBER = Cause(
    "A loss has no dimensions: divide by total.item(), or by a total without brackets."
)
NO_GRAPH = Cause(
    "Scale the loss itself, and keep its graph: no detach(), no item(), no new tensor."
)
EVERY_RANK = Cause(
    "A rank without items still has to count: all ranks call all_reduce, whatever they have."
)
LOSS_CHANGED = Cause(
    "Do not change loss itself, which the caller prints: return a new tensor. Leave the rest, too "
    "(autograd, the random state)."
)
NO_BACKWARD = Cause("Leave backward() to the caller.")
ONCE = Cause("One all_reduce of one number is enough, the sum of all num_items.")


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    """Weigh batches of several sizes, of losses that are numbers, zero, nan and infinite."""
    watch = Watch()
    for kind, sizes in SIZES[dist.get_world_size()]:
        losses, dtype = LOSSES[kind], torch.float16 if kind == HALF else torch.float64
        words = [f"{loss:g}" if n else "nan" for loss, n in zip(losses, sizes, strict=False)]
        name = kind if kind == HALF else PLAIN
        leaf = torch.tensor(losses[rank], dtype=dtype, requires_grad=True)
        loss = (leaf * torch.ones(min(sizes[rank], 8), dtype=dtype)).mean()
        label = f"{name} {', '.join(words)} of {', '.join(map(str, sizes))} items"
        with record() as log, watch.step(label, loss=loss) as step:
            scaled = answer(loss, sizes[rank])
        step.show(**{SCALED: scaled, LOSS_GRAD: leaf.grad, SLOPE: _slope(scaled, leaf)})
        step.show(**{BUDGET: beyond(log.events, "all_reduce", [8])})
    return watch.seen


def _slope(scaled: Any, leaf: Tensor) -> Tensor | None:
    if isinstance(scaled, Tensor) and scaled.requires_grad:
        with contextlib.suppress(RuntimeError):  # the answer has used up the graph
            return torch.autograd.grad(scaled.sum(), leaf, allow_unused=True)[0]
    return None


FACTOR = "num_items * dist.get_world_size() / total.item()"
SUMS, ZERO = "dist.all_reduce(total)", "loss.nan_to_num() * 0"

WEIGHT = Exercise(
    key="data_parallel-4",
    title="uneven batch",
    check=ByExample(
        observe_on_rank=_observe,
        worlds=(4, 3, 2, 1),
        facets=(UNWAITED, SCALED, LOSS_GRAD, SLOPE, *ALWAYS, BUDGET),
        rtol=1e-6,  # the weight may be a number in float32
        looks=(
            *(("hang", EVERY_RANK), (SCALED, LOOK), (LOSS_GRAD, NO_BACKWARD), (SLOPE, NO_GRAPH)),
            *((CHANGED, LOSS_CHANGED), (BUDGET, ONCE)),
        ),
        success="Each item counts the same in batches of 0 to 98,304, for 8 bytes.",
    ),
    wrong=(
        Edit(FACTOR, "1", EQUAL),
        Edit(" * dist.get_world_size()", "", NOT_TIMES_P),
        Edit(FACTOR, "num_items", TIMES_ITEMS),
        Edit("num_items == 0", "False", NAN_OF_NONE),
        Edit(SUMS, f"{SUMS}\nshare = num_items / total.item()", NO_ITEMS),
        Edit("loss * (", "loss.nan_to_num() * (", NAN),
        Edit(SUMS, f"if num_items:\n    {SUMS}", EVERY_RANK),
        Edit("loss * (", "loss.detach() * (", NO_GRAPH),
        Edit(ZERO, "0.0", NO_TENSOR),
        Edit("(total)", "(total, op=dist.ReduceOp.MAX)", ONE_BATCH),
        Edit(SUMS, "pass", OWN_ITEMS),
        Edit(FACTOR, "total.item() / num_items / dist.get_world_size()", UPSIDE_DOWN),
        Edit("(num_items)", "(num_items, dtype=loss.dtype)", COUNT_ROUNDED),
        Edit(".item())", ")", ONE_NUMBER, also=(("tensor(num_items)", "tensor([num_items])"),)),
        Edit("return loss * (", "loss * (", NO_RESULT),
        Edit("loss * (", "loss.mul_(", LOSS_CHANGED),
        Edit(
            "return loss * (",
            "scaled = loss * (",
            NO_BACKWARD,
            also=((".item())", ".item())\nscaled.backward(retain_graph=True)\nreturn scaled"),),
        ),
        Edit(
            "torch.tensor(num_items)",
            "torch.tensor([num_items] * 8)",
            ONCE,
            also=(("total.item", "total[0].item"),),
        ),
        *properties("not waited", "four ranks"),
    ),
)
