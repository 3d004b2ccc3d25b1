"""Losses over the steps of a run: smoothed, compared, and how soon one has come down.

Lesson 13_scaling_study.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

SMOOTHED = 10  # steps


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and those before it, SMOOTHED steps in all: one batch is luck."""
    return [fmean(losses[max(0, n - SMOOTHED) : n]) for n in range(1, len(losses) + 1)]


def steps_to(target: float, losses: Sequence[float]) -> int | None:
    """After how many steps the loss is at the target; None if it never is."""
    return next((n for n, loss in enumerate(losses, start=1) if loss <= target), None)


def spread(curves: Iterable[Sequence[float]]) -> float:
    """How far apart the curves are at most, over the steps that all of them have."""
    return max((max(at) - min(at) for at in zip(*curves, strict=False)), default=0.0)
