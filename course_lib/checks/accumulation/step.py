"""Exercises 2 and 5 of 02_accumulation: one step from micro-batches, and one that is clipped."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.accumulation import split_micro_batches
from course_lib.checks.accumulation.effects import (
    ALIVE,
    GRAPH,
    IN_EVAL,
    LOOKS,
    WITH_GRAPH,
    EffectCase,
    Effects,
    as_number,
    batch_of,
    calls_of,
    flat,
    flat_grads,
    graph_of,
    held_at_once,
    line,
    parts_of,
    thick,
    watched,
    with_old_grads,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import CALLERS

LR = 0.5
STEPS, USED, LOSS, CALLS = "optimizer.step() calls", "gradient used", "loss", "items in each call"
MOVED = "movement of the parameters"

STEP_INSIDE = Cause("optimizer.step() stands inside the loop: step once, when all are in.")
NO_STEP = Cause("Did you forget optimizer.step()?")
ONE_STEP = Cause("One step for the whole batch: after the loop, and outside of every `if`.")
OLD_GRADIENT = Cause("The old gradient is still in it: zero_grad comes first.")
BY_HAND = Cause("Before the first step there is no gradient yet: use optimizer.zero_grad().")
SUMMED = Cause("Gradients are summed, not averaged: divide each loss.")
TWICE = Cause("Divided twice: each loss by num_micro_batches, once.")
ONLY_LAST = Cause(
    "Only the last micro-batch is left: zero_grad is in the loop, or backward is not."
)
CLEARED = Cause("No gradient is left: zero_grad stands between backward and step.")
BY_ITEMS = Cause("Divided by the items: each loss is a mean already. Divide by num_micro_batches.")
OTHER_LOSS = Cause("That is the gradient of another loss: use loss_fn, whatever it is.")
WHOLE_BATCH = Cause(
    "The model saw more than one micro-batch at once, or an item twice: call it on each "
    "micro-batch, once, and put the loss together from theirs."
)
SUM_OF_LOSSES = Cause("That is the sum of the losses: return their mean.")
LAST_LOSS = Cause("That is the loss of the last micro-batch: add all of them up.")
LAST_PART = Cause("That is the last micro-batch's part of the loss: add all of them up.")
ONE_NUMBER = Cause("Return one number, the mean loss of the whole batch.")
NOT_CLIPPED = Cause("Nothing was clipped before the step.")
CLIPS_RUNNING = Cause("Clipped after each micro-batch: clip once, when all are in.")
CLIPS_EACH = Cause("Each micro-batch was clipped by itself: clip their sum.")
CLIPS_PARAMETERS = Cause("Each parameter was clipped by itself: the norm is that of all.")
CLIPS_NUMBERS = Cause("Numbers were cut off: scale the gradient.")
OTHER_NORM = Cause("That is another norm: clip by the length, which is norm_type=2.")
ZERO_NORM = Cause(
    "A gradient may be all zeros, and its norm 0: clip_grad_norm_ adds 1e-6 before it divides."
)
CLIPS_SUM = Cause(
    "Clipped to max_norm / num_micro_batches: the gradient that is clipped has to be the mean "
    "already, and max_norm as it is."
)
SOME_PARAMETERS = Cause("Some parameters were left out: clip all of them in one call.")
STRETCHED = Cause("A gradient shorter than max_norm stays as it is: clipping only shortens.")
LOOK = Cause("Compare with one backward of the full batch, and one step.")


def _step(
    answer: Callable[..., Any],
    items: int,
    count: int,
    *more: float,
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    first: bool = False,
    target: float | None = None,
) -> dict[str, Any]:
    """Take a step; return what it did. In the `first` one, nothing has a gradient yet."""
    (x, y), model, steps = batch_of(items), line(), list[Tensor]()
    if target is not None:
        y = model(x).detach() + target
    if not first:
        with_old_grads(model)
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=LR), calls_of(model)
    optimizer.register_step_pre_hook(lambda *_: steps.append(flat_grads(model)))
    before = flat(model.parameters())
    with watched(model, inputs=x, targets=y) as seen:
        loss = answer(model, loss_fn, optimizer, (x, y), count, *more)
    used, moved = steps[-1] if steps else None, before - flat(model.parameters())
    done = {STEPS: len(steps), USED: used, CALLS: calls, MOVED: moved, **seen}
    return done if more else {**done, LOSS: as_number(loss), GRAPH: graph_of(loss)}


def _held(answer: Callable[..., Any], *more: float) -> dict[str, str]:
    def step(items: int, count: int) -> tuple[Callable[[], Any], list[Tensor]]:
        model, x = thick(), torch.ones(items, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        call = partial(answer, model, F.mse_loss, optimizer, (x, x[:, :1]), count, *more)
        return call, [*model.parameters(), x]

    return held_at_once(step)


def _cases() -> list[EffectCase]:
    cases: list[EffectCase] = [
        (parts_of(items, count), partial(_step, items=items, count=count))
        for items, count in ((2, 1), (4, 2), (6, 3), (8, 8))
    ]
    return [
        *cases,
        ("the first step of all", partial(_step, items=6, count=2, first=True)),
        ("another loss_fn", partial(_step, items=6, count=2, loss_fn=F.l1_loss)),
        ("16 items in 4 micro-batches", _held),
    ]


def _clip_cases() -> list[EffectCase]:
    cases: list[EffectCase] = [
        (f"{parts_of(items, count)}, max_norm {max_norm:g}", _clipped(items, count, max_norm))
        for items, count, max_norm in ((2, 1, 0.5), (4, 2, 1e3), (4, 2, 0.5), (6, 3, 0.1))
    ]
    return [
        *cases,
        ("a gradient of zeros", _clipped(4, 2, 0.5, target=0.0)),
        ("a short gradient", _clipped(4, 2, 1.0, target=0.01)),
        ("another loss_fn", _clipped(6, 2, 1.0, loss_fn=F.l1_loss)),
        ("16 items in 4 micro-batches", lambda answer: _held(answer, 1e3)),
    ]


def _clipped(items: int, count: int, max_norm: float, **more: Any) -> Callable[..., Any]:
    return lambda answer: _step(answer, items, count, max_norm, **more)


def _loss_of_another_forward(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    num_micro_batches: int,
) -> Tensor:
    optimizer.zero_grad()
    for x, y in split_micro_batches(batch, num_micro_batches):
        (loss_fn(model(x), y) / num_micro_batches).backward()
    with torch.no_grad():
        loss = loss_fn(model(batch[0]), batch[1])
    optimizer.step()
    return loss


def _clips_each(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    num_micro_batches: int,
    max_norm: float,
) -> None:
    params = list(model.parameters())
    sums = [torch.zeros_like(param) for param in params]
    for x, y in split_micro_batches(batch, num_micro_batches):
        grads = torch.autograd.grad(loss_fn(model(x), y) / num_micro_batches, params)
        factor = max_norm / (torch.cat([grad.flatten() for grad in grads]).norm() + 1e-6)
        sums = [s + grad * factor.clamp(max=1) for s, grad in zip(sums, grads, strict=True)]
    for param, total in zip(params, sums, strict=True):
        param.grad = total
    optimizer.step()


ZERO, SPLIT = "optimizer.zero_grad()", "split_micro_batches(batch, num_micro_batches)"
MEAN, DIVIDED = "loss_fn(model(x), y)", "loss_fn(model(x), y) / num_micro_batches"
BACK, ADD, STEP = "loss.backward()", "total += loss.detach()", "optimizer.step()"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
ZERO_BY_HAND = "for param in model.parameters():\n    param.grad.zero_()"

SMALLER_LR = """for group in optimizer.param_groups:
    group["lr"] /= num_micro_batches
