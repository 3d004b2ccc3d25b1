"""Exercise 6 of 02_accumulation: the gradient noise scale, from the gradients of micro-batches."""

import torch
from torch import Tensor

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise

SIZES = (  # steps, micro-batches, numbers, micro-batch
    (1, 2, 3, 1),
    (3, 4, 5, 1),
    (4, 2, 6, 8),
    (5, 8, 3, 4),
    (12, 4, 2, 16),
    (10, 2, 4, 1),
)


def drawn_gradients(steps: int, micro_batches: int, numbers: int, micro_batch: int) -> list[Tensor]:
    """Return the micro-batches' mean gradients of each step; the true gradient shrinks on the way.

    Shapes:  -> steps times [micro_batches, numbers], float64
    """
    random = torch.Generator().manual_seed(100 * steps + micro_batch)
    true = torch.randn(numbers, generator=random, dtype=torch.float64)
    shape = (micro_batches, numbers)
    found = []
    for step in range(steps):
        noise = torch.randn(shape, generator=random, dtype=torch.float64) / micro_batch**0.5
        found.append(2 * true / (1 + step) + noise)
    return found


def _cases() -> list[Case]:
    return [
        (
            f"{steps} {'steps' if steps > 1 else 'step'} of {count} micro-batches of {size} "
            f"{'examples' if size > 1 else 'example'}",
            (drawn_gradients(steps, count, numbers, size), size),
        )
        for steps, count, numbers, size in SIZES
    ]


def _by_variance(steps: list[Tensor], micro_batch: int, correction: int = 0) -> float:
    """Return the noise scale with the variance over micro-batches; right with correction=1."""
    noise, grad_sq = 0.0, 0.0
    for grads in steps:
        of_step = micro_batch * grads.var(0, correction=correction).sum().item()
        noise += of_step
        grad_sq += grads.mean(0).pow(2).sum().item() - of_step / (micro_batch * len(grads))
    return noise / grad_sq


def _all_steps_together(steps: list[Tensor], micro_batch: int) -> float:
    """Return the estimate from the micro-batches of all steps, as if they were one batch."""
    return _by_variance([torch.cat(steps)], micro_batch, correction=1)


def _mean_of_ratios(steps: list[Tensor], micro_batch: int) -> float:
    """Return the mean of the steps' own noise scales."""
    return sum(_by_variance([grads], micro_batch, correction=1) for grads in steps) / len(steps)


NOT_SUBTRACTED = Cause(
    "The squared norm of the whole batch's gradient still contains noise, tr(Sigma) / B: subtract "
    "it, with the norms at both batch sizes."
)
ALL_NOISE = Cause(
    "The micro-batch's squared norm also contains |G|^2: the difference of the two norms does not."
)
MEAN_OF_RATIOS = Cause(
    "You averaged ratios. Each step's ratio is biased, and may even be negative: average |G|^2 and "
    "tr(Sigma) over the steps, then divide once."
)
SWAPPED = Cause("The batch sizes are swapped: the larger batch has the smaller norm.")
NOT_SQUARED = Cause("These are norms: the equations need squared norms.")
SUMMED = Cause("The gradient of the whole batch is the mean of its micro-batches', not their sum.")
MEAN_OF_NUMBERS = Cause(
    "A squared norm is a sum over all numbers of the gradient, not their mean: the micro-batches' "
    "norms are too small here."
)
IN_MICRO_BATCHES = Cause(
    "That counts in micro-batches; the noise scale is a number of examples: use micro_batch."
)
NOT_SCALED = Cause(
    "The difference of the squared norms is tr(Sigma) (1/b - 1/B): divide by that bracket."
)
UPSIDE_DOWN = Cause("That is |G|^2 / tr(Sigma): the noise scale is its inverse.")
ONE_STEP = Cause("Only one step counts: add up the estimates of all steps.")
ONE_MICRO_BATCH = Cause(
    "You used one micro-batch's norm. It has the right expectation, but average over all of them: "
    "that has less noise."
)
BIASED_VARIANCE = Cause(
    "The variance is taken around the micro-batches' own mean: divide by m - 1, not by m."
)
TOGETHER = Cause(
    "The parameters change between steps, and the gradient with them: estimate each step by "
    "itself, then average."
)
CLAMPED = Cause(
    "A single estimate of |G|^2 may be negative. Without those the average is too large: keep them."
)
ROOT = Cause("No root: the noise scale is a ratio of squared lengths.")
TOTAL_SQ = Cause("Average the micro-batches' squared norms: you used their sum.")

