"""The checks of 03_recompute about 16 bits: one step of fp32 masters, and the loss scale."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.accumulation.parts import expect_near, near
from course_lib.checks.exercise import CheckFailed
from course_lib.checks.expect import Cause, expect_equal
from course_lib.recompute.mixed_precision import LossScale


def check_half_step(answer: Callable[..., Any]) -> str:
    """Check one step of fp32 masters for fp16 parameters, with the gradients of a scaled loss."""
    for start, half, scale, max_norm in (
        (1.0, 0.5, 1.0, 9.0),
        (1.0, 64.0, 128.0, 9.0),
        (1.0, 11 / 128, 128.0, 9.0),
        (0.0, 2**-14, 2.0**12, 9.0),
        (1.0, 256.0, 128.0, 0.5),
    ):
        where = f"gradient {half:g} of a loss times {scale:g}, max_norm {max_norm:g}"
        stepped, param, master = _half_step(answer, start, half, scale, max_norm)

        def after(gradient: float, start: float = start) -> Tensor:
            return start - torch.full((4,), gradient)

        true = half / scale * min(1.0, max_norm / (2 * half / scale + 1e-6))
        causes: list[Cause] = [
            (near(after(min(half, max_norm / 2) / scale)), "Clipped before the scale was out."),
            (near(after(min(half, max_norm / 2))), "The scale is still in it."),
            (near(after(0.0)), _still(half / scale)),
            (near(after(half / scale)), "Nothing was clipped."),
            (near(after(true).half().float()), "The master was rounded to 16 bits: keep fp32."),
        ]
        expect_near(master, after(true), f"{where}, master", causes)
        says = "Copy the master into the parameter, in place: param.copy_ under no_grad."
        stale: list[Cause] = [(near(after(0.0).half()), says)]
        expect_near(param, master.half(), f"{where}, parameter", stale)
        expect_equal(_plain_bool(stepped), True, where=where)
    for bad in (math.inf, math.nan):
        for numbers in ([bad] * 4, [1.0, bad, 1.0, 1.0]):
            where = f"gradient {numbers}"
            stepped, _, master = _half_step(answer, 1.0, numbers, 128.0, 9.0)
            if not torch.equal(master, torch.ones(4)):
                raise CheckFailed(f"{where}: the step must be left out; the master changed.")
            expect_equal(_plain_bool(stepped), False, where=where)
    return "Unscaled in fp32, then clipped, stepped in fp32, rounded once."


def _still(gradient: float) -> str:
    if gradient < 2.0**-24:
        return "Nothing moved: too small for 16 bits. Divide and step in fp32."
    return "The master did not move: give it a .grad, then call optimizer.step()."


def _plain_bool(stepped: Any) -> Any:
    """Return a bool: `isfinite().all()` is a tensor."""
    is_bool = isinstance(stepped, Tensor) and stepped.dtype == torch.bool and stepped.numel() == 1
    return bool(stepped) if is_bool else stepped


def _half_step(
    answer: Callable[..., Any],
    start: float,
    grad: float | list[float],
    scale: float,
    max_norm: float,
) -> tuple[Any, Tensor, Tensor]:
    param = nn.Parameter(torch.full((4,), start, dtype=torch.float16))
    master = torch.full((4,), start, requires_grad=True)
    param.grad = torch.tensor(grad, dtype=torch.float16).expand(4).clone()
    stepped = answer(param, master, torch.optim.SGD([master], lr=1.0), scale, max_norm)
    return stepped, param.detach(), master.detach()


def check_scale(answer: Callable[..., Any]) -> str:
    """Check that the scale halves after an overflow, and doubles after three good steps."""
    scale, good = 8.0, 0
    right, right_good, seen = 8.0, 0, ""
    for step, finite in enumerate([True, False, *[True] * 8, *[False] * 6, True]):
        right_good = right_good + 1 if finite else 0
        previous, seen = right, seen + (" good" if finite else " overflow")
        right = right * 2 if right_good == 3 else right if finite else right / 2
        right_good %= 3
        scale, good = answer(scale, good, finite)
        causes: list[Cause] = [
            (lambda got, f=finite, p=previous: not f and got >= p, "An overflow halves the scale."),
            (lambda got, p=previous: got > p, "Too early: only after 3 good steps in a row."),
            (
                lambda got, p=previous: got == p,
                "Three good steps in a row double it; num_good are those before this one.",
            ),
            (lambda got, f=finite: f and got < 4, "Return the scale first, then the count."),
            (0.0, "Halve with /: a scale may go below 1."),
        ]
        where = f"step {step}, after{seen}: scale"
        expect_equal(float(scale), right, where=where, causes=causes)
    return "Down at once, up after a long calm."


def next_scale(scale: float, num_good: int, finite: bool) -> tuple[float, int]:
    state = LossScale(scale, interval=3, num_good_steps=num_good)
    state.update(finite)
    return state.scale, state.num_good_steps


def forgets_overflow(scale: float, num_good: int, finite: bool) -> tuple[float, int]:
    """Halve the scale at an overflow and leave the count as it is."""
    if not finite:
        return scale / 2, num_good
    return (scale * 2, 0) if num_good == 2 else (scale, num_good + 1)


def only_grows(scale: float, num_good: int, finite: bool) -> tuple[float, int]:
    return next_scale(scale, num_good, True) if finite else (scale, 0)


def never_grows(scale: float, num_good: int, finite: bool) -> tuple[float, int]:
    return (scale, num_good + 1) if finite else (scale / 2, 0)


def grows_once(scale: float, num_good: int, finite: bool) -> tuple[float, int]:
    """Continue counting after the third good step, and so never reach three again."""
    if not finite:
        return scale / 2, 0
    return (scale * 2 if num_good == 2 else scale), num_good + 1
