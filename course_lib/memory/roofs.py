"""Rooflines: this processor's, measured, and those of four GPUs. Notebook 01_memory."""

import time
from collections.abc import Callable
from statistics import median

import torch
from matplotlib.figure import Figure

from course_lib.cost.hardware import find_device
from course_lib.cost.roofline import Roof, add_intensity, matmul_intensity, roof_of
from course_lib.display import Voices, compare

WIDTH = 4096  # of the square matrix: 64 MiB in fp32, more than the caches of most processors
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
FP32_BYTES, REPEATS = 4, 3
GPUS = ("a100-80", "h100", "h200", "b200")


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

    The peak is that of the largest product, the bandwidth that of an add of two large tensors:
    the fastest repetition of each. The other products are predictions to be compared.
    """
    x, w = torch.randn(max(TOKENS), WIDTH), torch.randn(WIDTH, WIDTH)
    a, b, out = (torch.ones(WIDTH, WIDTH) for _ in range(3))
    rates = {}
    for m in TOKENS:
        product = torch.empty(m, WIDTH)
        times = seconds(lambda rows=x[:m], into=product: torch.mm(rows, w, out=into))
        rates[m] = [2 * m * WIDTH * WIDTH / one for one in times]
    add_s = min(seconds(lambda: torch.add(a, b, out=out)))
    bandwidth = a.numel() / add_intensity(FP32_BYTES) / add_s
    roof = Roof(name="this processor", flop_per_s=max(rates[TOKENS[-1]]), bytes_per_s=bandwidth)
    return roof, rates


def measured_roof(roof: Roof, rates: dict[int, list[float]]) -> tuple[Figure, str]:
    """Draw measured products under the measured roof."""
    intensity = [matmul_intensity(m, WIDTH, WIDTH, FP32_BYTES) for m in rates]
    gflop = [[rate / 1e9 for rate in found] for found in rates.values()]
    curve = Voices(formula=lambda x: roof.attainable(x) / 1e9, measurement=gflop)
    title = "A product of few tokens is memory-bound, one of many compute-bound"
    figure = compare(
        intensity,
        {f"[m, {WIDTH}] @ [{WIDTH}, {WIDTH}] in fp32": curve},
        title,
        x_label="arithmetic intensity (FLOP per byte): about m / 2",
        y_label="GFLOP/s",
        log=True,
        note=f"one thread; the roof: {roof.flop_per_s / 1e9:.0f} GFLOP/s, "
        f"{roof.bytes_per_s / 1e9:.1f} GB/s",
    )
    few, many = (median(found) for found in (gflop[0], gflop[-1]))
    return figure, f"{title}: {few:.2g} GFLOP/s for 1 token, {many:.2g} for {max(rates)}"


def gpu_roofs(dtype: str = "bf16") -> tuple[Figure, str]:
    """Draw the roofs of four GPUs by their data sheets."""
    roofs = {name: roof_of(find_device(name), dtype) for name in GPUS}
    xs = [2.0**k for k in range(-3, 13)]
    curves = {
        name: Voices(formula=lambda x, roof=roof: roof.attainable(x) / 1e12)
        for name, roof in roofs.items()
    }
    ridges = [roof.ridge for roof in roofs.values()]
    title = (
        f"These GPUs need {min(ridges):.0f} to {max(ridges):.0f} FLOP per byte to reach their peak"
    )
    figure = compare(
        xs,
        curves,
        title,
        x_label=f"arithmetic intensity (FLOP per byte), {dtype}",
        y_label="TFLOP/s, at most",
        log=True,
        source="data sheets: course_lib/cost/hardware.py names each",
    )
    return figure, f"{title}; an add has {add_intensity():.2g}"


def roof_rows(dtype: str = "bf16") -> str:
    """Return a table: where common operations stand on each GPU."""
    operations = {
        "add of two tensors": add_intensity(),
        "product, 1 token": matmul_intensity(1, WIDTH, WIDTH),
        "product, 128 tokens": matmul_intensity(128, WIDTH, WIDTH),
        "product, 4,096 tokens": matmul_intensity(4096, WIDTH, WIDTH),
    }
    lines = ["FLOP per byte".rjust(36) + "".join(f"{name:>10}" for name in GPUS)]
    for name, intensity in operations.items():
        bounds = [roof_of(find_device(gpu), dtype).bound(intensity) for gpu in GPUS]
        lines.append(f"{name:<22}{intensity:>14,.2f}" + "".join(f"{b:>10}" for b in bounds))
    return "\n".join(lines)
