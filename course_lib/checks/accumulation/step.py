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
    FEWER_BITS,
    FROZEN,
    LEFTOVERS,
    LOOKS,
    LOSS,
    NAN_LEFT_OUT,
    NO_GRAD_STAYS,
    OTHER_LOSS,
    SEEDED,
    SWITCHED,
    TIED,
    WITH_GRAPH,
    EffectCase,
    Effects,
    about_loss,
    called,
    flat,
    flat_grads,
    held_at_once,
    parts_of,
    with_old_grads,
)
from course_lib.checks.accumulation.models import (
    ODD,
    Odd,
    batch_of,
    line,
    mean_square,
    thick,
    two_groups,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import CALLERS

LR = 0.5
STEPS, USED, CALLS = "optimizer.step() calls", "gradient used", "items in each call"
MOVED, NAN = "movement of the parameters", "a nan in the first of 3 micro-batches"

STEP_INSIDE = Cause("optimizer.step() is inside the loop: step once, after the last backward.")
NO_STEP = Cause("Did you forget optimizer.step()?")
ONE_STEP = Cause("One step for the whole batch: after the loop, and outside of every `if`.")
OLD_GRADIENT = Cause("The old gradient is still in there: call zero_grad first.")
BY_HAND = Cause("Before the first step there is no gradient yet: use optimizer.zero_grad().")
SUMMED = Cause("The gradients were summed, not averaged: divide each loss.")
TWICE = Cause("Divided twice: divide each loss by num_micro_batches once.")
ONLY_LAST = Cause(
    "Only the last micro-batch is left: zero_grad is in the loop, or backward is not."
)
CLEARED = Cause("No gradient at the step: no backward, or a zero_grad between it and the step.")
BY_ITEMS = Cause("Divided by the items: each loss is a mean already. Divide by num_micro_batches.")
ONCE_EACH = Cause(
    "Call the model once on each micro-batch, and on nothing else, also for the loss."
)
SUM_OF_LOSSES = Cause("That is the sum of the losses: return their mean.")
LAST_LOSS = Cause("That is the last micro-batch's loss: return the mean of all.")
LAST_PART = Cause("That is the last micro-batch's part of the loss: add all of them up.")
ONE_NUMBER = Cause("Return one number, the mean loss of the whole batch.")
NOT_CLIPPED = Cause("Nothing was clipped before the step.")
CLIPS_RUNNING = Cause("Clipped after each micro-batch: clip once, after the last backward.")
CLIPS_EACH = Cause("Each micro-batch was clipped by itself: clip their sum.")
CLIPS_PARAMETERS = Cause(
    "Each parameter was clipped by itself: the norm is that of all parameters together."
)
CLIPS_NUMBERS = Cause("Single values were cut off: scale the whole gradient instead.")
OTHER_NORM = Cause("That is another norm: clip by the Euclidean norm, which is norm_type=2.")
ZERO_NORM = Cause(
    "A gradient may be all zeros, and its norm 0: clip_grad_norm_ adds 1e-6 before it divides."
)
CLIPS_SUM = Cause(
    "Clipped to max_norm / num_micro_batches: clip the mean gradient, not the sum, and to max_norm "
    "itself."
)
CLIPS_GROUPS = Cause(
    "Each group of the optimizer was clipped by itself: the norm is that of all parameters."
)
TIED_NORM = Cause(
    "A weight that two layers share counts once in the norm: remove_duplicate=False counts it for "
    "each of them."
)
SOME_PARAMETERS = Cause("Some parameters were left out: clip all of them in one call.")
STRETCHED = Cause(
    "A gradient whose norm is below max_norm stays as it is: clipping never enlarges it."
)
LOOK = Cause("Compare with one backward of the full batch, and one step.")


def _step(
    answer: Callable[..., Any],
    items: int,
    count: int,
    *more: float,
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    first: bool = False,
    target: float | None = None,
    nan: bool = False,
) -> dict[str, Any]:
    """Take a step; return what it did. In the `first` one, nothing has a gradient yet."""
    (x, y), model = batch_of(items), line()
    if nan:
        x[0] = torch.nan
    if target is not None:
        y = model(x).detach() + target
    if not first:
        with_old_grads(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return _observed(answer, model, loss_fn, optimizer, (x, y), count, *more)


def _odd_step(answer: Callable[..., Any], *more: float) -> dict[str, Any]:
    model, batch = Odd(nn.Linear(2, 3), nn.Linear(3, 2)), batch_of(6, width=2)
    return _observed(answer, model, F.mse_loss, two_groups(model, LR), batch, 3, *more)


def _observed(
    answer: Callable[..., Any],
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    count: int,
    *more: float,
) -> dict[str, Any]:
    """Call the answer, and return what it did; with `more`, max_norm, it need return no loss."""
    (x, y), used, before = batch, list[Tensor](), flat(model.parameters())
    optimizer.register_step_post_hook(lambda *_: used.append(flat_grads(model)))
    arguments = (loss_fn, optimizer, batch, count, *more)
    seen, calls, loss = called(answer, model, *arguments, inputs=x, targets=y)
    moved = before - flat(model.parameters())
    last = used[-1] if used else None
    done = {STEPS: len(used), USED: last, CALLS: calls, MOVED: moved, **seen}
    return done if more else {**done, **about_loss(loss)}


def _held(answer: Callable[..., Any], *more: float) -> dict[str, str]:
    def run(model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        answer(model, mean_square, optimizer, (x, y), count, *more)

    return held_at_once(thick, run)


def _cases() -> list[EffectCase]:
    cases: list[EffectCase] = [
        (parts_of(items, count), partial(_step, items=items, count=count))
        for items, count in ((2, 1), (4, 2), (6, 3), (8, 8))
    ]
    return [
        *cases,
        ("the first step of all", partial(_step, items=6, count=2, first=True)),
        ("another loss_fn", partial(_step, items=6, count=2, loss_fn=F.l1_loss)),
        (f"a model {ODD}", _odd_step),
        (NAN, partial(_step, items=6, count=3, nan=True)),
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
        (f"{NAN}, max_norm 0.5", _clipped(6, 3, 0.5, nan=True)),
        (f"a model {ODD}, max_norm 0.5", lambda answer: _odd_step(answer, 0.5)),
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
FIRST_GROUP = 'optimizer.param_groups[0]["params"]'
ZERO_BY_HAND = "for param in model.parameters():\n    param.grad.zero_()"

SMALLER_LR = """for group in optimizer.param_groups:
    group["lr"] /= num_micro_batches
optimizer.step()"""

MEAN_LOSS = "total += loss.detach() / num_micro_batches"

DIVIDE_LAYERS = """for module in model.modules():
    for param in module.parameters(recurse=False):
        if param.grad is not None:
            param.grad /= num_micro_batches
optimizer.step()"""

DIVIDE_ALL = """for param in model.parameters():
    param.grad /= num_micro_batches
optimizer.step()"""

FILL = """for param in model.parameters():
    if param.grad is None:
        param.grad = torch.zeros_like(param)
optimizer.step()"""

CLIP_GROUPS = """for group in optimizer.param_groups:
    nn.utils.clip_grad_norm_(group["params"], max_norm)"""

CLIP_TIED = """named = model.named_parameters(remove_duplicate=False)
nn.utils.clip_grad_norm_([param for _, param in named], max_norm)"""

BY_TIED_NORM = """named = model.named_parameters(remove_duplicate=False)
norm = torch.stack([param.grad.norm() for _, param in named if param.grad is not None]).norm()
for param in model.parameters():
    if param.grad is not None:
        param.grad *= min(1.0, max_norm / (norm + 1e-6))"""

CLIP_PARAMETERS = """for param in model.parameters():
    nn.utils.clip_grad_norm_([param], max_norm)"""

SKIP_NAN = f"loss = {DIVIDED}\nif loss.isfinite():\n    loss.backward()"

REPLACE_NAN = """for param in model.parameters():
    if param.grad is not None:
        torch.nan_to_num_(param.grad)"""

BY_OWN_NORM = """norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
for param in model.parameters():"""

ACCUMULATE = Exercise(
    key="accumulation-2",
    title="one step from micro-batches",
    library=(
        "course_lib.accumulation.accumulation:accumulated_step",
        "course_lib.accumulation.accumulation:accumulate_gradients",
    ),
    check=Effects(
        cases=_cases,
        looks={**LOOKS, STEPS: ONE_STEP, CALLS: ONCE_EACH, LOSS: ONE_NUMBER},
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
        Edit(BACK, "pass", CLEARED),
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
        Edit(ZERO, f"{ZERO}\nmodel.eval()", SWITCHED),
        Edit(
            DIVIDED,
            MEAN,
            SUMMED,
            also=((ADD, MEAN_LOSS), (STEP, SMALLER_LR)),
        ),
        Edit(SPLIT, "[batch]", ONCE_EACH, also=((DIVIDED, MEAN),)),
        Edit("return total", "return total * num_micro_batches", SUM_OF_LOSSES),
        Edit("return total", "return loss.detach() * num_micro_batches", LAST_LOSS),
        Edit("return total", "return loss.detach()", LAST_PART),
        Edit(DIVIDED, f"{MEAN} * len(x) / len(batch[0]) ** 2", BY_ITEMS),
        Edit(DIVIDED, DIVIDED.replace("loss_fn", "F.mse_loss"), OTHER_LOSS),
        Edit(ZERO, ZERO_BY_HAND, BY_HAND),
        Edit(ZERO, f"{ZERO}\nbatch[1].neg_()", CALLERS),
        Own(_loss_of_another_forward, ONCE_EACH),
        Edit(
            "loss = loss_fn(model(x), y)",
            "outputs.append(model(x))\nloss = loss_fn(outputs[-1], y)",
            LEFTOVERS,
            also=(("total = 0.0", "total, outputs = 0.0, []"),),
        ),
        Edit(DIVIDED, MEAN, TIED, also=((ADD, MEAN_LOSS), (STEP, DIVIDE_LAYERS))),
        Edit(DIVIDED, MEAN, NO_GRAD_STAYS, also=((ADD, MEAN_LOSS), (STEP, DIVIDE_ALL))),
        Edit(STEP, FILL, NO_GRAD_STAYS),
        Edit(ZERO, f"{ZERO}\nmodel.requires_grad_(True)", FROZEN),
        Edit(BACK, f"{BACK}\ntorch.manual_seed(0)", SEEDED),
        Edit(BACK, f"if not loss.isfinite():\n    continue\n{BACK}", NAN_LEFT_OUT),
        Edit(ZERO, f"{ZERO}\nmodel.train()", SWITCHED),
        Edit("total = 0.0", "total = torch.zeros(())", FEWER_BITS),
    ),
)

CLIPPED = Exercise(
    key="accumulation-5",
    title="clip what was accumulated",
    check=Effects(
        cases=_clip_cases,
        looks={**LOOKS, STEPS: ONE_STEP, CALLS: ONCE_EACH},
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
        Edit(SPLIT, "[batch]", ONCE_EACH, also=((DIVIDED, MEAN),)),
        Edit(DIVIDED, MEAN, SUMMED),
        Edit(ZERO, "pass", OLD_GRADIENT),
        Edit(CLIP, f"{CLIP[:-1]}, norm_type=1)", OTHER_NORM),
        Edit(CLIP, f"{CLIP[:-1]} / num_micro_batches)", CLIPS_SUM),
        Edit(CLIP, "nn.utils.clip_grad_norm_([model.weight], max_norm)", SOME_PARAMETERS),
        Edit(CLIP, f"{BY_OWN_NORM}\n    param.grad *= max_norm / (norm + 1e-6)", STRETCHED),
        Edit(CLIP, f"{BY_OWN_NORM}\n    param.grad *= min(1.0, max_norm / norm.item())", ZERO_NORM),
        Edit(ZERO, f"{ZERO}\nmodel.eval()", SWITCHED),
        Edit(CLIP, CLIP_GROUPS, CLIPS_GROUPS),
        Edit(CLIP, CLIP_TIED, TIED_NORM),
        Edit(CLIP, BY_TIED_NORM, TIED_NORM),
        Edit(STEP, FILL, NO_GRAD_STAYS),
        Edit(ZERO, f"{ZERO}\nmodel.requires_grad_(True)", FROZEN),
        Edit(CLIP, CLIP.replace("model.parameters()", FIRST_GROUP), SOME_PARAMETERS),
        Edit(CLIP, "pass", NOT_CLIPPED, also=((ZERO, f"{CLIP}\n{ZERO}"),)),
        Edit(f"({DIVIDED}).backward()", SKIP_NAN, NAN_LEFT_OUT),
        Edit(CLIP, f"{REPLACE_NAN}\n{CLIP}", NAN_LEFT_OUT),
        Edit(ZERO, f"{ZERO}\nmodel.train()", SWITCHED),
    ),
)