BIG_SQ, SMALL_SQ = "grads.mean(0).pow(2).sum()", "grads.pow(2).sum(1).mean()"
GRAD_SQ = "grad_sq += (big * big_sq - micro_batch * small_sq) / (big - micro_batch)"
NOISE = "noise += (small_sq - big_sq) / (1 / micro_batch - 1 / big)"
RETURN = "return (noise / grad_sq).item()"

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
        show=real,
        rtol=1e-6,  # float32 would do, too
        unit=" examples",
        look="Write down the squared norms of one step at both batch sizes, and solve for |G|^2.",
        success="Unbiased in every step, averaged before the division.",
    ),
    wrong=(
        Edit(GRAD_SQ, "grad_sq += big_sq", NOT_SUBTRACTED),
        Edit(NOISE, "noise += micro_batch * small_sq", ALL_NOISE),
        Edit(
            NOISE,
            "noise += micro_batch * small_sq",
            NOT_SUBTRACTED,
            also=((GRAD_SQ, "grad_sq += big_sq"),),
        ),
        Own(_mean_of_ratios, MEAN_OF_RATIOS),
        Edit(
            "big = len(grads) * micro_batch",
            "big, micro = micro_batch, len(grads) * micro_batch",
            SWAPPED,
            also=(
                (GRAD_SQ, GRAD_SQ.replace("micro_batch", "micro")),
                (NOISE, NOISE.replace("micro_batch", "micro")),
            ),
        ),
        Edit(
            BIG_SQ,
            "grads.mean(0).norm()",
            NOT_SQUARED,
            also=((SMALL_SQ, "grads.norm(dim=1).mean()"),),
        ),
        Edit(SMALL_SQ, "grads.norm(dim=1).mean().pow(2)", NOT_SQUARED),
        Edit(BIG_SQ, "grads.sum(0).pow(2).sum()", SUMMED),
        Edit(SMALL_SQ, "grads.pow(2).mean()", MEAN_OF_NUMBERS),
        Edit(
            "big = len(grads) * micro_batch",
            "big, one = len(grads), 1",
            IN_MICRO_BATCHES,
            also=(
                (GRAD_SQ, GRAD_SQ.replace("micro_batch", "one")),
                (NOISE, NOISE.replace("micro_batch", "one")),
            ),
        ),
        Edit(NOISE, "noise += small_sq - big_sq", NOT_SCALED),
        Edit(NOISE, "noise += (small_sq - big_sq) * micro_batch", NOT_SCALED),
        Edit(RETURN, "return (grad_sq / noise).item()", UPSIDE_DOWN),
        Edit("noise +=", "noise =", ONE_STEP, also=(("grad_sq +=", "grad_sq ="),)),
        Edit(NOISE, f"{NOISE}\nbreak", ONE_STEP),
        Edit(SMALL_SQ, "grads[0].pow(2).sum()", ONE_MICRO_BATCH),
        Edit(SMALL_SQ, "grads.pow(2).sum()", TOTAL_SQ),
        Edit(GRAD_SQ, GRAD_SQ.replace("+= ", "+= max(0, ") + ")", CLAMPED),
        Edit(RETURN, "return (noise / grad_sq).sqrt().item()", ROOT),
        Own(_by_variance, BIASED_VARIANCE),
        Own(_all_steps_together, TOGETHER),
    ),
)
