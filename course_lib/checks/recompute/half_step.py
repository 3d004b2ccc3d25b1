"""Exercise 4 of 03_recompute: one step of an fp32 master for an fp16 parameter."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.accumulation.effects import LOOKS, OLD, EffectCase, Effects, watched
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.properties import SEEDS

STEPPED, MASTER, PARAMETER = "returned", "master", "parameter"
STEPS, MEMORY = "optimizer.step() calls", "memory of the parameter"
STEPS_NOT_FINITE = f"{STEPS} where not all is finite"

CLIPPED_SCALED = Cause("Clipped before the scale was divided out.")
SCALED = Cause("The scale is still in the gradient: divide by it.")
IN_HALF = Cause("Nothing moved: too small for 16 bits. Divide and step in fp32.")
ROUNDED = Cause("The master was rounded to 16 bits: keep fp32.")
STEPS_ANYWAY = Cause("Not every number is finite: the step must be skipped.")
ONLY_NAN = Cause("An inf is not a nan, but just as bad: look for both, with isfinite().")
ONLY_INF = Cause("A nan is not an inf, but just as bad: look for both, with isfinite().")
STALE = Cause("After the step, copy master into param: param.copy_ under no_grad.")
OTHER_MEMORY = Cause(
    "The parameter got new memory, and what refers to the old one (a view, a bucket) does not see "
    "the step. Write into it: param.copy_(master) under no_grad."
)
NO_STEP = Cause("The master did not move: give it a .grad, then call optimizer.step().")
NOT_CALLED = Cause("Let the optimizer step the master, in its own way: call optimizer.step() once.")
FROM_PARAM = Cause("Small steps are lost in 16 bits: never copy param into master.")
NOT_CLIPPED = Cause("master.grad was not clipped: clip it before the step.")
SCALED_UP = Cause("A gradient below max_norm was scaled up: the factor is at most 1.")
NOT_SET = Cause("The last step's gradient is still in master.grad: set it, do not add to it.")
SAYS_NOT = Cause("Return True if it stepped, False if the step was skipped.")
LOOK = Cause(
    "Do each of these once, in fp32: unscale, check that all is finite, clip (a norm below "
    "max_norm stays as it is), step, copy."
)


def _step(
    answer: Callable[..., Any],
    start: float,
    numbers: Sequence[float],
    scale: float,
    max_norm: float,
    lr: float = 1.0,
    again: bool = False,
    num_steps: int = 1,
) -> dict[str, Any]:
    """Take steps; `again`: as after an earlier one, whose gradient the master still has."""
    param = nn.Parameter(torch.full((4,), start, dtype=torch.float16))
    master = torch.full((4,), start, requires_grad=True)
    master.grad = torch.full((4,), OLD) if again else None
    optimizer, steps, memory = torch.optim.SGD([master], lr=lr), list[int](), param.data_ptr()
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    with watched(("param", "master"), param=param, master=master) as seen:
        for _ in range(num_steps):
            param.grad = torch.tensor(numbers, dtype=torch.float16)
            stepped = answer(param, master, optimizer, scale, max_norm)
    finite = all(map(math.isfinite, numbers))
    # a tensor of one bool, such as `isfinite().all()`, is one, too
    is_truth = isinstance(stepped, Tensor) and stepped.dtype == torch.bool and stepped.numel() == 1
    return {
        MASTER: master.detach().clone(),
        (STEPS if finite else STEPS_NOT_FINITE): len(steps),
        PARAMETER: param.detach().clone(),
        MEMORY: "the same" if param.data_ptr() == memory else "another",
        **seen,
        STEPPED: bool(stepped) if is_truth else stepped,
    }


def _cases() -> list[EffectCase]:
    finite: tuple[tuple[float, ...], ...] = (
        (1.0, 0.5, 1.0, 9.0),
        (1.0, 64.0, 128.0, 9.0),
        (1.0, 11 / 128, 128.0, 9.0),
        (0.0, 2**-14, 2.0**12, 9.0),
        (1.0, 256.0, 128.0, 0.5),
        (1.0, 60000.0, 2.0**14, 100.0),
        (1.0, 0.0, 128.0, 0.5),
    )
    cases: list[EffectCase] = [
        (
            f"gradient {half:g} of a loss times {scale:g}, max_norm {max_norm:g}",
            partial(_step, start=start, numbers=[half] * 4, scale=scale, max_norm=max_norm),
        )
        for start, half, scale, max_norm in finite
    ]
    usual = partial(_step, start=1.0, numbers=[1.0, 2.0, -4.0, 8.0], scale=2.0, max_norm=3.0)
    inf, nan = math.inf, math.nan
    not_finite = ([inf] * 4, [nan] * 4, [1, inf, 1, 1], [1, 1, nan, 1], [1, -inf, 1, inf])
    return [
        *cases,
        ("a second step", partial(usual, again=True)),
        ("lr 0.25", partial(usual, lr=0.25)),
        ("8 small steps", partial(usual, numbers=[2.0**-12] * 4, num_steps=8)),
        *((f"gradient {each}", partial(usual, numbers=each, scale=128.0)) for each in not_finite),
    ]


UNSCALED, FINITE = "param.grad.float() / scale", "if not master.grad.isfinite().all():"
CLIP = "nn.utils.clip_grad_norm_([master], max_norm)"
UNSCALED_LATE = (CLIP, f"{CLIP}\nmaster.grad /= scale")
STEP, COPY = "optimizer.step()", "param.copy_(master)"
ADDED = f"{UNSCALED} + (0 if master.grad is None else master.grad)"

HALF_STEP = Exercise(
    key="recompute-4",
    title="a 16-bit step",
    check=Effects(
        cases=_cases,
        looks={
            **LOOKS,
            STEPS: NOT_CALLED,
            STEPS_NOT_FINITE: STEPS_ANYWAY,
            MEMORY: OTHER_MEMORY,
            STEPPED: SAYS_NOT,
            PARAMETER: STALE,
        },
        look=LOOK,
        rtol=1e-5,
        success="Unscaled in fp32, clipped, stepped in fp32, and rounded once.",
    ),
    wrong=(
        Edit(UNSCALED, "param.grad.float()", CLIPPED_SCALED, also=(UNSCALED_LATE,)),
        Edit(UNSCALED, "param.grad.float()", SCALED),
        Edit(UNSCALED, "(param.grad / scale).float()", IN_HALF),
        Edit(COPY, f"{COPY}\nmaster.copy_(param)", ROUNDED),
        Edit("return False", "pass", STEPS_ANYWAY),
        Edit(FINITE, "if master.grad.isnan().any():", ONLY_NAN),
        Edit(FINITE, "if master.grad.isinf().any():", ONLY_INF),
        Edit(COPY, "pass", STALE),
        Edit(COPY, "param.data = master.detach().half()", OTHER_MEMORY),
        Edit(STEP, "pass", NO_STEP),
        Edit(STEP, "master.data -= master.grad", NOT_CALLED),
        Edit(STEP, f"master.data.copy_(param)\n{STEP}", FROM_PARAM),
        Edit(CLIP, "pass", NOT_CLIPPED),
        Edit(CLIP, "master.grad *= max_norm / (master.grad.norm() + 1e-6)", SCALED_UP),
        Edit(UNSCALED, ADDED, NOT_SET),
        Edit("return False", "return True", SAYS_NOT),
        SEEDS,
    ),
)
