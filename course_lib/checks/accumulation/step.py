"""Exercises 2 and 5 of 02_accumulation: one step from micro-batches, and one that is clipped."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.accumulation import effects, models
from course_lib.checks.accumulation.effects import EffectCase, Effects
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise

LR = 0.5
STEPS, USED, CALLS = "optimizer.step() calls", "gradient used", "items in each call"
MOVED, NAN = "movement of the parameters", "a nan in the first of 3 micro-batches"

STEP_INSIDE = Cause("optimizer.step() is inside the loop: step once, after the last backward.")
ONE_STEP = Cause("One step for the whole batch: after the loop, and outside of every `if`.")
OLD_GRADIENT = Cause("The old gradient is still in there: call zero_grad first.")
SUMMED = Cause("The gradients were summed, not averaged: divide each loss.")
TWICE = Cause("Divided twice: divide each loss by num_micro_batches once.")
ONLY_LAST = Cause("Only the last micro-batch is left: is zero_grad in the loop? Is backward?")
CLEARED = Cause("No gradient at the step: no backward, or a zero_grad between it and the step.")
ONCE_EACH = Cause("Call the model once on each micro-batch, on nothing else, also for the loss.")
ONE_NUMBER = Cause("Return one number, the mean loss of the whole batch.")
NOT_CLIPPED = Cause("Nothing was clipped before the step.")
CLIPS_RUNNING = Cause("Clipped after each micro-batch: clip once, after the last backward.")
CLIPS_EACH = Cause("Each micro-batch was clipped by itself: clip their sum.")
CLIPS_PARAMETERS = Cause("The norm is that of all parameters together, not each one's own.")
CLIPS_NUMBERS = Cause("Single values were cut off: scale the whole gradient instead.")
CLIPS_SUM = Cause("Clip the mean gradient, not the sum, and to max_norm itself.")
SOME_PARAMETERS = Cause("Some parameters were left out: clip all of them in one call.")
STRETCHED = Cause("Clipping never enlarges: a norm below max_norm stays as it is.")
LOOK = Cause("Compare with one backward of the full batch, and one step.")


def _step(
    answer: Callable[..., Any],
    sizes: tuple[Any, ...],
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    first: bool = False,
    target: float | None = None,
    nan: bool = False,
    odd: bool = False,
) -> dict[str, Any]:
    """Take a step; return what it did. In the `first` one, nothing has a gradient yet.

    `sizes` are the items, the micro-batches, and where it has to clip, and to return no loss,
    max_norm.
    """
    items, count, *more = sizes
    model, x, y = models.example(items, odd)
    if nan:
        x[0] = torch.nan
    if target is not None:
        y = model(x).detach() + target
    if not (first or odd):
        effects.with_old_grads(model)
    optimizer = models.two_groups(model, LR) if odd else torch.optim.SGD(model.parameters(), LR)
    used, before = list[Tensor](), effects.flat(model.parameters())
    optimizer.register_step_post_hook(lambda *_: used.append(effects.flat_grads(model)))
    arguments = (loss_fn, optimizer, (x, y), count, *more)
    seen, calls, loss = effects.called(answer, model, *arguments, steps=True, inputs=x, targets=y)
    moved = before - effects.flat(model.parameters())
    last = used[-1] if used else None
    done = {STEPS: len(used), USED: last, CALLS: calls, MOVED: moved, **seen}
    return done if more else {**done, **effects.about_loss(loss)}


def _held(answer: Callable[..., Any], *more: float) -> dict[str, str]:
    def run(model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        answer(model, models.mean_square, optimizer, (x, y), count, *more)

    return effects.held_at_once(models.thick, run)


def _sized(*sizes: Any) -> EffectCase:
    """Return the case of so many items, in so many micro-batches, perhaps clipped to max_norm."""
    text = f"{sizes[0]} items in {sizes[1]} micro-batch{'es' if sizes[1] > 1 else ''}"
    step = partial(_step, sizes=sizes)
    return f"{text}, max_norm {sizes[2]:g}" if sizes[2:] else text, step


def _cases() -> list[EffectCase]:
    return [
        *(_sized(*sizes) for sizes in ((2, 1), (4, 2), (6, 3), (8, 8))),
        ("the first step of all", partial(_step, sizes=(6, 2), first=True)),
        ("another loss_fn", partial(_step, sizes=(6, 2), loss_fn=F.l1_loss)),
        (f"a model {models.ODD}", partial(_step, sizes=(6, 3), odd=True)),
        (NAN, partial(_step, sizes=(6, 3), nan=True)),
        ("16 items in 4 micro-batches", _held),
    ]


def _clip_cases() -> list[EffectCase]:
    return [
        *(_sized(*sizes) for sizes in ((2, 1, 0.5), (4, 2, 1e3), (4, 2, 0.5), (6, 3, 0.1))),
        ("a gradient of zeros", partial(_step, sizes=(4, 2, 0.5), target=0.0)),
        ("a short gradient", partial(_step, sizes=(4, 2, 1.0), target=0.01)),
        ("another loss_fn", partial(_step, sizes=(6, 2, 1.0), loss_fn=F.l1_loss)),
        (f"{NAN}, max_norm 0.5", partial(_step, sizes=(6, 3, 0.5), nan=True)),
        (f"a model {models.ODD}, max_norm 0.5", partial(_step, sizes=(6, 3, 0.5), odd=True)),
        ("16 items in 4 micro-batches", lambda answer: _held(answer, 1e3)),
    ]


ZERO, SPLIT = "optimizer.zero_grad()", "split_micro_batches(batch, num_micro_batches)"
MEAN, DIVIDED = "loss_fn(model(x), y)", "loss_fn(model(x), y) / num_micro_batches"
BACK, ADD, STEP = "loss.backward()", "total += loss.detach()", "optimizer.step()"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), max_norm)"

CLIP_EACH = f"""before = [param.grad for param in model.parameters()]
optimizer.zero_grad(set_to_none=True)
({DIVIDED}).backward()
{CLIP}
for param, old in zip(model.parameters(), before):
    if old is not None:
        param.grad += old"""

CLIP_PARAMETERS = """for param in model.parameters():
    nn.utils.clip_grad_norm_([param], max_norm)"""

HIDE_NAN = f"""for param in model.parameters():
    torch.nan_to_num_(param.grad)
{CLIP}"""

STRETCH = """norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
for param in model.parameters():
    param.grad *= max_norm / (norm + 1e-6)"""

ACCUMULATE = Exercise(
    key="accumulation-2",
    title="one step from micro-batches",
    library=(
        "course_lib.accumulation.accumulation:accumulated_step",
        "course_lib.accumulation.accumulation:accumulate_gradients",
    ),
    check=Effects(
        cases=_cases,
        looks={**effects.LOOKS, STEPS: ONE_STEP, CALLS: ONCE_EACH, effects.LOSS: ONE_NUMBER},
        look=LOOK,
        rtol=1e-9,
        success="The full batch's gradient and loss, one step, one micro-batch in memory.",
    ),
    wrong=(
        Edit(DIVIDED, MEAN, SUMMED),
        Edit(DIVIDED, f"{DIVIDED} ** 2", TWICE),
        Edit(BACK, f"{ZERO}\n{BACK}", ONLY_LAST),
        Edit(ZERO, "pass", OLD_GRADIENT),
        Edit(f"{ADD}\n    {STEP}", f"{ADD}\n        {STEP}", STEP_INSIDE),
        Edit(ZERO, "pass", CLEARED, also=((STEP, f"{ZERO}\n{STEP}"),)),
        Edit(BACK, effects.KEEP, effects.ALIVE),
        Edit(ADD, "total += loss", effects.WITH_GRAPH),
        Edit(SPLIT, "[batch]", ONCE_EACH, also=((DIVIDED, MEAN),)),
        Edit(BACK, f"if not loss.isfinite():\n    continue\n{BACK}", effects.NAN_LEFT_OUT),
        *effects.TO_CALLERS,
    ),
)

CLIPPED = Exercise(
    key="accumulation-5",
    title="clip what was accumulated",
    check=Effects(
        cases=_clip_cases,
        looks={**effects.LOOKS, STEPS: ONE_STEP, CALLS: ONCE_EACH},
        look=LOOK,
        success="The accumulated gradient is clipped, once, by its whole norm.",
    ),
    wrong=(
        Edit(CLIP, "pass", CLIPS_RUNNING, also=((".backward()", f".backward()\n{CLIP}"),)),
        Edit(CLIP, "pass", CLIPS_EACH, also=((f"({DIVIDED}).backward()", CLIP_EACH),)),
        Edit(CLIP, "pass", NOT_CLIPPED),
        Edit(CLIP, CLIP_PARAMETERS, CLIPS_PARAMETERS),
        Edit(CLIP, CLIP.replace("norm_(", "value_("), CLIPS_NUMBERS),
        Edit(SPLIT, "[batch]", ONCE_EACH, also=((DIVIDED, MEAN),)),
        Edit(DIVIDED, MEAN, SUMMED),
        Edit(ZERO, "pass", OLD_GRADIENT),
        Edit(CLIP, f"{CLIP[:-1]} / num_micro_batches)", CLIPS_SUM),
        Edit(CLIP, "nn.utils.clip_grad_norm_([model.weight], max_norm)", SOME_PARAMETERS),
        Edit(CLIP, STRETCH, STRETCHED),
        Edit(CLIP, HIDE_NAN, effects.NAN_LEFT_OUT),
        *effects.TO_CALLERS,
    ),
)