optimizer.step()"""

CLIP_PARAMETERS = """for param in model.parameters():
    nn.utils.clip_grad_norm_([param], max_norm)"""

BY_OWN_NORM = """norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
for param in model.parameters():"""

ACCUMULATE = Exercise(
    key="accumulation-2",
    title="one step from micro-batches",
    check=Effects(
        cases=_cases,
        looks={**LOOKS, STEPS: ONE_STEP, CALLS: WHOLE_BATCH, LOSS: ONE_NUMBER},
        look=LOOK,
        success="The full batch's gradient and loss, one step, one micro-batch in memory.",
    ),
    wrong=(
        Edit(DIVIDED, MEAN, SUMMED),
        Edit(DIVIDED, f"{DIVIDED} ** 2", TWICE),
        Edit(BACK, f"{ZERO}\n{BACK}", ONLY_LAST),
        Edit(BACK, "pass", ONLY_LAST, also=((STEP, f"{BACK}\n{STEP}"),)),
        Edit(
            BACK,
            "pass",
            ONLY_LAST,
            also=((DIVIDED, MEAN), (STEP, f"{BACK}\n{STEP}")),
        ),
        Edit(ZERO, "pass", OLD_GRADIENT),
        Edit(
            ADD,
            f"{ADD}\n{STEP}",
            STEP_INSIDE,
            also=((f"\n    {STEP}\n    return", "\n    return"),),
        ),
        Edit(STEP, "pass", NO_STEP),
        Edit(ZERO, "pass", CLEARED, also=((STEP, f"{ZERO}\n{STEP}"),)),
        Edit(
            BACK,
            "pass",
            ALIVE,
            also=(
                (ADD, "total += loss"),
                (STEP, f"total.backward()\n{STEP}\ntotal = total.detach()"),
            ),
        ),
        Edit(
            BACK,
            "loss.backward(retain_graph=True)\nmodel.kept = [*getattr(model, 'kept', []), loss]",
            ALIVE,
        ),
        Edit(ADD, "total += loss", WITH_GRAPH),
        Edit(ZERO, f"{ZERO}\nmodel.eval()", IN_EVAL),
        Edit(
            DIVIDED,
            MEAN,
            SUMMED,
            also=((ADD, "total += loss.detach() / num_micro_batches"), (STEP, SMALLER_LR)),
        ),
        Edit(SPLIT, "[batch]", WHOLE_BATCH, also=((DIVIDED, MEAN),)),
        Edit("return total", "return total * num_micro_batches", SUM_OF_LOSSES),
        Edit("return total", "return loss.detach() * num_micro_batches", LAST_LOSS),
        Edit("return total", "return loss.detach()", LAST_PART),
        Edit(DIVIDED, f"{MEAN} * len(x) / len(batch[0]) ** 2", BY_ITEMS),
        Edit(DIVIDED, DIVIDED.replace("loss_fn", "F.mse_loss"), OTHER_LOSS),
        Edit(ZERO, ZERO_BY_HAND, BY_HAND),
        Edit(ZERO, f"{ZERO}\nbatch[1].neg_()", CALLERS),
        Own(_loss_of_another_forward, WHOLE_BATCH),
    ),
)

CLIPPED = Exercise(
    key="accumulation-5",
    title="clip what was accumulated",
    check=Effects(
        cases=_clip_cases,
        looks={**LOOKS, STEPS: ONE_STEP, CALLS: WHOLE_BATCH},
        look=LOOK,
        success="The accumulated gradient is clipped, once, by its whole norm.",
    ),
    wrong=(
        Edit(CLIP, "pass", CLIPS_RUNNING, also=((".backward()", f".backward()\n{CLIP}"),)),
        Own(_clips_each, CLIPS_EACH),
        Edit(CLIP, "pass", NOT_CLIPPED, also=((STEP, f"{STEP}\n{CLIP}"),)),
        Edit(
            CLIP,
            CLIP_PARAMETERS,
            CLIPS_PARAMETERS,
        ),
        Edit(CLIP, CLIP.replace("norm_(", "value_("), CLIPS_NUMBERS),
        Edit(SPLIT, "[batch]", WHOLE_BATCH, also=((DIVIDED, MEAN),)),
        Edit(DIVIDED, MEAN, SUMMED),
        Edit(ZERO, "pass", OLD_GRADIENT),
        Edit(CLIP, f"{CLIP[:-1]}, norm_type=1)", OTHER_NORM),
        Edit(CLIP, f"{CLIP[:-1]} / num_micro_batches)", CLIPS_SUM),
        Edit(CLIP, "nn.utils.clip_grad_norm_([model.weight], max_norm)", SOME_PARAMETERS),
        Edit(CLIP, f"{BY_OWN_NORM}\n    param.grad *= max_norm / (norm + 1e-6)", STRETCHED),
        Edit(CLIP, f"{BY_OWN_NORM}\n    param.grad *= min(1.0, max_norm / norm.item())", ZERO_NORM),
        Edit(ZERO, f"{ZERO}\nmodel.eval()", IN_EVAL),
        Edit(CLIP, "pass", NOT_CLIPPED, also=((ZERO, f"{CLIP}\n{ZERO}"),)),
    ),
)
