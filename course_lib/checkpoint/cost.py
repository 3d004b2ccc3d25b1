"""Predict what checkpoints cost: their bytes, the time to write them, and the best interval.

A short interval spends its time on saving, a long one loses more work in each failure. The optimum
depends on two numbers only: the seconds of a save, and the mean time between failures (MTBF).
Notebook 14_checkpoint.
"""

from math import exp, expm1, sqrt
from random import Random

from course_lib.core.errors import CourseError

ADAM_NUMBERS = 2  # of the optimizer, per parameter
DAY_S, HOUR_S = 86_400.0, 3_600.0
# Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.4 and table 5
LLAMA3_GPUS, LLAMA3_FAILURES, LLAMA3_S = 16_384, 419, 54 * DAY_S


def bytes_of_checkpoint(
    num_params: int, *, number_bytes: int = 4, optimizer_numbers: int = ADAM_NUMBERS
) -> int:
    """Return the bytes of the parameters and of the optimizer's numbers for each of them.

    With Adam in fp32: 12 per parameter. A bf16 copy of the parameters is not saved: it is made
    from the fp32 ones.
    """
    return num_params * number_bytes * (1 + optimizer_numbers)


def save_s_through_one(
    num_bytes: float, p: int, link_bytes_per_s: float, disk_bytes_per_s: float
) -> float:
    """Return the seconds of a save in which rank 0 gathers all shards, then writes them.

    Cost:    (p - 1)/p of the bytes through one link, all bytes by one writer
    """
    return num_bytes * (p - 1) / p / link_bytes_per_s + num_bytes / disk_bytes_per_s


def save_s_sharded(
    num_bytes: float, p: int, disk_bytes_per_s: float, storage_bytes_per_s: float = float("inf")
) -> float:
    """Return the seconds of a save in which each of p ranks writes its shard.

    disk_bytes_per_s     of one writer
    storage_bytes_per_s  of the storage, which all writers share
    """
    return num_bytes / min(p * disk_bytes_per_s, storage_bytes_per_s)


def extra_s(num_steps: int, every: int, blocked_s: float) -> float:
    """Return what checkpoints add to a run without failures: one after every `every` steps."""
    return num_steps // every * blocked_s


def mtbf_of(device_mtbf_s: float, num_devices: int) -> float:
    """Return the mean time between failures of a job that any one of its devices can stop."""
    return device_mtbf_s / num_devices


def best_interval_young(save_s: float, mtbf_s: float) -> float:
    """Return the interval of work between saves that minimizes save_s/t + t/(2 mtbf_s).

    Source:  Young 1974, "A first order approximation to the optimum checkpoint interval"
    """
    _check(save_s, mtbf_s)
    return sqrt(2 * save_s * mtbf_s)


def best_interval_daly(save_s: float, mtbf_s: float) -> float:
    """Return the interval that minimizes `expected_overhead`, nearly: its higher-order estimate.

    Source:  Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
             dumps", the perturbation solution; beyond save_s = 2 mtbf_s it is mtbf_s
    """
    _check(save_s, mtbf_s)
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_overhead(
    interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0
) -> float:
    """Return the expected time that is no useful work, divided by the useful work.

    Failures come at random and independently of one another (exponential times between them), also
    while a checkpoint is written and while the run starts again. A failure costs what has been done
    since the last checkpoint, and a restart.

    Source:  Daly 2006, the complete cost function: T = M e^(R/M) (e^((t + d)/M) - 1) / t
    """
    _check(save_s, mtbf_s)
    if interval_s <= 0:
        raise CourseError(f"expected_overhead: need an interval above 0 s; got {interval_s}.")
    busy = mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + save_s) / mtbf_s)
    return busy / interval_s - 1


def simulated_overhead(
    interval_s: float,
    save_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    *,
    num_intervals: int = 2000,
    seed: int = 0,
) -> float:
    """Return the overhead of one simulated run with random failures: see `expected_overhead`."""
    random, clock_s = Random(seed), 0.0
    for _ in range(num_intervals):
        needed_s = interval_s + save_s
        while (lived_s := random.expovariate(1 / mtbf_s)) < needed_s:
            clock_s += lived_s
            needed_s = restart_s + interval_s + save_s
        clock_s += needed_s
    return clock_s / (num_intervals * interval_s) - 1


def _check(save_s: float, mtbf_s: float) -> None:
    if save_s < 0 or mtbf_s <= 0:
        raise CourseError(
            f"interval: need save_s >= 0 and mtbf_s > 0, in seconds; got {save_s} and {mtbf_s}."
        )
