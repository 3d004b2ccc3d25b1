"""Exercise 6 of 03_recompute: numbers of 8 bits, with a shared power of two for each block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.accumulation.effects import LOOKS, EffectCase, Effects, watched
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.properties import CALLERS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES, SCALES, DTYPE, ELEMENTS = "shapes", "scales", "dtype of the elements", "elements"
SCALE_DTYPE = "dtype of the scales"

A_PAIR = Cause("Return both tensors, the elements first: `return elements, scales`.")
SHAPE = Cause("As many elements as x has, and a scale for each block of each row.")
AXIS = Cause("The blocks lie along the columns here, and belong along the rows, the last dim of x.")
DROPPED = Cause("The last block may be shorter, and has a scale, too: pad the row, do not cut it.")
PADDED = Cause("The zeros that fill the last block are not part of x: cut them off at the end.")
BLOCK_IS_32 = Cause("A block is `block` numbers long; 32 is only the default.")
ONE_SCALE = Cause("That is one scale for all of x: each block has its own.")
NO_ABS = Cause("The largest number may be negative: look at |x|.")
NO_POWER = Cause("First round the largest |x| and the format's largest down to powers of two.")
ROUNDED_UP = Cause(
    "Rounded up, so that nothing saturates (Mishra et al. 2025). Here the block's largest |x| and "
    "the format's largest number are each rounded down to a power of two."
)
LOG2 = Cause("Just below a power of two, log2 in fp32 rounds up: read the exponent with frexp.")
ZEROS = Cause("log2(0) is -inf: the scale is 0, and 0 / 0 is nan. Give zeros some power of two.")
NO_TOP = Cause(
    "The block's largest number comes out as 2 at most, but the format goes up to 448 or 57,344: "
    "what is smaller is lost for nothing. Divide the scale by the format's largest power of two."
)
FREXP = Cause(
    "A factor of two: frexp has a mantissa from 0.5 to 1, so its exponent is one larger than that "
    "of the power of two below. Take it of both numbers, or subtract 1."
)
ONLY_E4M3 = Cause("448 = 1.75 * 2**8 is E4M3's largest number; ask torch.finfo(dtype).max.")
SATURATES = Cause("Beyond its largest number E5M2 has inf: clamp(-largest, largest) first.")
NOT_SCALED = Cause("The elements are x / scale, and this is x.")
SCALES_IN_FP32 = Cause("Return the scales in fp32, whatever they could be stored in.")
TWICE = Cause(
    "Rounded to 16 bits, then to 8, which may round twice. Stay in fp32 up to .to(dtype)."
)
DEQUANTIZED = Cause("Return the elements as dtype, a byte each, and not yet times their scale.")
LOOK_SCALES = Cause("The largest power of two in a block's |x|, over 2**8 (E4M3) or 2**15 (E5M2).")
OF_LABELS = {SHAPES: SHAPE, SCALES: LOOK_SCALES, SCALE_DTYPE: SCALES_IN_FP32, DTYPE: DEQUANTIZED}
LOOK = Cause("The elements are x / scale, clamped to the largest number, then `.to(dtype)`.")


def _blocks(
    answer: Callable[..., Any], given: Tensor, dtype: torch.dtype, block: int
) -> dict[str, Any]:
    x = given.clone()  # which keeps the strides
    with watched(x=x) as seen:
        result = answer(x, dtype) if block == 32 else answer(x, dtype, block)
    if result is None:
        return {**seen, SHAPES: None}
    pair = isinstance(result, list | tuple) and len(result) == 2
    if not pair or not all(isinstance(each, Tensor) for each in result):
        raise failed(f"got {type(result).__name__}", A_PAIR)
    elements, scales = result
    done = {**seen, SHAPES: f"elements {list(elements.shape)}, scales {list(scales.shape)}"}
    if done[SHAPES] == _shapes(given, block):
        numbers = scales.float()
        done[SCALES] = torch.where(_any_scale_will_do(given, numbers, block), 1.0, numbers)
    kind = str(elements.dtype).removeprefix("torch.")
    of_scales = str(scales.dtype).removeprefix("torch.")
    return {**done, SCALE_DTYPE: of_scales, DTYPE: kind, ELEMENTS: elements.float()}


def _shapes(x: Tensor, block: int) -> str:
    rows, n = x.shape
    return f"elements {[rows, n]}, scales {[rows, -(-n // block)]}"


def _any_scale_will_do(x: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return in which blocks there are only zeros, and a power of two as their scale."""
    padded = F.pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    return (padded == 0).all(-1) & scales.isfinite() & (torch.frexp(scales).mantissa == 0.5)


def _random(rows: int, n: int, spread: float = 3.0) -> Tensor:
    """Return numbers of very different sizes, also from block to block."""
    random = torch.Generator().manual_seed(1000 * rows + n)
    sizes = torch.exp2(spread * torch.randn(rows, n, generator=random)).cumprod(1).clamp(1e-9, 1e9)
    return torch.randn(rows, n, generator=random) * sizes


def _listed(*numbers: float) -> Tensor:
    return torch.tensor([numbers])


