"""Bus bandwidth, and alpha and beta, from measured times: the inverse of `network.py`.

Notebook 04_collectives.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from course_lib.core.errors import CourseError
from course_lib.core.links import Link


def bus_factor(kind: str, p: int) -> float:
    """Return the factor from size / time to the bandwidth that each rank's link must sustain.

    Raises: CourseError for a kind without a factor
    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Summary"
    """
    factors = {
        "all_reduce": 2 * (p - 1) / p,
        "reduce_scatter": (p - 1) / p,
        "all_gather": (p - 1) / p,
        "all_to_all": (p - 1) / p,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
        "recv": 1.0,
    }
    if kind not in factors:
        raise CourseError(f"bus_factor: need one of {', '.join(factors)}; got {kind!r}.")
    return factors[kind]


def bus_bandwidth(kind: str, num_bytes: float, time_s: float, p: int) -> float:
    """Return bytes/s of a collective, comparable with the link's for any p (nccl-tests' busbw)."""
    return num_bytes / time_s * bus_factor(kind, p)


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float], name: str = "fitted") -> Link:
    """Fit a link: the alpha + n / beta that is nearest to measured times of single messages.

    The median of each size counts, and errors are relative, so that neither one slow sample nor the
    largest size dominates. A latency below zero is taken as zero.

    Raises: CourseError for fewer than two sizes, or times that do not grow with the size
    """
    samples = defaultdict(list)
    for size, time_s in zip(sizes_bytes, times_s, strict=True):
        samples[size].append(time_s)
    if len(samples) < 2 or min(times_s) <= 0:
        raise CourseError(
            f"fit_link: need times above 0 at two sizes or more; got {len(samples)} size(s). "
            "Try sizes from 1 KiB to 16 MiB."
        )
    points = [(float(n), median(times)) for n, times in samples.items()]
    alpha, s_per_byte = _weighted_line(points)
    if alpha < 0:
        alpha = 0.0
        s_per_byte = sum(n / t for n, t in points) / sum((n / t) ** 2 for n, t in points)
    if s_per_byte <= 0:
        raise CourseError(
            "fit_link: need times that grow with the size; got times that do not. "
            "Try larger sizes, or measure again."
        )
    return Link(name=name, latency_s=alpha, bytes_per_s=1 / s_per_byte)


def _weighted_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of the line with the least squared relative error in t."""
    weights = [1 / t**2 for _, t in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    joint = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True))
    slope = joint / spread
    return mean_t - slope * mean_n, slope
