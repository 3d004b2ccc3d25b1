"""Exercise 6 of 02_accumulation: the gradient noise scale, from the gradients of micro-batches."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.properties import COUNTS, FLOAT32

SIZES = (  # micro-batches of each step, numbers, micro-batch
    ((2,), 3, 1),
    ((4,) * 3, 5, 1),
    ((2,) * 4, 6, 8),
    ((8,) * 5, 3, 4),
    ((4,) * 12, 2, 16),
    ((2,) * 10, 4, 1),
    ((3, 5, 2, 7), 200, 16),
)
DISAGREE = (1.0, -0.5)  # of these gradients |G|^2 is estimated as -0.5
THEIR_RATIO = -2.25


def drawn_gradients(counts: Sequence[int], numbers: int, micro_batch: int) -> list[Tensor]:
    """Return the micro-batches' mean gradients of each step; the true gradient shrinks on the way.

    Shapes:  -> for each count [count, numbers], float64
    """
    random = torch.Generator().manual_seed(100 * len(counts) + micro_batch)
    true = torch.randn(numbers, generator=random, dtype=torch.float64)
    found = []
    for step, count in enumerate(counts):
        noise = torch.randn((count, numbers), generator=random, dtype=torch.float64)
        found.append(2 * true / (1 + step) + noise / micro_batch**0.5)
    return found


def _cases() -> list[Case]:
    drawn = [
        (
            f"{len(counts)} {'steps' if len(counts) > 1 else 'step'} of "
            f"{', '.join(map(str, dict.fromkeys(counts)))} micro-batches of {size} "
            f"{'examples' if size > 1 else 'example'}",
            (drawn_gradients(counts, numbers, size), size),
        )
        for counts, numbers, size in SIZES
    ]
    two = torch.tensor(DISAGREE, dtype=torch.float64).unsqueeze(1)
    return [*drawn, ("2 micro-batches of 1 example that disagree", ([two], 1))]


def _shown(result: Any, steps: Sequence[Tensor], _micro_batch: int) -> Any:
    """Return it as a float; inf is right, too, where the estimate of |G|^2 is not above 0."""
    found = real(result)
    disagree = bool(steps) and steps[0].flatten().tolist() == [*DISAGREE]
    return THEIR_RATIO if found == math.inf and disagree else found


NOT_SUBTRACTED = Cause(
    "The squared norm of the whole batch's gradient still contains noise, tr(Sigma) / B: subtract "
    "it, with the norms at both batch sizes."
)
ALL_NOISE = Cause("Both squared norms contain |G|^2: their difference does not.")
MEAN_OF_RATIOS = Cause(
    "You averaged ratios. Each step's ratio is biased, and may even be negative: average |G|^2 and "
    "tr(Sigma) over the steps, then divide once."
)
NOT_SQUARED = Cause("These are norms: the equations need squared norms.")
SUMMED = Cause("The gradient of the whole batch is the mean of its micro-batches', not their sum.")
MEAN_OF_NUMBERS = Cause("A squared norm is a sum over all numbers of the gradient, not their mean.")
IN_MICRO_BATCHES = Cause("Those are micro-batches, not items: use micro_batch.")
NOT_SCALED = Cause("The difference is tr(Sigma) (1/b - 1/B): divide by that bracket.")
UPSIDE_DOWN = Cause("That is |G|^2 / tr(Sigma): the noise scale is its inverse.")
ONE_STEP = Cause("Only one step counts: add up the estimates of all steps.")
TOGETHER = Cause("The gradient changes between steps: estimate each step by itself, then average.")
CLAMPED = Cause("An estimate of |G|^2 may be negative. Keep it, or the average is too large.")
NEGATIVE_TOO = Cause("A negative ratio says that the data are too few: do not hide that.")
EACH_ITS_OWN = Cause("The steps have different numbers of micro-batches: B is a step's own.")
IN_PLACE = Cause("These gradients are the caller's: leave the list and its tensors as they are.")

BIG_SQ, SMALL_SQ = "grads.mean(0).pow(2).sum()", "grads.pow(2).sum(1).mean()"
ESTIMATE = "(big * big_sq - micro_batch * small_sq) / (big - micro_batch)"
GRAD_SQ, NOISE = (
    f"grad_sq += {ESTIMATE}",
    "noise += (small_sq - big_sq) / (1 / micro_batch - 1 / big)",
)
BIG, RETURN = "big = len(grads) * micro_batch", "return (noise / grad_sq).item()"

NOISE_SCALE = Exercise(
    key="accumulation-6",
    title="the gradient noise scale",
    library=(
        "course_lib.accumulation.noise_scale:estimate_noise",
        "course_lib.accumulation.noise_scale:noise_scale",
        "course_lib.accumulation.noise_scale:accumulate_with_noise",
    ),
    check=Cases(
        cases=_cases,
        show=_shown,
        rtol=1e-6,  # float32 would do, too
        unit=" examples",
        look="Write down the squared norms of one step at both batch sizes, and solve for |G|^2.",
        success="Unbiased in every step, averaged before the division.",
        unchanged=IN_PLACE,
    ),
    wrong=(
        Edit(GRAD_SQ, "grad_sq += big_sq", NOT_SUBTRACTED),
        Edit(NOISE, "noise += micro_batch * small_sq", ALL_NOISE),
        Edit(
            RETURN,
            "return noise.item() / len(steps)",
            MEAN_OF_RATIOS,
            also=((GRAD_SQ, f"ratio = 1 / ({ESTIMATE})"), ("noise +=", "noise += ratio *")),
        ),
        Edit(
            BIG_SQ,
            "grads.mean(0).norm()",
            NOT_SQUARED,
            also=((SMALL_SQ, "grads.norm(dim=1).mean()"),),
        ),
        Edit(BIG_SQ, "grads.sum(0).pow(2).sum()", SUMMED),
        Edit(SMALL_SQ, "grads.pow(2).mean()", MEAN_OF_NUMBERS),
        Edit(BIG, "micro_batch = 1\nbig = len(grads)", IN_MICRO_BATCHES),
        Edit(NOISE, "noise += small_sq - big_sq", NOT_SCALED),
        Edit(RETURN, "return (grad_sq / noise).item()", UPSIDE_DOWN),
        Edit("noise +=", "noise =", ONE_STEP, also=(("grad_sq +=", "grad_sq ="),)),
        Edit("in steps", "in [torch.cat(steps)]", TOGETHER),
        Edit(GRAD_SQ, f"grad_sq += max(0, {ESTIMATE})", CLAMPED),
        Edit(BIG, "big = len(steps[0]) * micro_batch", EACH_ITS_OWN),
        Edit(RETURN, "return abs((noise / grad_sq).item())", NEGATIVE_TOO),
        Edit(RETURN, f"steps.clear()\n{RETURN}", IN_PLACE),
        *(one for one in COUNTS if one.cause != FLOAT32),
    ),
)
