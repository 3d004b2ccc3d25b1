"""Exercise 6 of 05_data_parallel: the outer step of DiLoCo.

Every start is a multiple of `pattern`, and so is everything that a round does to it: one number per
round tells what an answer has done. In round 3 the last rank has not moved, in round 4 it has nan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.data_parallel import wrong_steps
from course_lib.checks.data_parallel.parts import FINE, budget
from course_lib.checks.ddp.parts import come_late, watched_handles
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DIGITS_LOST, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
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
INNER_GRAD = 0.25  # the last inner gradient, which is still in param.grad
RTOL = 1e-11  # differences of starts lose a few digits

SIGN = Cause(
    "The outer gradient has the wrong sign, and the step goes back. An optimizer subtracts its "
    "gradient: it is the start minus the parameters."
)
SUMMED = Cause("The outer gradient is a sum over the ranks: divide it by their number.")
OWN = Cause("The outer gradient is this rank's own: nothing was received from the others.")
OWN_DIVIDED = Cause(
    "The outer gradient is this rank's own, divided: nothing was received from the others."
)
BY_FOUR = Cause("Divided by 4: divide by the number of ranks, whatever it is.")
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
MOVED_START = Cause(
    "The start is now where this rank's inner steps ended: the outer step goes from where the "
    "round began."
)
NOT_BACK = Cause(
    "The parameters are still where the inner steps ended: the next round begins from the new "
    "starts, on every rank."
)
NEW_STARTS = Cause(
    "The next round begins from the new starts, on every rank: copy each into its parameter."
)
TOO_EARLY = Cause("The parameters are at the old start: copy after outer.step().")
NOT_WAITED = Cause("With async_op=True an all-reduce has only begun: call wait(), then divide.")
HIDDEN = Cause(
    "A rank has nan, as of a model that has diverged, and you return a number: nobody would "
    "notice. Leave nan as it is."
)
EVERY_RANK = Cause(
    "Every rank has to make every call: one that has not moved counts, too, with a zero."
)
LEAF = Cause("Autograd forbids writing to a parameter: work under torch.no_grad().")
REPLACED = Cause(
    "A list holds another tensor than before: the model and outer hold the old ones. Write into "
    "the tensors that are there."
)
OTHER_MEMORY = Cause(
    "Not in place, or parameter and start now share their memory, and the next inner step would "
    "move both. Use param.copy_(start)."
)
DISTURBED = Cause(
    "Leave param.grad and requires_grad of the parameters as they are, and autograd switched on."
)
BY_HAND = Cause(
    "outer may be any optimizer, with a state of its own: let it step, instead of computing its "
    "step yourself."
)
STEPS_APART = Cause(
    "The ranks step apart, and the mean of their steps is right for SGD alone, not for Adam: "
    "average the gradients first, then call outer.step()."
)
ONCE = Cause(
    "One all-reduce per tensor, in its own dtype; the new starts are equal without another."
)
LOOK = Cause("Write down one round for one number and two ranks: start, two ends, gradient, step.")


@dataclass
class Round:
    """Effects of one outer step on the tensors of one rank."""

    starts: list[Tensor]
    params: list[Tensor]
    calls: list[Event]
    never_waited: int
    replaced: list[str]
    moved: list[str]
    disturbed: list[str]
    outer_grads: list[list[Any]]  # of each call of outer.step()


def _patterns() -> list[Tensor]:
    """Return the starts of a model: 1, 2, 3 ... in tensors of three kinds."""
    matrix = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2).t()
    starts = [torch.arange(1.0, 4.0, dtype=torch.float64), matrix, torch.tensor(2.0).double()]
    return [start * FINE for start in starts]


def _way(rank: int, p: int, number: int) -> float:
    """Return how far a rank's inner steps go in a round, in patterns."""
    if rank == p - 1 and number in (2, 3):
        return (0.0, math.nan)[number - 2]
    return (number + 1) * 10.0**rank


def _observe(
    rank: int, answer: Callable[..., Any], lr: float = 0.5, momentum: float = 0.75
) -> dict[str, Round]:
    """Run the rounds of two models; the inner steps are a subtraction."""
    rounds: dict[str, Round] = {}
    model: tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]
    for number, label in enumerate(ROUNDS):
        if number in FIRST_OF_A_MODEL:
            starts = _patterns()
            params: list[Tensor] = [nn.Parameter(start.clone()) for start in starts]
            model = (
                starts,
                params,
                torch.optim.SGD(starts, lr=lr, momentum=momentum, nesterov=momentum > 0),
            )
        for param, pattern in zip(model[1], _patterns(), strict=True):
            param.data.sub_(pattern * _way(rank, dist.get_world_size(), number))
            param.grad = pattern * INNER_GRAD
        if number == 0:
            come_late(rank)
        rounds[label] = _one(answer, *model)
    return rounds


