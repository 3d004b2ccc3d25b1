"""Speed of the device: matrix multiplication, memory, a training step, FP8, recomputation, copies.

A rehearsal has no bounds on times: they depend on what else the CPU does.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from course_lib.core import CourseError
from course_lib.core.presets import find_model
from course_lib.cost.flops import forward_flop, recompute_flop, train_step_flop
from course_lib.cost.hardware import Device, find_device
from course_lib.models import GPT, token_loss
from course_lib.recompute import recompute_full
from tests.gpu.findings import Finding, NeedsGPUError, equals

REPEATS = 5


def seconds_of(step: Callable[[], Any]) -> float:
    """Return the shortest of REPEATS times, after a warm-up run."""
    on_gpu = torch.cuda.is_available()
    found = []
    for _ in range(REPEATS + 1):
        if on_gpu:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start_s)
    return min(found[1:])


def device_here() -> Device | None:
    """Return this GPU's entry in the hardware table; None where it has none."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    for word in (
        "h200",
        "h100",
        "a100-80" if "80gb" in name else "a100-40",
        "a6000",
        "v100",
        "b200",
    ):
        if word.partition("-")[0] in name:
            try:
                return find_device(word)
            except CourseError:
                return None
    return None


def prove_roofline(rehearsal: bool) -> Iterator[Finding]:
    """Time a large matrix product and a large addition: the two roofs of the roofline model."""
    device, known = _device(), device_here()
    n = 512 if rehearsal else 8192
    for dtype, word in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        rate = 2 * n**3 / seconds_of(partial(torch.matmul, a, b)) / 1e12
        peak = known.peak(word) / 1e12 if known and word == "bf16" else None
        # Large bf16 GEMMs reach well over half of the dense peak, and none exceeds it.
        low, high = (0.3 * peak, 1.05 * peak) if peak else (None, None)
        yield Finding(what=f"{word} matrix product, n = {n}", measured=rate, predicted=peak,
                      unit="TFLOP/s", low=low, high=high)  # fmt: skip
    yield _on_device("the matrices' device", a, rehearsal)
    x = torch.ones((2**20 if rehearsal else 2**28), device=device)
    # x is read and written once: 2 * nbytes cross the memory bus in each addition.
    rate = 2 * x.nbytes / seconds_of(lambda: torch.add(x, 1.0, out=x)) / 1e9
    host = _host_rate(x)
    # A copy to the host reads x in device memory, so it cannot be faster than that memory.
    low = None if rehearsal else host
    high = 1.05 * known.bytes_per_s / 1e9 if known else None
    yield Finding(what="addition, read and written", measured=rate, unit="GB/s", low=low, high=high,
                  predicted=known.bytes_per_s / 1e9 if known else None)  # fmt: skip
    yield Finding(what="copy to the host's pinned memory", measured=host, unit="GB/s")


def _host_rate(x: torch.Tensor) -> float:
    """Return the rate in GB/s of a copy to pinned host memory."""
    pinned = torch.empty(x.shape, pin_memory=torch.cuda.is_available())
    return x.nbytes / seconds_of(lambda: pinned.copy_(x, non_blocking=True)) / 1e9


def prove_step(rehearsal: bool) -> Iterator[Finding]:
    """Time a step of a GPT in fp32 and bf16, with and without recomputation: MFU and ratios."""
    device, known = _device(), device_here()
    spec = find_model("tiny" if rehearsal else "gpt2")
    batch, seq = (2, 32) if rehearsal else (8, 1024)
    flop = train_step_flop(spec, batch, seq)
    tokens, targets = torch.randint(0, spec.vocab, (2, batch, seq), device=device)
    seconds: dict[str, float] = {}
    for name, dtype, again in (
        ("fp32", torch.float32, False),
        ("bf16", torch.bfloat16, False),
        ("bf16, recomputed", torch.bfloat16, True),
    ):
        model = GPT(replace(spec)).to(device, dtype)
        if again:
            recompute_full(model)

        def step(model: GPT = model) -> None:
            model.zero_grad()
            token_loss(model(tokens).float(), targets).backward()

        seconds[name] = seconds_of(step)
        rate = flop / seconds[name] / 1e12
        yield Finding(what=f"forward and backward in {name}", measured=rate, unit="TFLOP/s")
        if known and dtype is torch.bfloat16 and not again:
            mfu = rate * 1e12 / known.peak("bf16")
            yield Finding(what="MFU", measured=mfu, high=1.0)  # above it, a count is wrong
    yield _on_device("the loss's device", token_loss(model(tokens).float(), targets), rehearsal)
    extra = recompute_flop(forward_flop(spec, batch, seq), "full") / flop
    ratio = seconds["bf16, recomputed"] / seconds["bf16"]
    # More FLOP take more time, except for noise; and at most twice the predicted ratio, where
    # operations limited by memory bandwidth are what is recomputed.
    bounds = (None, None) if rehearsal else (0.9, 2 * (1 + extra))
    yield Finding(what="time with recomputation, divided by the time without", measured=ratio,
                  predicted=1 + extra, low=bounds[0], high=bounds[1])  # fmt: skip


def prove_fp8(rehearsal: bool) -> Iterator[Finding]:
    """Multiply in FP8 (E4M3) where the GPU supports it, and bound the relative error."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise NeedsGPUError(f"compute capability 8.9 for FP8; this GPU has {major}.{minor}")
    n = 4096
    a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
    scales = [448.0 / x.abs().max() for x in (a, b)]
    small = [(x * s).to(torch.float8_e4m3fn) for x, s in zip((a, b), scales, strict=True)]
    inverse = [(1 / s).float().reshape(1) for s in scales]

    def product() -> torch.Tensor:
        return torch._scaled_mm(small[0], small[1].t().contiguous().t(), scale_a=inverse[0],
                                scale_b=inverse[1], out_dtype=torch.bfloat16)  # fmt: skip

    exact = a.bfloat16().float() @ b.bfloat16().float()
    error = ((product().float() - exact).norm() / exact.norm()).item()
    yield Finding(
        what="FP8 matrix product, relative error", measured=error, predicted=2**-4, high=0.08
    )
    rate = 2 * n**3 / seconds_of(product) / 1e12
    yield Finding(what=f"FP8 matrix product, n = {n}", measured=rate, unit="TFLOP/s")


def _on_device(what: str, tensor: torch.Tensor, rehearsal: bool) -> Finding:
    return equals(what, tensor.device.type, "cpu" if rehearsal else "cuda")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
