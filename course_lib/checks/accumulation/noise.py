"""Exercise 6 of 02_accumulation: the gradient noise scale, from the gradients of micro-batches."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise

SIZES = (  # micro-batches of each step, numbers, micro-batch
    ((2,), 3, 1),
    ((4,) * 3, 5, 1),
    ((2,) * 4, 6, 8),
    ((8,) * 5, 3, 4),
    ((4,) * 12, 2, 16),
    ((2,) * 10, 4, 1),
    ((3, 5, 2, 7), 200, 16),
)
NEGATIVE = [torch.tensor([[1.0], [-0.5]], dtype=torch.float64)]  # |G|^2 is estimated as -0.5


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
    return [*drawn, ("2 micro-batches of 1 example that disagree", ([NEGATIVE[0].clone()], 1))]


def _shown(result: Any, steps: list[Tensor], micro_batch: int) -> Any:
    """Return it as a float; inf is right, too, where the estimate of |G|^2 is not above 0."""
    found, ratio = real(result), _by_variance(steps, micro_batch, correction=1)
    return ratio if found == math.inf and ratio < 0 else found


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


def _weighted(steps: list[Tensor], micro_batch: int, less: int = 0) -> float:
    """Return the ratio of averages in which a step with more micro-batches counts more."""
    noise, grad_sq = 0.0, 0.0
    for grads in steps:
        of_step = grads.var(0).sum().item()
        weight = len(grads) - less
        noise += weight * micro_batch * of_step
        grad_sq += weight * (grads.mean(0).pow(2).sum().item() - of_step / len(grads))
    return noise / grad_sq


def _weighted_by_pairs(steps: list[Tensor], micro_batch: int) -> float:
    """Return it with m - 1 as a step's weight, as a pooled variance has."""
    return _weighted(steps, micro_batch, less=1)


def _one_size(steps: list[Tensor], micro_batch: int, count: float) -> float:
    """Return the estimate as if each step had this many micro-batches."""
    big = micro_batch * count
    small_sq = sum(grads.pow(2).sum(1).mean().item() for grads in steps)
    big_sq = sum(grads.mean(0).pow(2).sum().item() for grads in steps)
    noise = (small_sq - big_sq) / (1 / micro_batch - 1 / big)
    return noise / ((big * big_sq - micro_batch * small_sq) / (big - micro_batch))


def _size_of_the_first(steps: list[Tensor], micro_batch: int) -> float:
    return _one_size(steps, micro_batch, len(steps[0]))


def _size_of_the_last(steps: list[Tensor], micro_batch: int) -> float:
    return _one_size(steps, micro_batch, len(steps[-1]))


def _mean_size(steps: list[Tensor], micro_batch: int) -> float:
    return _one_size(steps, micro_batch, sum(map(len, steps)) / len(steps))


def _without_an_odd_one(steps: list[Tensor], micro_batch: int) -> float:
    even = [grads[: len(grads) // 2 * 2] for grads in steps]
    return _by_variance(even, micro_batch, correction=1)


def _emptied(steps: list[Tensor], micro_batch: int) -> float:
    found = _by_variance(steps, micro_batch, correction=1)
    steps.clear()
    return found


def _squared_in_place(steps: list[Tensor], micro_batch: int) -> float:
    found = _by_variance(steps, micro_batch, correction=1)
    for grads in steps:
        grads.pow_(2)
    return found


NOT_SUBTRACTED = Cause(
    "The squared norm of the whole batch's gradient still contains noise, tr(Sigma) / B: subtract "
    "it, with the norms at both batch sizes."
)
ALL_NOISE = Cause("Both squared norms contain |G|^2: their difference does not.")
MEAN_OF_RATIOS = Cause(
    "You averaged ratios. Each step's ratio is biased, and may even be negative: average |G|^2 and "
    "tr(Sigma) over the steps, then divide once."
)
SWAPPED = Cause("The batch sizes are swapped: the larger batch has the smaller norm.")
NOT_SQUARED = Cause("These are norms: the equations need squared norms.")
SQUARED_MEAN = Cause("You squared the mean norm: square each norm first, then average the squares.")
SUMMED = Cause("The gradient of the whole batch is the mean of its micro-batches', not their sum.")
MEAN_OF_NUMBERS = Cause(
    "A squared norm is a sum over all numbers of the gradient, not their mean: the micro-batches' "
    "norms are too small here."
)
IN_MICRO_BATCHES = Cause(
    "That counts in micro-batches; the noise scale is a number of items: use micro_batch."
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
NEGATIVE_TOO = Cause(
    "Too little data can give a negative ratio. That says that the estimate is useless; a positive "
    "number in its place would hide it."
)
EQUAL_WEIGHTS = Cause(
    "Each step counts the same, however many micro-batches it has: average the steps' estimates."
)
EACH_ITS_OWN = Cause("The steps have different numbers of micro-batches: B is a step's own.")
ODD_ONE = Cause("A micro-batch is missing where their number is odd.")
IN_PLACE = Cause(
    "Somebody still needs these gradients: leave the list and its tensors as they are."
)
ROOT = Cause("No root: the noise scale is a ratio of squared lengths.")
TOTAL_SQ = Cause("Average the micro-batches' squared norms: you used their sum.")


def _is_root(got: Sequence[Any], need: Sequence[Any]) -> bool:
    """Return whether the answers are square roots, where there is a root."""
    pairs = [(one, right) for one, right in zip(got, need, strict=True) if right > 0]
    return all(isinstance(one, float) and math.isclose(one**2, right) for one, right in pairs)


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
        show=_shown,
        rtol=1e-6,  # float32 would do, too
        unit=" examples",
        look="Write down the squared norms of one step at both batch sizes, and solve for |G|^2.",
        success="Unbiased in every step, averaged before the division.",
        symptoms=((_is_root, ROOT),),
        unchanged=IN_PLACE,
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
        Edit(SMALL_SQ, "grads.norm(dim=1).mean().pow(2)", SQUARED_MEAN),
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
        Own(_weighted, EQUAL_WEIGHTS),
        Own(_weighted_by_pairs, EQUAL_WEIGHTS),
        Own(_size_of_the_first, EACH_ITS_OWN),
        Own(_size_of_the_last, EACH_ITS_OWN),
        Own(_mean_size, EACH_ITS_OWN),
        Own(_without_an_odd_one, ODD_ONE),
        Own(_emptied, IN_PLACE),
        Own(_squared_in_place, IN_PLACE),
        Edit(RETURN, "return abs((noise / grad_sq).item())", NEGATIVE_TOO),
        Edit(RETURN, "return max(0.0, (noise / grad_sq).item())", NEGATIVE_TOO),
    ),
)