def _cases() -> list[EffectCase]:
    below = 256 - 2.0**-16  # log2 in fp32 says 8
    cases = [
        ("x [2, 12], blocks of 4", _random(2, 12), E4M3, 4),
        ("x [3, 10], blocks of 4", _random(3, 10), E4M3, 4),
        ("x [2, 64]", _random(2, 64, 0.5), E4M3, 32),
        ("x [3, 70]", _random(3, 70, 0.5), E4M3, 32),
        ("x [5, 3]", _random(5, 3), E4M3, 32),
        ("E5M2, x [2, 12], blocks of 4", _random(2, 12), E5M2, 4),
        ("E5M2, x [33, 65]", _random(33, 65, 0.5), E5M2, 32),
        ("a negative number is the largest", _listed(1.0, -300.0, 2.5, 3.0), E4M3, 4),
        ("the largest is beyond 448", _listed(500.0, -490.0, 7.0, 1.0), E4M3, 4),
        ("E5M2 beyond 57,344", _listed(65000.0, -63000.0, 7.0, 1.0), E5M2, 4),
        ("a power of two is the largest", _listed(0.25, 0.1, -0.2, 0.01), E4M3, 4),
        ("numbers in the middle", _listed(256.0, 17.0, 19.0, -21.0, 23.0), E4M3, 5),
        ("near the middle", _listed(256.0, 17 + 2.0**-8, -(19 - 2.0**-8)), E4M3, 3),
        ("very small numbers", _listed(3e-20, 1e-20, 2e-30, 1e-20), E4M3, 2),
        ("very large numbers", _listed(3e38, -1e38, 1e30, 2e29), E4M3, 2),
        ("x [3, 10], a transpose", _random(10, 3).T, E4M3, 4),
        ("zeros", _listed(0.0, 0.0, 1.0, 2.0, 0.0), E4M3, 2),
        ("just below a power of two", _listed(below, 1.0, 0.5 - 2.0**-25, 0.1), E4M3, 2),
    ]
    return [
        (text, partial(_blocks, given=given, dtype=dtype, block=block))
        for text, given, dtype, block in cases
    ]


LARGEST, TOP = "blocks.abs().amax(-1)", " - torch.frexp(torch.tensor(largest)).exponent"
QUOTIENTS, CLAMP = "(blocks / scales.unsqueeze(-1))", ".clamp(-largest, largest)"
EXPONENTS_LINE = f"exponents = torch.frexp({LARGEST}).exponent"
SCALES_LINE = f"scales = torch.exp2(exponents{TOP})"
ELEMENTS_ALONE, SIZES = "elements.flatten(1)[:, :n]", "n, largest = x.shape[1]"
RESULT, PAD = f"{ELEMENTS_ALONE}, scales", "F.pad(x, (0, -n % block)).unflatten(1, (-1, block))"
TO_LOG2 = "torch.log2(torch.tensor(largest)).floor()"


def _by_log2(exponents: str, cause: Cause, top: str = TO_LOG2) -> Edit:
    """Return the answer with logarithms: `exponents` of the block's largest."""
    return Edit(
        EXPONENTS_LINE,
        f"exponents = {exponents}",
        cause,
        also=((SCALES_LINE, f"scales = torch.exp2(exponents - {top}).float()"),),
    )


IN_BLOCKS = Exercise(
    key="recompute-6",
    title="blocks with a shared scale",
    library=("course_lib.recompute.block_scaling:quantize_blocks",),
    check=Effects(
        cases=_cases,
        looks={**LOOKS, **OF_LABELS},
        look=LOOK,
        success="A power of two for each block, nothing infinite, and ties to even.",
    ),
    wrong=(
        Edit(SIZES, f"x = x.T\n{SIZES}", AXIS, also=((RESULT, f"{ELEMENTS_ALONE}.T, scales.T"),)),
        Edit(PAD, "x[:, : n // block * block].unflatten(1, (n // block, block))", DROPPED),
        Edit(RESULT, "elements.flatten(1), scales", PADDED),
        Edit("-n % block", "-n % 32", BLOCK_IS_32, also=(("(-1, block)", "(-1, 32)"),)),
        Edit(RESULT, ELEMENTS_ALONE, A_PAIR),
        Edit(LARGEST, "blocks.abs().amax().expand(blocks.shape[:2])", ONE_SCALE),
        Edit(LARGEST, "blocks.amax(-1)", NO_ABS),
        Edit(SCALES_LINE, f"scales = {LARGEST} / largest", NO_POWER),
        _by_log2(f"torch.log2({LARGEST}.clamp(min=2.0**-120) / largest).ceil()", ROUNDED_UP, "0"),
        _by_log2(f"torch.log2({LARGEST}.clamp(min=2.0**-120)).floor()", LOG2),
        _by_log2(f"torch.log2({LARGEST}).floor()", ZEROS),
        Edit(TOP, "", NO_TOP),
        Edit(TOP, f"{TOP} + 1", FREXP),
        Edit(TOP, " - 9", ONLY_E4M3),
        Edit(CLAMP, "", SATURATES),
        Edit(QUOTIENTS, "blocks", NOT_SCALED),
        Edit(QUOTIENTS, f"{QUOTIENTS}.bfloat16()", TWICE),
        Edit(RESULT, f"{ELEMENTS_ALONE}, scales.double()", SCALES_IN_FP32),
        Edit(".to(dtype)", "", DEQUANTIZED),
        Edit(f"return {RESULT}", f"x.zero_()\nreturn {RESULT}", CALLERS),
    ),
)