def _one(
    answer: Callable[..., Any],
    starts: list[Tensor],
    params: list[Tensor],
    outer: torch.optim.Optimizer,
) -> Round:
    named = {
        **{f"the start of {name}": tensor for name, tensor in zip(NAMES, starts, strict=True)},
        **dict(zip(NAMES, params, strict=True)),
    }
    memory = {name: tensor.data_ptr() for name, tensor in named.items()}
    given, outer_grads = ([*starts], [*params]), list[list[Any]]()
    notes = outer.register_step_pre_hook(
        lambda *_: outer_grads.append(
            [s.grad if s.grad is None else s.grad.clone() for s in starts]
        )
    )
    with record() as log, watched_handles() as open_ones:
        answer(given[0], given[1], outer)
    notes.remove()
    autograd_is_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    pairs = zip(NAMES, params, _patterns(), strict=True)
    after = [*given[0], *given[1]]
    kept = len(after) == len(named)
    return Round(
        starts=[tensor.detach().clone() for tensor in starts],
        params=[tensor.detach().clone() for tensor in params],
        calls=calls_of(log.events),
        never_waited=len(open_ones),
        replaced=[
            name
            for place, (name, tensor) in enumerate(named.items())
            if not kept or after[place] is not tensor
        ],
        moved=[name for name, tensor in named.items() if tensor.data_ptr() != memory[name]],
        disturbed=[
            name
            for name, param, pattern in pairs
            if not autograd_is_on
            or not param.requires_grad
            or param.grad is None
            or not param.grad.equal(pattern * INNER_GRAD)
        ],
        outer_grads=outer_grads,
    )


# --- one number per round


def _ways(at: At, number: int) -> list[float]:
    return [_way(rank, at.world_size, number) for rank in range(at.world_size)]


def _mean(at: At, number: int) -> float:
    return sum(_ways(at, number)) / at.world_size


def _own(at: At, number: int) -> float:
    return _way(at.rank, at.world_size, number)


def _after(
    at: At,
    gradient: Callable[[At, int], float] = _mean,
    *,
    plain: bool = False,
    accumulates: bool = False,
    until: int | None = None,
) -> float:
    """Return the start after the rounds of this model up to this one, in patterns."""
    lr, momentum = at.options.get("lr", 0.5), 0.0 if plain else at.options.get("momentum", 0.75)
    last = at.number if until is None else until
    start, velocity, g = 1.0, None, 0.0
    for number in range(max(n for n in FIRST_OF_A_MODEL if n <= at.number), last + 1):
        g = gradient(at, number) + (g if accumulates else 0.0)
        velocity = g if velocity is None else momentum * velocity + g
        start -= lr * (g + momentum * velocity)
    return start


def _before(at: At) -> float:
    """Return the start at the beginning of this round."""
    return _after(at, until=at.number - 1)


def _times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    return lambda at: [pattern * factor(at) for pattern in _patterns()]


def _hides_nan(at: At, got: Tensor, _item: int) -> bool:
    return at.number == 3 and bool(got.isfinite().all())


WAY, SUMS = "start.grad = start - param", "dist.all_reduce(start.grad)"
DIVIDES, STEPS, COPIES = "start.grad /= dist.get_world_size()", "outer.step()", "param.copy_(start)"
AVERAGES = "dist.all_reduce(start)\nstart /= dist.get_world_size()"

