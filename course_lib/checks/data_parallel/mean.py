"""Exercise 2 of 05_data_parallel: the mean of every gradient over the ranks.

In the second step every gradient of the last rank is zero, in the third one it is nan.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks.data_parallel.parts import (
    BUDGET,
    beyond,
    grads_of,
    module_of,
    pattern,
    properties,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import EVERY_RANK, KEEPS_DTYPE
from course_lib.checks.watch import ALWAYS, CHANGED, UNWAITED, Watch
from course_lib.ranks import record

GRADIENTS, VIEWS = "gradients", "keeps more memory than its own"

SUMMED = Cause("That is the sum: divide it by the number of ranks.")
OF_PARAMS = Cause("You took the mean of the parameters: this is for the gradients.")
OWN = Cause("It is this rank's own: nothing was received, or it was not written to param.grad.")
OWN_DIVIDED = Cause("It is this rank's own, divided: nothing was received from the others.")
ADDED = Cause("The mean was added to this rank's own gradient: put it in its place.")
TWICE = Cause("Divided twice: divide by the number of ranks once.")
LARGEST = Cause("That is the largest one: all_reduce adds up by default.")
COPY_SENT = Cause(
    "contiguous(), flatten() and reshape() copy a transposed gradient, and the copy was reduced: "
    "write the mean back into param.grad."
)
HAS_NONE = Cause(
    "A frozen parameter has no gradient, nor has a trained one that forward did not use: leave out "
    "those whose grad is None."
)
GIVEN_ONE = Cause("A frozen or unused parameter has got a gradient: leave None as it is.")
PARAMS_CHANGED = Cause(
    "Only gradients change here: leave the module, autograd and the random state as they are."
)
VIEW = Cause(
    "A view keeps the whole tensor it was cut from: copy each mean into the gradient that is there."
)
ONCE = Cause(
    "One all-reduce per gradient, in its own dtype, and no other call: tied parameters have one "
    "gradient."
)
LOOK = Cause("Is every parameter in your loop, and only once?")


def _observe(rank: int, answer: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Run the answer on three steps' gradients, of this rank's numbers."""
    watch, module = Watch(), module_of(rank)
    for number in range(3):
        is_last = rank == dist.get_world_size() - 1
        scale = (number + 2) * 10.0**rank
        if is_last and number:
            scale = (0.0, math.nan)[number - 1]
        for index, (name, param) in enumerate(module.named_parameters()):
            if param.requires_grad and not name.startswith("unused"):
                param.grad = torch.empty_like(param).copy_(pattern(index, param) * scale)
        sizes = [param.nbytes for param in module.parameters() if param.grad is not None]
        with record() as log, watch.step(f"step {number + 1}", module=module) as step:
            answer(module)
        torch.set_grad_enabled(True)
        grads = {name: grad for name, grad in grads_of(module).items() if grad is not None}
        step.show(
            **{GRADIENTS: grads_of(module), BUDGET: beyond(log.events, "all_reduce", sizes)},
            **{VIEWS: [n for n, x in grads.items() if x.untyped_storage().nbytes() > x.nbytes]},
        )
    return watch.seen


def _views_of_one(module: nn.Module) -> None:
    trained = [param for param in module.parameters() if param.grad is not None]
    flat = torch.cat([param.grad.flatten() for param in trained])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([param.numel() for param in trained])
    for param, part in zip(trained, parts, strict=True):
        param.grad = part.view(param.shape)


SUMS, DIVIDES = "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size()"
HAS_GRAD = "if param.grad is not None:"
COPIED = "mean = param.grad.clone()\ndist.all_reduce(mean)"

MEAN = Exercise(
    key="data_parallel-2",
    title="mean gradient",
    check=ByExample(
        observe_on_rank=_observe,
        facets=(UNWAITED, GRADIENTS, *ALWAYS, VIEWS, BUDGET),
        looks=(
            *((GRADIENTS, LOOK), (CHANGED, PARAMS_CHANGED), (VIEWS, VIEW), (BUDGET, ONCE)),
            ("mismatch", EVERY_RANK),
        ),
        success="The mean of each gradient on 1 to 4 ranks, one all-reduce each.",
    ),
    wrong=(
        Edit(DIVIDES, "pass", SUMMED),
        Edit(SUMS, COPIED, OWN, also=((DIVIDES, "mean /= dist.get_world_size()"),)),
        Edit(SUMS, f"param.grad = param.data.clone()\n{SUMS}", OF_PARAMS),
        Edit(SUMS, "pass", OWN_DIVIDED),
        Edit(SUMS, "param.grad /= dist.get_world_size()\ndist.all_reduce(param.grad)", TWICE),
        Edit(HAS_GRAD, "if True:", HAS_NONE),
        Edit(
            HAS_GRAD,
            "if param.grad is None:\n    param.grad = torch.zeros_like(param)\nif True:",
            GIVEN_ONE,
        ),
        Edit(
            "param in module.parameters()",
            "_, param in module.named_parameters(remove_duplicate=False)",
            ONCE,
        ),
        Edit(SUMS, "dist.all_reduce(param.grad, op=dist.ReduceOp.MAX)", LARGEST),
        Edit(SUMS, "flat = param.grad.contiguous()\ndist.all_reduce(flat)", COPY_SENT),
        Edit(
            SUMS,
            "mean = param.grad / dist.get_world_size()\ndist.all_reduce(mean)",
            ADDED,
            also=((DIVIDES, "param.grad += mean"),),
        ),
        Own(_views_of_one, VIEW),
        Edit(DIVIDES, f"{DIVIDES}\nmodule.eval()", PARAMS_CHANGED),
        *KEEPS_DTYPE,
        *properties("not waited", "hides nan", "only if any", "only on rank 0", "four ranks"),
    ),
)
