"""Measurements of lesson 01b: this processor's peak and bandwidth, products under that roof."""

import time
from collections.abc import Callable
from functools import partial

import torch

from course_lib.cost.roofline import Roof, add_intensity

WIDTH = 4096  # of the square matrix: 64 MiB in fp32, more than the caches of most processors
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
FP32_BYTES, REPEATS = 4, 3


def seconds(run: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Return the seconds of each repetition, after one that is not counted."""
    run()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found


def measure_roof() -> tuple[Roof, dict[int, list[float]]]:
    """Return this processor's roof on one thread, and FLOP/s of products of 1 to 256 tokens.

    The peak is that of the fastest product, the bandwidth that of an add of two large tensors,
    each in its fastest repetition. The other products are predictions to be compared.
    """
    x, w = torch.randn(max(TOKENS), WIDTH), torch.randn(WIDTH, WIDTH)
    a, b, out = (torch.ones(WIDTH, WIDTH) for _ in range(3))
    rates = {}
    for m in TOKENS:
        product = torch.empty(m, WIDTH)
        times = seconds(partial(torch.mm, x[:m], w, out=product))
        rates[m] = [2 * m * WIDTH * WIDTH / one for one in times]
    add_s = min(seconds(partial(torch.add, a, b, out=out)))
    bandwidth = a.numel() / add_intensity(FP32_BYTES) / add_s
    peak = max(max(found) for found in rates.values())
    return Roof(name="this processor", flop_per_s=peak, bytes_per_s=bandwidth), rates
