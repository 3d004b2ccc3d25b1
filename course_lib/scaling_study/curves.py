"""Loss curves of runs: smoothed, compared, and the steps to a target loss.

Lesson 13_scaling_study.
"""

from collections.abc import Iterable, Sequence
from math import log10
from statistics import fmean

SMOOTHED = 10  # steps
EQUAL_DIGITS = 8.0  # more than the seven of fp32: no difference


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the moving average of the losses over SMOOTHED steps: single batches vary."""
    return [fmean(losses[max(0, n - SMOOTHED) : n]) for n in range(1, len(losses) + 1)]


def steps_to(target: float, losses: Sequence[float]) -> int | None:
    """Return the number of steps until the loss reaches the target; None if it never does."""
    return next((n for n, loss in enumerate(losses, start=1) if loss <= target), None)


def agreeing_digits(losses: Sequence[float], right: Sequence[float]) -> list[float]:
    """Return how many decimal digits of each loss agree with the right run's, at most EQUAL_DIGITS.

    It is -log10 of the relative difference.
    """
    differences = [abs(loss / other - 1) for loss, other in zip(losses, right, strict=True)]
    return [min(EQUAL_DIGITS, -log10(one + 1e-9)) for one in differences]


def spread(curves: Iterable[Sequence[float]]) -> float:
    """Return the largest difference between the curves, over the steps that all of them have."""
    return max((max(at) - min(at) for at in zip(*curves, strict=False)), default=0.0)
