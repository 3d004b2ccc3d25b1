"""Gradient noise scale: the batch size at which the noise of a gradient equals its length.

The gradient of a batch of B examples is the true gradient G plus noise of covariance Sigma / B, so
its squared norm is |G|^2 + tr(Sigma) / B on average. Two batch sizes give two equations for the two
unknowns, and gradient accumulation has both: micro-batches and their mean. Notebook
02_accumulation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.accumulation.accumulation import split_micro_batches
from course_lib.core.errors import CourseError, ShapeError


@dataclass(frozen=True, kw_only=True)
class NoiseEstimate:
    """Unbiased estimates from one step: |G|^2, and tr(Sigma) of one example's gradient.

    A single estimate is noisy: `grad_sq` may even be negative. Average many (`noise_scale`).
    """

    grad_sq: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """Steps and examples that reach a loss, by batch size: S = S_min (1 + B_crit / B), E = B S.

    These satisfy (S / S_min - 1) (E / E_min - 1) = 1, with E_min = B_crit S_min. At B_crit a run
    takes twice the smallest number of steps, and twice the smallest number of examples.

    Source: McCandlish et al. 2018, section 2.3, eq. 2.11
    """

    min_steps: float
    critical_batch: float

    @property
    def min_examples(self) -> float:
        """E_min, the number of examples in the limit of small batches."""
        return self.min_steps * self.critical_batch

    def steps(self, batch: float) -> float:
        """Return the number of steps at this batch size."""
        return self.min_steps * (1 + self.critical_batch / batch)

    def examples(self, batch: float) -> float:
        """Return the number of examples at this batch size."""
        return batch * self.steps(batch)


def estimate_noise(
    small_sq: float, big_sq: float, *, small_batch: float, big_batch: float
) -> NoiseEstimate:
    """Return |G|^2 and tr(Sigma) from squared gradient norms at two batch sizes.

    small_sq, big_sq   squared norms of *mean* gradients over small_batch and big_batch examples;
                       several norms of one batch size are averaged before

    Source: McCandlish et al. 2018, appendix A.1
    Raises: CourseError unless 0 < small_batch < big_batch
    """
    if not 0 < small_batch < big_batch:
        raise CourseError(
            "estimate_noise: need 0 < small_batch < big_batch; got "
            f"{small_batch} and {big_batch}. Try more than one micro-batch."
        )
    grad_sq = (big_batch * big_sq - small_batch * small_sq) / (big_batch - small_batch)
    noise = (small_sq - big_sq) / (1 / small_batch - 1 / big_batch)
    return NoiseEstimate(grad_sq=grad_sq, noise=noise)


def noise_scale(estimates: Iterable[NoiseEstimate]) -> float:
    """Return the simple noise scale, mean tr(Sigma) / mean |G|^2, in examples.

    Both are averaged before the division: the ratio of two noisy numbers is biased. Where the mean
    |G|^2 is not positive, the noise scale is inf: the gradient is not above its noise.

    Raises: CourseError without an estimate
    """
    seen = list(estimates)
    if not seen:
        raise CourseError("noise_scale: need at least one NoiseEstimate; got none.")
    grad_sq, noise = sum(one.grad_sq for one in seen), sum(one.noise for one in seen)
    return noise / grad_sq if grad_sq > 0 else float("inf")


def accumulate_with_noise(
    model: nn.Module,
    loss_fn: Callable[[Any, Tensor], Tensor],
    batch: tuple[Any, Tensor],
    num_micro_batches: int,
) -> NoiseEstimate:
    """Set every `param.grad` to the gradient of a batch; estimate the noise from its micro-batches.

    loss_fn   a mean over the items of (inputs, targets); the noise is that of one item

    Each micro-batch's gradient is computed by itself, as its norm is needed, so there are two sets
    of gradients in memory. With data parallelism the norms before and after the all-reduce do it.

    Raises: ShapeError unless the batch splits into two or more micro-batches of equal size
    """
    size = len(batch[1])
    if num_micro_batches < 2 or size % num_micro_batches:
        raise ShapeError(
            "accumulate_with_noise: need two or more micro-batches of equal size; got "
            f"{size} items and {num_micro_batches}. Try a divisor of {size}."
        )
    params = [param for param in model.parameters() if param.requires_grad]
    total = [torch.zeros_like(param) for param in params]
    small_sq = 0.0
    for inputs, targets in split_micro_batches(tuple(batch), num_micro_batches):
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for param, mean in zip(params, total, strict=True):
            if param.grad is not None:
                small_sq += param.grad.pow(2).sum().item() / num_micro_batches
                mean += param.grad / num_micro_batches
    for param, mean in zip(params, total, strict=True):
        param.grad = mean
    big_sq = sum(mean.pow(2).sum().item() for mean in total)
    return estimate_noise(
        small_sq, big_sq, small_batch=size / num_micro_batches, big_batch=float(size)
    )


def fit_tradeoff(batches: Sequence[float], steps: Sequence[float]) -> Tradeoff:
    """Return the trade-off that fits measured steps best, by least squares of relative errors.

    S = S_min + E_min / B is linear in S_min and E_min.

    Raises: CourseError for fewer than two batch sizes
    """
    if len(set(batches)) < 2 or len(batches) != len(steps):
        raise CourseError(
            "fit_tradeoff: need steps at two batch sizes or more; got "
            f"{len(batches)} and {len(steps)} numbers. Try batches of 1 to 1024."
        )
    measured = torch.tensor(steps, dtype=torch.float64)
    columns = torch.stack([1 / measured, 1 / (torch.tensor(batches) * measured)], dim=1)
    found = torch.linalg.lstsq(columns, torch.ones(len(steps), 1, dtype=torch.float64)).solution
    min_steps, min_examples = found.flatten().tolist()
    return Tradeoff(min_steps=min_steps, critical_batch=min_examples / min_steps)
