"""Exercise 2 of 05_data_parallel: the mean of every gradient over the ranks.

In the second step every gradient of the last rank is zero, in the third one it is nan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.data_parallel.parts import around, budget, module_of, pattern, state_of
from course_lib.checks.ddp.parts import ROUNDING, come_late, digits, watched_handles
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DIGITS_LOST, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
from course_lib.ranks import record

TRAINED = {
    name: x
    for name, x in module_of(0).named_parameters()
    if x.requires_grad and not name.startswith("unused")
}
NAMES = list(TRAINED)

SUMMED = Cause("That is the sum: divide it by the number of ranks.")
OF_PARAMS = Cause("You took the mean of the parameters: this is for the gradients.")
PARAMS_CHANGED = Cause("Only gradients change here: leave parameters and buffers as they are.")
OWN = Cause("It is this rank's own: nothing was received, or it was not written to param.grad.")
OWN_DIVIDED = Cause("It is this rank's own, divided: nothing was received from the others.")
ADDED = Cause("The mean was added to this rank's own gradient: put it in its place.")
TWICE = Cause("Divided twice: divide by the number of ranks once.")
LARGEST = Cause("That is the largest one: all_reduce adds up by default.")
BY_FOUR = Cause("Divided by 4: divide by the number of ranks, whatever it is.")
COPY_SENT = Cause(
    "contiguous(), flatten() and reshape() copy a transposed gradient, and the copy was reduced: "
    "write the mean back into param.grad."
)
TOUCHED = Cause(
    "Its numbers were not all treated alike: was it changed while the all-reduce was under way?"
)
NOT_WAITED = Cause(
    "With async_op=True an all-reduce has only begun: call wait() on what it returns, then divide."
)
HAS_NONE = Cause(
    "A frozen parameter has no gradient, nor has a trained one that forward did not use: leave out "
    "those whose grad is None."
)
GIVEN_ONE = Cause("A frozen or unused parameter has got a gradient: leave None as it is.")
DISTURBED = Cause(
    "Only gradients change here: leave autograd, random state and the module's modes as they are."
)
TAKEN_AWAY = Cause("The gradient is gone: a trained parameter keeps one, the mean.")
HIDDEN = Cause(
    "A rank's gradient is nan, as of a model that has diverged, and you return a number: nobody "
    "would notice. Leave nan as it is."
)
VIEW = Cause(
    "A view keeps the whole tensor it was cut from: copy each mean into the gradient that is there."
)
EVERY_RANK = Cause(
    "Every rank has to make every call, whatever its gradients are: a gradient of "
    "zeros counts, too."
)
ONCE = Cause("One all-reduce per gradient, in its own dtype: tied parameters have one gradient.")
LOOK = Cause("Is every parameter in your loop, and only once?")


@dataclass
class Step:
    """Gradients left on one rank; `views` are those that keep more memory than theirs."""

    grads: list[Any]
    calls: list[Event]
    never_waited: int
    given: list[str]
    changed: list[str]
    disturbed: list[str]
    views: list[str]


def _average(rank: int, answer: Callable[[nn.Module], Any]) -> dict[str, Step]:
    """Run the answer on three steps' gradients, of this rank's numbers."""
    module, p = module_of(rank), dist.get_world_size()
    params = dict(module.named_parameters())
    steps = {}
    for number in range(3):
        for index, (name, param) in enumerate(params.items()):
            if name in NAMES:
                numbers = pattern(index, param) * _scale(rank, p, number)
                param.grad = torch.empty_like(param).copy_(numbers)
        if number == 0:
            come_late(rank)
        outside = around(module)
        with record() as log, watched_handles() as open_ones:
            answer(module)
        outside_after = around(module)
        torch.set_grad_enabled(True)
        grads = {name: param.grad for name, param in params.items() if param.grad is not None}
        before = state_of(module_of(rank))
        steps[f"step {number + 1}"] = Step(
            grads=[grads[name].clone() if name in grads else None for name in NAMES],
            calls=calls_of(log.events),
            never_waited=len(open_ones),
            given=[name for name in grads if name not in NAMES],
            changed=[name for name, x in state_of(module).items() if not x.equal(before[name])],
            disturbed=[what for what in outside if outside_after[what] != outside[what]],
            views=[n for n, x in grads.items() if x.untyped_storage().nbytes() > x.nbytes],
        )
    return steps


def _scale(rank: int, p: int, number: int) -> float:
    if rank == p - 1 and number:
        return (0, math.nan)[number - 1]
    return (number + 2) * 10**rank


def _own(at: At) -> float:
    return _scale(at.rank, at.world_size, at.number)


def _all(at: At) -> list[float]:
    return [_scale(rank, at.world_size, at.number) for rank in range(at.world_size)]


def _mean(at: At) -> float:
    return sum(_all(at)) / at.world_size


def _times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    """Return what the gradients would be if they were a multiple of the parameters of rank 0."""
    indexed = [pair for pair in enumerate(state_of(module_of(0)).items()) if pair[1][0] in NAMES]
    return lambda at: [pattern(index, x) * factor(at) for index, (_, x) in indexed]


def _is_own(at: At, got: Tensor, item: int) -> bool:
    own = _times(_own)(at)[item]
    return any(torch.allclose(got, own / times, rtol=ROUNDING) for times in (1, at.world_size))


def _is_copy(at: At, _got: Tensor, item: int) -> bool:
    """Return whether the transposed gradient, and no other one, is this rank's own."""
    own = [name for i, name in enumerate(NAMES) if _is_own(at, at.seen.grads[i], i)]
    return own == [NAMES[item]] == ["transposed.weight"]