OUTER = Exercise(
    key="data_parallel-6",
    title="outer step of DiLoCo",
    library=("course_lib.data_parallel.local_sgd:outer_step",),
    check=OnRanks(
        observe_on_rank=_observe,
        runs=lambda _p: ({}, {"lr": 1.0, "momentum": 0.0}),
        trouble=(
            ("hang", "", EVERY_RANK),
            ("mismatch", "", EVERY_RANK),
            ("raised", "leaf Variable", LEAF),
        ),
        expect=(
            Demand(
                lambda at: not at.seen.never_waited, "an all-reduce was not waited for", NOT_WAITED
            ),
            Demand(
                lambda at: not at.seen.replaced,
                lambda at: f"{at.seen.replaced[0]}: another tensor than before",
                REPLACED,
            ),
            Demand(
                lambda at: len(at.seen.outer_grads) <= 1,
                lambda at: f"outer.step() was called {len(at.seen.outer_grads)} times",
                TOO_OFTEN,
            ),
            Numbers(
                "starts",
                _times(_after),
                what="the start of the next round",
                rtol=RTOL,
                names=lambda _at: NAMES,
                predicates=((_hides_nan, HIDDEN),),
                causes=(
                    (SIGN, _times(lambda at: _after(at, lambda a, n: -_mean(a, n)))),
                    (SUMMED, _times(lambda at: _after(at, lambda a, n: sum(_ways(a, n))))),
                    (BY_FOUR, _times(lambda at: _after(at, lambda a, n: sum(_ways(a, n)) / 4))),
                    (NO_STEP, _times(_before)),
                    (PLAIN, _times(lambda at: _after(at, plain=True))),
                    (AVERAGED, _times(lambda at: _before(at) - _mean(at, at.number))),
                    (ACCUMULATED, _times(lambda at: _after(at, accumulates=True))),
                    (OWN, _times(lambda at: _after(at, _own))),
                    (
                        OWN_DIVIDED,
                        _times(lambda at: _after(at, lambda a, n: _own(a, n) / a.world_size)),
                    ),
                    (INNER, _times(lambda at: _after(at, lambda _a, _n: INNER_GRAD))),
                    (MOVED_START, _times(lambda at: _before(at) - _own(at, at.number))),
                ),
                look=LOOK,
            ),
            Numbers(
                "params",
                _times(_after),
                what="the parameters of the next round",
                rtol=RTOL,
                names=lambda _at: NAMES,
                predicates=((_hides_nan, HIDDEN),),
                causes=(
                    (NOT_BACK, _times(lambda at: _before(at) - _own(at, at.number))),
                    (TOO_EARLY, _times(_before)),
                ),
                look=NEW_STARTS,
            ),
            Demand(
                lambda at: not at.seen.moved,
                lambda at: f"{at.seen.moved[0]}: in other memory than before",
                OTHER_MEMORY,
            ),
            Demand(
                lambda at: not at.seen.disturbed,
                lambda at: (
                    f"{at.seen.disturbed[0]}: its grad or requires_grad, or autograd, has changed"
                ),
                DISTURBED,
            ),
            Demand(lambda at: at.seen.outer_grads, "outer.step() was not called", BY_HAND),
            Numbers(
                lambda at: at.seen.outer_grads[0],
                _times(lambda at: _mean(at, at.number)),
                what="the outer gradient in outer.step()",
                rtol=RTOL,
                names=lambda _at: NAMES,
                look=STEPS_APART,
            ),
            *budget("all_reduce", [tensor.nbytes for tensor in _patterns()], ONCE),
        ),
        success="The outer step in five rounds on 1 to 4 ranks, one all-reduce per tensor.",
    ),
    wrong=(
        Edit("start - param", "param - start", SIGN),
        Edit(DIVIDES, "pass", SUMMED),
        Edit(SUMS, "pass", OWN_DIVIDED),
        Edit(SUMS, "pass", OWN, also=((DIVIDES, "pass"),)),
        Edit("dist.get_world_size()", "4", BY_FOUR),
        Edit(STEPS, "pass", NO_STEP),
        Edit(STEPS, "if dist.get_rank() == 0:\n    outer.step()", NO_STEP),
        Edit(STEPS, "outer.step()\nouter.step()", TOO_OFTEN),
        Edit(STEPS, "pass", TOO_OFTEN, also=((DIVIDES, f"{DIVIDES}\n{STEPS}"),)),
        Edit(STEPS, "pass", TOO_OFTEN, also=((COPIES, f"{STEPS}\n{COPIES}"),)),
        Edit(
            STEPS,
            "for start in starts:\n    start -= outer.param_groups[0]['lr'] * start.grad",
            PLAIN,
        ),
        Edit(
            WAY,
            "start.grad = start - param + (0 if start.grad is None else start.grad)",
            ACCUMULATED,
        ),
        Edit("start - param", "param.grad.clone()", INNER),
        Own(wrong_steps.averaged, AVERAGED),
        Own(wrong_steps.from_own_end, MOVED_START),
        Edit(COPIES, "pass", NOT_BACK),
        Edit(COPIES, "param -= start.grad", NEW_STARTS),
        Own(wrong_steps.copies_too_early, TOO_EARLY),
        Edit(SUMS, "dist.all_reduce(start.grad, async_op=True)", NOT_WAITED),
        Edit(
            SUMS,
            "small = start.grad.float()\ndist.all_reduce(small)\nstart.grad.copy_(small)",
            DIGITS_LOST,
        ),
        Edit(SUMS, f"if start.grad.any():\n    {SUMS}", EVERY_RANK),
        Edit(SUMS, f"start.grad.nan_to_num_()\n{SUMS}", HIDDEN),
        Edit("with torch.no_grad():", "if True:", LEAF),
        Own(wrong_steps.new_parameters, REPLACED),
        Edit(COPIES, "param.data = start", OTHER_MEMORY),
        Edit(COPIES, "param.requires_grad_(False).copy_(start)", DISTURBED),
        Edit(COPIES, f"{COPIES}\nparam.grad = None", DISTURBED),
        Edit("with torch.no_grad():", "torch.set_grad_enabled(False)\nif True:", DISTURBED),
        Own(wrong_steps.steps_by_hand, BY_HAND),
        Edit(COPIES, f"{AVERAGES}\n{COPIES}", ONCE),
        Edit(SUMS, "pass", STEPS_APART, ((DIVIDES, "pass"), (COPIES, f"{AVERAGES}\n{COPIES}"))),
    ),
)
