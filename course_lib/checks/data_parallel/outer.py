"""Exercise 6 of 05_data_parallel: the outer step of DiLoCo.

Every start is a multiple of 1, 2, 3 ... In round 3 the last rank has not moved, in round 4 it has
nan.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.data_parallel.parts import BUDGET, FINE, beyond, properties
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, EVERY_RANK
from course_lib.checks.watch import ALWAYS, CHANGED, UNWAITED, Watch
from course_lib.ranks import record

NAMES = ["the vector", "the transposed matrix", "the single number"]
ROUNDS = (
    "round 1",
    "round 2",
    "round 3, the last rank has not moved",
    "round 4, the last rank has nan",
    "another model's round 1",
)
FIRST_OF_A_MODEL = (0, 4)
STARTS, PARAMS = "starts", "params"
GRADIENT, STEPS = "outer gradient in outer.step()", "calls of outer.step()"
MEMORY, INNER_GRADS = "in other memory", "param.grad"

SIGN = Cause(
    "The outer gradient has the wrong sign, and the step goes back. An optimizer subtracts its "
    "gradient: it is the start minus the parameters."
)
SUMMED = Cause("The outer gradient is a sum over the ranks: divide it by their number.")
OWN = Cause("The outer gradient is this rank's own: nothing was received from the others.")
AVERAGED = Cause(
    "That is the mean of the parameters, as in local SGD: the outer optimizer has taken no step."
)
NO_STEP = Cause(
    "The starts have not moved, and the work of the round is lost: give outer the gradients in "
    "start.grad, and call outer.step() on every rank."
)
TOO_OFTEN = Cause("Each step moves all starts: call it once, after the loop that sets gradients.")
PLAIN = Cause(
    "That is a step of plain SGD: outer may have momentum, or be another optimizer. Call "
    "outer.step()."
)
ACCUMULATED = Cause(
    "The outer gradient of the round before is still in it: put the new one into start.grad, "
    "instead of adding it."
)
INNER = Cause(
    "That is made of param.grad, the gradient of the last inner step. The outer gradient is the "
    "start minus the parameters at the round's end."
)
LEAF = Cause("Autograd forbids writing to a parameter: work under torch.no_grad().")
OTHER_MEMORY = Cause(
    "Not in place, or parameter and start now share their memory, and the next inner step would "
    "move both. Use param.copy_(start)."
)
BY_HAND = Cause(
    "outer may be any optimizer, with a state of its own: let it step, once, instead of computing "
    "its step yourself."
)
STEPS_APART = Cause(
    "The ranks step apart, and the mean of their steps is right for SGD alone, not for Adam: "
    "average the gradients first, then call outer.step()."
)
ONCE = Cause(
    "One all-reduce per tensor, in its own dtype, and no other call; the new starts are equal "
    "without another."
)
LOOK = Cause("Write down one round for one number and two ranks: start, two ends, gradient, step.")
NEW_STARTS = Cause(
    "The next round begins from the new starts, on every rank: copy each into its parameter, after "
    "outer.step()."
)


def _patterns() -> list[Tensor]:
    """Return the starts of a model: 1, 2, 3 ... in tensors of three kinds."""
    matrix = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2).t()
    starts = [torch.arange(1.0, 4.0, dtype=torch.float64), matrix, torch.tensor(2.0).double()]
    return [start * FINE for start in starts]


def _way(rank: int, number: int) -> float:
    """Return how far a rank's inner steps go in a round, in patterns."""
    if rank == dist.get_world_size() - 1 and number in (2, 3):
        return (0.0, math.nan)[number - 2]
    return (number + 1) * 10.0**rank


def _observe(
    rank: int, answer: Callable[..., Any], lr: float = 0.5, momentum: float = 0.75
) -> dict[str, Any]:
    """Run the rounds of two models; the inner steps are a subtraction."""
    watch, starts, params = Watch(), list[Tensor](), list[Tensor]()
    for number, label in enumerate(ROUNDS):
        if number in FIRST_OF_A_MODEL:
            starts = _patterns()
            params = [nn.Parameter(start.clone()) for start in starts]
            outer = torch.optim.SGD(starts, lr=lr, momentum=momentum, nesterov=momentum > 0)
        for param, pattern in zip(params, _patterns(), strict=True):
            param.data.sub_(pattern * _way(rank, number))
            param.grad = pattern / 4  # of the last inner step
        _round(watch, label, answer, starts, params, outer)
    return watch.seen