def _is_uneven(at: At, got: Tensor, item: int) -> bool:
    """Return whether its numbers are not one multiple of the right ones."""
    times = got / _times(_mean)(at)[item]
    return not torch.allclose(times, times.flatten()[0])


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

MEAN = Exercise(
    key="data_parallel-2",
    title="mean gradient",
    check=OnRanks(
        observe_on_rank=_average,
        trouble=(
            ("hang", "", EVERY_RANK),
            ("raised", "None", HAS_NONE),
        ),
        expect=(
            Demand(
                lambda at: not at.seen.never_waited, "an all-reduce was not waited for", NOT_WAITED
            ),
            Numbers(
                "grads",
                _times(_mean),
                what="the mean gradient",
                rtol=ROUNDING,
                names=lambda _at: NAMES,
                predicates=(
                    (lambda _at, got, _item: got is None, TAKEN_AWAY),
                    (lambda at, got, _item: at.number == 2 and got.isfinite().all(), HIDDEN),
                    (_is_copy, COPY_SENT),
                    (lambda at, got, i: at.seen.changed and _is_own(at, got, i), OF_PARAMS),
                ),
                causes=(
                    (SUMMED, _times(lambda at: sum(_all(at)))),
                    (OF_PARAMS, _times(lambda at: digits(at.world_size) / at.world_size)),
                    (OWN, _times(_own)),
                    (OWN_DIVIDED, _times(lambda at: _own(at) / at.world_size)),
                    (ADDED, _times(lambda at: _own(at) + _mean(at))),
                    (TWICE, _times(lambda at: _mean(at) / at.world_size)),
                    (LARGEST, _times(lambda at: max(_all(at)))),
                    (LARGEST, _times(lambda at: max(_all(at)) / at.world_size)),
                    (BY_FOUR, _times(lambda at: sum(_all(at)) / 4)),
                ),
                otherwise=((_is_uneven, TOUCHED),),
                look=LOOK,
            ),
            Demand(
                lambda at: not at.seen.given,
                lambda at: f"{at.seen.given[0]}: need grad None; got a tensor",
                GIVEN_ONE,
            ),
            Demand(
                lambda at: not at.seen.changed,
                lambda at: f"{at.seen.changed[0]} has changed",
                PARAMS_CHANGED,
            ),
            Demand(
                lambda at: not at.seen.disturbed,
                lambda at: f"{at.seen.disturbed[0]} has changed",
                DISTURBED,
            ),
            Demand(
                lambda at: not at.seen.views,
                lambda at: f"{at.seen.views[0]}: its gradient keeps more memory than its own",
                VIEW,
            ),
            *budget("all_reduce", [x.nbytes for x in TRAINED.values()], ONCE),
        ),
        success="The mean of each gradient on 1 to 4 ranks, one all-reduce each.",
    ),
    wrong=(
        Edit(DIVIDES, "pass", SUMMED),
        Edit(
            SUMS,
            "dist.all_reduce(param.data)",
            OF_PARAMS,
            also=((DIVIDES, "param.data /= dist.get_world_size()"),),
        ),
        Edit(
            SUMS,
            "mean = param.grad.clone()\ndist.all_reduce(mean)",
            OWN,
            also=((DIVIDES, "mean /= dist.get_world_size()"),),
        ),
        Edit(SUMS, f"param.grad = param.data.clone()\n{SUMS}", OF_PARAMS),
        Edit(SUMS, "pass", OWN_DIVIDED),
        Edit(SUMS, "param.grad /= dist.get_world_size()\ndist.all_reduce(param.grad)", TWICE),
        Edit("dist.get_world_size()", "4", BY_FOUR),
        Edit(HAS_GRAD, "if True:", HAS_NONE),
        Edit(HAS_GRAD, "if param.requires_grad:", HAS_NONE),
        Edit(HAS_GRAD, "if param.grad is not None and param.grad.numel() > 1:", OWN),
        Edit(HAS_GRAD, "if param.grad is None:\n    break\nif True:", OWN),
        Edit(DIVIDES, f"{DIVIDES}\ntorch.set_grad_enabled(False)", DISTURBED),
        Edit(DIVIDES, f"{DIVIDES}\nparam.requires_grad_(False)", DISTURBED),
        Edit(DIVIDES, f"{DIVIDES}\nmodule.eval()", DISTURBED),
        Edit(DIVIDES, f"{DIVIDES}\ntorch.manual_seed(0)", DISTURBED),
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
        Edit("module.parameters()", "list(module.parameters())[:1]", OWN),
        Edit(DIVIDES, f"{DIVIDES}\nparam.data *= 1.5", PARAMS_CHANGED),
        Edit(SUMS, "dist.all_reduce(param.grad, op=dist.ReduceOp.MAX)", LARGEST),
        Edit(
            SUMS,
            "small = param.grad.float()\ndist.all_reduce(small)\nparam.grad.copy_(small)",
            DIGITS_LOST,
        ),
        Edit(SUMS, "flat = param.grad.contiguous()\ndist.all_reduce(flat)", COPY_SENT),
        Edit(SUMS, f"{SUMS}\nparam.grad[:1] *= 0.5", TOUCHED),
        Edit(SUMS, "dist.all_reduce(param.grad, async_op=True)", NOT_WAITED),
        Edit(HAS_GRAD, "if param.grad is not None and param.grad.any():", EVERY_RANK),
        Edit(
            SUMS,
            "mean = param.grad / dist.get_world_size()\ndist.all_reduce(mean)",
            ADDED,
            also=((DIVIDES, "param.grad += mean"),),
        ),
        Edit(DIVIDES, "param.grad = None", TAKEN_AWAY),
        Edit(SUMS, f"param.grad.nan_to_num_()\n{SUMS}", HIDDEN),
        Edit(DIVIDES, f"{DIVIDES}\nparam.grad.nan_to_num_()", HIDDEN),
        Own(_views_of_one, VIEW),
    ),
)
