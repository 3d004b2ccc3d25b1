"""The gradients that the engine of exercise 3 of 08_pipeline has to leave, and wrong ones.

One process computes them stage by stage, as a right engine does or as one with a mistake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.exercise import Cause
from course_lib.checks.expectations import Numbers
from course_lib.checks.on_ranks import At
from course_lib.checks.pipeline.stages import (
    NAN,
    SETUPS,
    Grads,
    SampleStage,
    StepSetup,
    batch_of,
    loss_fn,
)

NOT_NUMBERED = Cause(
    "Is every gradient used with the activations of its own micro-batch? Store x and y under i, "
    "and look them up by it."
)
ELSEWHERE = Cause(
    "NaN: x holds numbers on the first stage only, target on the last one only. The other stages "
    "get what they need by recv."
)
HIDDEN = Cause(
    "nan has to reach every stage: it shows that a step went wrong. Pass gradients on unchanged."
)
NO_GRAPH = Cause(
    "y has no graph: keep the y that the stage returned, not y.detach(), and compute it with "
    "autograd on."
)
MISSING = Cause("A gradient is missing there: is backward called on every rank?")
NOT_DIVIDED = Cause("m times too large: divide each loss by the number of micro-batches.")
NOT_HANDED_ON = Cause(
    "Only the last stage's own gradients are divided by m, and the others are m times too large: "
    "divide the loss, before it goes backward."
)
PARAM_DIVIDED = Cause(
    "What was in param.grad before is divided by m, too: divide the loss, not param.grad."
)
BY_RANKS = Cause("Divided by the number of ranks, p: divide by m.")
BY_ITEMS = Cause(
    "Each loss was weighted by its number of items: take the plain mean of the m losses, also "
    "where a micro-batch is smaller."
)
DIVIDED_TWICE = Cause("m times too small: divide by m only once.")
ON_EACH = Cause(
    "Divided on every stage: only the last stage divides, the others pass gradients on."
)
SENDS_X = Cause("What goes back is the activation x: send its gradient, x.grad.")
SENDS_Y = Cause("What goes back is the output y: send the gradient of the input, x.grad.")
PASSES_ON = Cause("A stage passes on the gradient of y that it received: send that of x, x.grad.")
FIRST_TARGET = Cause("All micro-batches have the first one's target: use number i.")
LAST_ONLY = Cause("That is the last micro-batch's gradient alone: gradients have to add up.")
REPLACED = Cause(
    "The gradients from before are gone: add to param.grad, as backward() does. The caller clears "
    "them."
)
WHO_DIVIDES = Cause(
    "All values are off by the same factor. Divide the loss once, on the last stage, by m."
)


Divisor = Callable[[int, int, float], float]


@dataclass(frozen=True)
class PlayedStep:
    """An engine that may be wrong in one respect.

    `divisor(p, m, share)` divides the loss of a micro-batch that holds `share` of the items;
    `passed_on(x, y, grad)` goes back to the stage before, `scale(m)` times the gradient that came
    is used; `divides_at_the_end(rank, p)` says who divides param.grad by m after the step.
    """

    divisor: Divisor = lambda _p, m, _share: m
    passed_on: Callable[[Tensor, Tensor, Tensor | None], Any] = lambda x, _y, _grad: x.grad
    scale: Callable[[int], float] = lambda _m: 1.0
    divides_at_the_end: Callable[[int, int], bool] = lambda _rank, _p: False
    first_target: bool = False
    last_only: bool = False
    replaced: bool = False


@cache
def left_on_stages(engine: PlayedStep, p: int, setup: StepSetup) -> list[Grads]:
    """Return the gradients that an engine leaves on each of p stages."""
    stages, batch = [SampleStage(rank, setup) for rank in range(p)], batch_of(setup)
    num_items = sum(setup.items(i) for i in range(setup.m))
    for stage in stages if engine.replaced else ():
        stage.zero_grad()
    for i, (x, target) in enumerate(batch):
        kept, grad = list[tuple[Tensor, Tensor]](), None
        for stage in stages:
            x = x.detach().requires_grad_(x.is_floating_point())
            kept.append((x, stage(x)))
            x = kept[-1][1]
        for stage, (x, y) in reversed(list(zip(stages, kept, strict=True))):
            if engine.last_only:
                stage.zero_grad()
            if stage is stages[-1]:
                share = setup.items(i) / num_items
                target = batch[0][1] if engine.first_target else target
                (loss_fn(y, target) / engine.divisor(p, setup.m, share)).backward()
            elif grad is not None:
                y.backward(grad * engine.scale(setup.m))
            grad = engine.passed_on(x, y, grad)
    for rank, stage in enumerate(stages):
        for param in stage.trained if engine.divides_at_the_end(rank, p) else ():
            param.grad = None if param.grad is None else param.grad / setup.m
    return [stage.grads() for stage in stages]


def _left_by(engine: PlayedStep, dtype: torch.dtype) -> Callable[[At], Grads]:
    """Return the gradients that an engine leaves in steps of this dtype."""

    def grads(at: At) -> Grads:
        if SETUPS[at.label].dtype != dtype:
            return []
        return left_on_stages(engine, at.world_size, SETUPS[at.label])[at.rank]

    return grads


def _off_by_a_factor(at: At, got: Tensor, item: int) -> bool:
    need = left_on_stages(PlayedStep(), at.world_size, SETUPS[at.label])[at.rank][item]
    return need is not None and torch.allclose(got, need * (got / need).flatten()[0], rtol=1e-4)


def _not_at_all(_p: int, _m: int, _share: float) -> float:
    return 1.0


def demanded(dtype: torch.dtype, rtol: float) -> Numbers:
    """Demand the gradients of one process, in the steps of this dtype."""
    wrong = (
        (NOT_DIVIDED, PlayedStep(_not_at_all)),
        (
            NOT_HANDED_ON,
            PlayedStep(_not_at_all, divides_at_the_end=lambda rank, p: rank == p - 1),
        ),
        (PARAM_DIVIDED, PlayedStep(_not_at_all, divides_at_the_end=lambda _rank, _p: True)),
        (BY_RANKS, PlayedStep(divisor=lambda p, _m, _share: p)),
        (DIVIDED_TWICE, PlayedStep(divisor=lambda _p, m, _share: m * m)),
        (BY_ITEMS, PlayedStep(divisor=lambda _p, _m, share: 1 / share)),
        (ON_EACH, PlayedStep(scale=lambda m: 1 / m)),
        (SENDS_X, PlayedStep(passed_on=lambda x, _y, _grad: x.detach())),
        (SENDS_Y, PlayedStep(passed_on=lambda _x, y, _grad: y.detach())),
        (PASSES_ON, PlayedStep(passed_on=lambda x, _y, grad: x.grad if grad is None else grad)),
        (FIRST_TARGET, PlayedStep(first_target=True)),
        (LAST_ONLY, PlayedStep(last_only=True)),
        (REPLACED, PlayedStep(replaced=True)),
    )
    return Numbers(
        lambda at: at.seen.grads if SETUPS[at.label].dtype == dtype else [],
        _left_by(PlayedStep(), dtype),
        rtol=rtol,
        what="the gradient",
        names=lambda at: SampleStage(at.rank, SETUPS[at.label]).names,
        predicates=(
            (lambda at, got, _item: at.label == NAN and got is not None, HIDDEN),
            (lambda _at, got, _item: got is None or not got.any(), MISSING),
            (lambda _at, got, _item: got.isnan().any(), ELSEWHERE),
        ),
        causes=tuple((cause, _left_by(engine, dtype)) for cause, engine in wrong),
        otherwise=((_off_by_a_factor, WHO_DIVIDES),),
        look=NOT_NUMBERED,
    )