def _round(
    watch: Watch,
    label: str,
    answer: Callable[..., Any],
    starts: list[Tensor],
    params: list[Tensor],
    outer: torch.optim.Optimizer,
) -> None:
    given, tensors, gradients = ([*starts], [*params]), [*starts, *params], list[Any]()
    memory = [tensor.data_ptr() for tensor in tensors]

    def note(*_given: Any) -> None:
        gradients.append([None if start.grad is None else start.grad.clone() for start in starts])

    hook = outer.register_step_pre_hook(note)
    with record() as log, watch.step(label, starts=given[0], params=given[1]) as step:
        answer(*given, outer)
    hook.remove()
    torch.set_grad_enabled(True)
    names = zip([*(f"the start of {name}" for name in NAMES), *NAMES], tensors, memory, strict=True)
    numbers = tuple(f"{one}[" for one in (STARTS, PARAMS))  # which are compared within rounding
    step.shown[CHANGED] = [one for one in step.shown[CHANGED] if not one.startswith(numbers)]
    step.show(
        **{STARTS: _named(starts), PARAMS: _named(params)},
        **{INNER_GRADS: _named([param.grad for param in params])},
        **{GRADIENT: _named(gradients[-1]) if gradients else None, STEPS: len(gradients)},
        **{MEMORY: [name for name, tensor, at in names if tensor.data_ptr() != at]},
        **{BUDGET: beyond(log.events, "all_reduce", [tensor.nbytes for tensor in starts])},
    )


def _named(tensors: list[Any]) -> dict[str, Any]:
    return dict(zip(NAMES, tensors, strict=True))


# --- wrong answers


def _averaged(starts: list[Tensor], params: list[Tensor], _outer: Any) -> None:
    with torch.no_grad():
        for start, param in zip(starts, params, strict=True):
            dist.all_reduce(param.data)
            param /= dist.get_world_size()
            start.copy_(param)


WAY, SUMS = "start.grad = start - param", "dist.all_reduce(start.grad)"
DIVIDES, STEP, COPIES = "start.grad /= dist.get_world_size()", "outer.step()", "param.copy_(start)"
AVERAGES = "dist.all_reduce(start)\nstart /= dist.get_world_size()"

OUTER = Exercise(
    key="data_parallel-6",
    title="outer step of DiLoCo",
    library=("course_lib.data_parallel.local_sgd:outer_step",),
    check=ByExample(
        observe_on_rank=_observe,
        runs=lambda _p: ({}, {"lr": 1.0, "momentum": 0.0}),
        facets=(UNWAITED, STARTS, PARAMS, MEMORY, *ALWAYS, INNER_GRADS, STEPS, GRADIENT, BUDGET),
        rtol=1e-11,  # differences of starts lose a few digits
        looks=(
            *((STARTS, LOOK), (PARAMS, NEW_STARTS), (MEMORY, OTHER_MEMORY)),
            *((INNER_GRADS, CALLERS), (STEPS, BY_HAND), (GRADIENT, STEPS_APART), (BUDGET, ONCE)),
            ("mismatch", EVERY_RANK),
        ),
        success="The outer step in five rounds on 1 to 4 ranks, one all-reduce per tensor.",
    ),
    wrong=(
        Edit("start - param", "param - start", SIGN),
        Edit(DIVIDES, "pass", SUMMED),
        Edit(SUMS, "pass", OWN, also=((DIVIDES, "pass"),)),
        Edit(SUMS, "pass", OWN),
        Edit(STEP, "pass", NO_STEP),
        Edit(STEP, "pass", TOO_OFTEN, also=((DIVIDES, f"{DIVIDES}\n{STEP}"),)),
        Edit(STEP, f"{STEP}\n{STEP}", TOO_OFTEN),
        Edit(
            STEP,
            "for start in starts:\n    start -= outer.param_groups[0]['lr'] * start.grad",
            PLAIN,
        ),
        Edit(
            WAY,
            "start.grad = start - param + (0 if start.grad is None else start.grad)",
            ACCUMULATED,
        ),
        Edit("start - param", "param.grad.clone()", INNER),
        Own(_averaged, AVERAGED),
        Edit(COPIES, "pass", NEW_STARTS),
        Edit("with torch.no_grad():", "if True:", LEAF),
        Edit(COPIES, "param.data = start", OTHER_MEMORY),
        Edit(COPIES, f"{AVERAGES}\n{COPIES}", ONCE),
        Edit(SUMS, "pass", STEPS_APART, ((DIVIDES, "pass"), (COPIES, f"{AVERAGES}\n{COPIES}"))),
        *properties("not waited", "only if any", "only on rank 0", "four ranks", "seeds"),
    ),
)
