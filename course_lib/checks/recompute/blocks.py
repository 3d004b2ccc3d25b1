"""Exercise 6 of 03_recompute: numbers of 8 bits, with a shared power of two for each block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.accumulation.effects import LOOKS, EffectCase, Effects, watched
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.expectations import CALLERS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES, SCALES, DTYPE, ELEMENTS = "shapes", "scales", "dtype of the elements", "elements"
SCALE_DTYPE = "dtype of the scales"

A_PAIR = Cause("Return both tensors, the elements first: `return elements, scales`.")
SWAPPED = Cause("Return the elements first, then the scales.")
SHAPE = Cause("As many elements as x has, and a scale for each block of each row.")
AXIS = Cause(
    "The blocks lie along the columns here. A product sums over the last dim of x, so they have to "
    "lie along its rows."
)
ACROSS = Cause("A block ends where its row ends: the next row begins a new one.")
DROPPED = Cause("The last block may be shorter, and has a scale, too: pad the row, do not cut it.")
PADDED = Cause("The zeros that fill the last block are not part of x: cut them off at the end.")
BLOCK_IS_32 = Cause("A block is `block` numbers long; 32 is only the default.")
ONE_SCALE = Cause("That is one scale for all of x: each block has its own.")
ROW_SCALE = Cause("That is one scale for each row: each block of a row has its own.")
NO_ABS = Cause("The largest number may be negative: look at |x|.")
NO_POWER = Cause(
    "That is largest |x| / largest number of the format. Here each of the two is first rounded "
    "down to a power of two."
)
ROUNDED_UP = Cause(
    "Rounded up, so that nothing saturates (Mishra et al. 2025). Here the block's largest |x| and "
    "the format's largest number are each rounded down to a power of two."
)
NEAREST_POWER = Cause("Not the nearest power of two, but the largest one that is not above |x|.")
LOG2 = Cause(
    "In fp32, log2 of a number just below a power of two is rounded up to a whole number, and the "
    "scale is twice too large. torch.frexp reads the exponent from the number itself."
)
A_POWER = Cause("A block of zeros may have any scale that is a power of two, and this is none.")
ZEROS = Cause(
    "A block of zeros: log2(0) is -inf, so its scale is 0, and 0 / 0 is nan. Give it a power "
    "of two."
)
NO_TOP = Cause(
    "The block's largest number comes out as 2 at most, but the format goes up to 448 or 57,344: "
    "what is smaller is lost for nothing. Divide the scale by the format's largest power of two."
)
FREXP = Cause(
    "A factor of two: frexp has a mantissa from 0.5 to 1, so its exponent is one larger than that "
    "of the power of two below. Take it of both numbers, or subtract 1."
)
ONLY_E4M3 = Cause("448 = 1.75 * 2**8 is E4M3's largest number; ask torch.finfo(dtype).max.")
SATURATES = Cause(
    "Beyond the largest number, E5M2 has inf: saturate, with clamp(-largest, largest), first."
)
CUT_AT_POWER = Cause(
    "The largest number is no power of two: 448 in E4M3, not 256. Clamp there, at finfo(dtype).max."
)
NO_FLOOR = Cause("A block of very small numbers has a very small scale: set no lower limit.")
NOT_SCALED = Cause("The elements are x / scale, and this is x.")
ALL_ONES = Cause("All scales are 1: each block has its own, which brings it into dtype's range.")
MULTIPLIED = Cause("Divide by the scale: x is element times scale.")
RECIPROCAL = Cause("That is 1 / scale: x is element times scale.")
SCALES_IN_FP32 = Cause(
    "Return the scales in fp32. (A byte each, torch.float8_e8m0fnu, is what the specification "
    "stores.)"
)
NO_CEILING = Cause("A block of very large numbers has a very large scale: set no upper limit.")
FP16_SCALES = Cause("fp16 cannot hold every scale: keep the scales in fp32.")
AS_STORED = Cause(
    "Right for a contiguous x only: that is another matrix where x is a transpose. Use its shape, "
    "not its storage."
)
EXPONENTS = Cause("Those are the exponents: return the powers of two themselves, in fp32.")
TRUNCATED = Cause("The digits that do not fit were cut off: round to the nearest number, .to does.")
TIES = Cause("In the middle between two numbers, .to takes the even one: do not round before it.")
TWICE = Cause(
    "Rounded twice: to 16 bits, and then to 8. The first time may move a number to the middle "
    "between two others. Stay in fp32 up to the last cast."
)
DEQUANTIZED = Cause("Return the elements as dtype, a byte each, and not yet times their scale.")
LOOK_SCALES = Cause(
    "Take one block: the largest power of two in its |x|, divided by 2**8 for E4M3 or 2**15 for "
    "E5M2."
)
LOOK = Cause("The elements are x / scale, clamped to the largest number, then `.to(dtype)`.")


def _blocks(
    answer: Callable[..., Any], make: Callable[[], Tensor], dtype: torch.dtype, block: int
) -> dict[str, Any]:
    x = make()
    with watched(x=x) as seen:
        result = answer(x, dtype) if block == 32 else answer(x, dtype, block)
    if result is None:
        return {**seen, SHAPES: None}
    pair = isinstance(result, list | tuple) and len(result) == 2
    if not pair or not all(isinstance(each, Tensor) for each in result):
        raise failed(f"got {type(result).__name__}", A_PAIR)
    elements, scales = result
    done = {**seen, SHAPES: f"elements {list(elements.shape)}, scales {list(scales.shape)}"}
    if done[SHAPES] == _shapes(make(), block):
        numbers = scales.float()
        done[SCALES] = torch.where(_any_scale_will_do(make(), numbers, block), 1.0, numbers)
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


def _transposed(rows: int, n: int) -> Tensor:
    return _random(n, rows).T


def _listed(*numbers: float) -> Tensor:
    return torch.tensor([numbers])


def _cases() -> list[EffectCase]:
    below = 256 - 2.0**-16  # log2 in fp32 says 8
    cases: list[tuple[str, Callable[[], Tensor], torch.dtype, int]] = [
        ("x [2, 12], blocks of 4", partial(_random, 2, 12), E4M3, 4),
        ("x [3, 10], blocks of 4", partial(_random, 3, 10), E4M3, 4),
        ("x [2, 64]", partial(_random, 2, 64, 0.5), E4M3, 32),
        ("x [3, 70]", partial(_random, 3, 70, 0.5), E4M3, 32),
        ("x [5, 3]", partial(_random, 5, 3), E4M3, 32),
        ("E5M2, x [2, 12], blocks of 4", partial(_random, 2, 12), E5M2, 4),
        ("E5M2, x [33, 65]", partial(_random, 33, 65, 0.5), E5M2, 32),
        ("a negative number is the largest", partial(_listed, 1.0, -300.0, 2.5, 3.0), E4M3, 4),
        ("the largest is beyond 448", partial(_listed, 500.0, -490.0, 7.0, 1.0), E4M3, 4),
        ("E5M2 beyond 57,344", partial(_listed, 65000.0, -63000.0, 7.0, 1.0), E5M2, 4),
        ("a power of two is the largest", partial(_listed, 0.25, 0.1, -0.2, 0.01), E4M3, 4),
        ("numbers in the middle", partial(_listed, 256.0, 17.0, 19.0, -21.0, 23.0), E4M3, 5),
        ("near the middle", partial(_listed, 256.0, 17 + 2.0**-8, -(19 - 2.0**-8)), E4M3, 3),
        ("very small numbers", partial(_listed, 3e-20, 1e-20, 2e-30, 1e-20), E4M3, 2),
        ("very large numbers", partial(_listed, 3e38, -1e38, 1e30, 2e29), E4M3, 2),
        ("x [3, 10], a transpose", partial(_transposed, 3, 10), E4M3, 4),
        ("zeros", partial(_listed, 0.0, 0.0, 1.0, 2.0, 0.0), E4M3, 2),
        ("just below a power of two", partial(_listed, below, 1.0, 0.5 - 2.0**-25, 0.1), E4M3, 2),
    ]
    return [
        (text, partial(_blocks, make=make, dtype=dtype, block=block))
        for text, make, dtype, block in cases
    ]


def _right(x: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the quotients, blocked and not yet rounded, the scales, and the largest number."""
    largest = torch.tensor(torch.finfo(dtype).max)
    blocks = F.pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    exponents = torch.frexp(blocks.abs().amax(-1)).exponent - torch.frexp(largest).exponent
    scales = torch.exp2(exponents)
    return (blocks / scales.unsqueeze(-1)).clamp(-largest, largest), scales, largest


def _along_columns(x: Tensor, dtype: torch.dtype, block: int = 32) -> tuple[Tensor, Tensor]:
    quotients, scales, _ = _right(x.T, dtype, block)
    return quotients.flatten(1)[:, : len(x)].to(dtype).T, scales.T


def _along_columns_untransposed(
    x: Tensor, dtype: torch.dtype, block: int = 32
) -> tuple[Tensor, Tensor]:
    elements, scales = _along_columns(x, dtype, block)
    return elements, scales.T


def _across_rows(x: Tensor, dtype: torch.dtype, block: int = 32) -> tuple[Tensor, Tensor]:
    quotients, scales, _ = _right(x.reshape(1, -1), dtype, block)
    return quotients.flatten()[: x.numel()].to(dtype).view_as(x), scales[0]


def _cut_off(x: Tensor, dtype: torch.dtype, block: int = 32) -> tuple[Tensor, Tensor]:
    quotients, scales, _ = _right(x, dtype, block)
    return _to_steps(quotients, dtype, torch.trunc)[:, : x.shape[1]], scales


def _ties_away(x: Tensor, dtype: torch.dtype, block: int = 32) -> tuple[Tensor, Tensor]:
    quotients, scales, _ = _right(x, dtype, block)
    away = lambda y: torch.trunc(y + 0.5 * y.sign())  # noqa: E731
    return _to_steps(quotients, dtype, away)[:, : x.shape[1]], scales


def _to_steps(quotients: Tensor, dtype: torch.dtype, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Make multiples of the distance between neighbors, with `whole` in place of rounding."""
    bits, lowest = (3, -6) if dtype == E4M3 else (2, -14)
    exponents = (torch.frexp(quotients).exponent - 1).clamp(lowest)
    steps = torch.exp2(exponents - bits)
    return (whole(quotients / steps) * steps).to(dtype).flatten(1)


def _three_for_zeros(x: Tensor, dtype: torch.dtype, block: int = 32) -> tuple[Tensor, Tensor]:
    quotients, scales, _ = _right(x, dtype, block)
    zeros = (quotients == 0).all(-1)
    return quotients.to(dtype).flatten(1)[:, : x.shape[1]], scales.where(~zeros, 3.0)


def _as_stored(x: Tensor, dtype: torch.dtype, block: int = 32) -> tuple[Tensor, Tensor]:
    quotients, scales, _ = _right(x.as_strided(x.shape, (x.shape[1], 1)), dtype, block)
    return quotients.to(dtype).flatten(1)[:, : x.shape[1]], scales


def _writes(x: Tensor, dtype: torch.dtype, block: int = 32) -> tuple[Tensor, Tensor]:
    _, scales, largest = _right(x, dtype, block)
    for index, part in enumerate(x.split(block, 1)):
        part /= scales[:, index : index + 1]
    return x.clamp(-largest, largest).to(dtype), scales


LARGEST, TOP = "blocks.abs().amax(-1)", " - torch.frexp(torch.tensor(largest)).exponent"
QUOTIENTS, CLAMP = "(blocks / scales.unsqueeze(-1))", ".clamp(-largest, largest)"
EXPONENTS_LINE = f"exponents = torch.frexp({LARGEST}).exponent"
SCALES_LINE = f"scales = torch.exp2(exponents{TOP})"
RESULT = "elements.flatten(1)[:, :n], scales"
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
        looks={
            **LOOKS,
            SHAPES: SHAPE,
            SCALES: LOOK_SCALES,
            SCALE_DTYPE: SCALES_IN_FP32,
            DTYPE: DEQUANTIZED,
        },
        look=LOOK,
        success="A power of two for each block, nothing infinite, and ties to even.",
    ),
    wrong=(
        Own(_along_columns, AXIS),
        Own(_along_columns_untransposed, AXIS),
        Own(_across_rows, ACROSS),
        Edit(
            "F.pad(x, (0, -n % block)).unflatten(1, (-1, block))",
            "x[:, : n // block * block].unflatten(1, (n // block, block))",
            DROPPED,
        ),
        Edit(RESULT, "elements.flatten(1), scales", PADDED),
        Edit("-n % block", "-n % 32", BLOCK_IS_32, also=(("(-1, block)", "(-1, 32)"),)),
        Edit(RESULT, f"{RESULT}.unsqueeze(-1)", SHAPE),
        Edit(RESULT, "scales, elements.flatten(1)[:, :n]", SWAPPED),
        Edit(RESULT, "elements.flatten(1)[:, :n]", A_PAIR),
        Edit(LARGEST, "blocks.abs().amax().expand(blocks.shape[:2])", ONE_SCALE),
        Edit(LARGEST, "blocks.abs().amax((1, 2)).unsqueeze(1).expand(blocks.shape[:2])", ROW_SCALE),
        Edit(LARGEST, "blocks.amax(-1)", NO_ABS),
        Edit(SCALES_LINE, f"scales = {LARGEST} / largest", NO_POWER),
        Edit(SCALES_LINE, f"scales = {LARGEST}.clamp(min=2.0**-126) / largest", NO_POWER),
        _by_log2(f"torch.log2({LARGEST}.clamp(min=2.0**-120) / largest).ceil()", ROUNDED_UP, "0"),
        _by_log2(f"torch.log2({LARGEST}.clamp(min=2.0**-120)).ceil()", ROUNDED_UP),
        _by_log2(f"torch.log2({LARGEST}.clamp(min=2.0**-120)).round()", NEAREST_POWER),
        _by_log2(f"torch.log2({LARGEST}.clamp(min=2.0**-120)).floor()", LOG2),
        _by_log2(f"torch.log2({LARGEST}.double()).floor()", ZEROS),
        _by_log2(f"torch.log2({LARGEST}).floor()", ZEROS),
        Edit(TOP, "", NO_TOP),
        Edit(TOP, " - 1", NO_TOP),
        Edit(TOP, f"{TOP} + 1", FREXP),
        Edit(TOP, f"{TOP} - 1", FREXP),
        Edit(TOP, " - 9", ONLY_E4M3),
        Edit(CLAMP, ".clamp(-448, 448)", ONLY_E4M3),
        Edit(CLAMP, "", SATURATES),
        Edit(
            CLAMP,
            ".clamp(-top, top)",
            CUT_AT_POWER,
            also=(("elements =", "top = 2.0**8 if largest < 500 else 2.0**15\nelements ="),),
        ),
        Edit(LARGEST, f"{LARGEST}.clamp(min=1e-12)", NO_FLOOR),
        Edit(QUOTIENTS, "blocks", NOT_SCALED),
        Edit(SCALES_LINE, f"scales = torch.ones_like({LARGEST})", ALL_ONES),
        Edit(QUOTIENTS, "(blocks * scales.unsqueeze(-1))", MULTIPLIED),
        Edit(RESULT, "elements.flatten(1)[:, :n], 1 / scales", RECIPROCAL),
        Edit(RESULT, "elements.flatten(1)[:, :n], torch.log2(scales)", EXPONENTS),
        Edit(RESULT, "elements.flatten(1)[:, :n], scales.double()", SCALES_IN_FP32),
        Edit(RESULT, "elements.flatten(1)[:, :n], scales.half()", FP16_SCALES),
        Edit(RESULT, "elements.flatten(1)[:, :n], scales.bfloat16()", SCALES_IN_FP32),
        Edit(RESULT, "elements.flatten(1)[:, :n], scales.to(torch.float8_e8m0fnu)", SCALES_IN_FP32),
        Edit(SCALES_LINE, f"{SCALES_LINE}.clamp(max=2.0**15)", NO_CEILING),
        Own(_three_for_zeros, A_POWER),
        Own(_as_stored, AS_STORED),
        Own(_cut_off, TRUNCATED),
        Own(_ties_away, TIES),
        Edit(QUOTIENTS, f"{QUOTIENTS}.bfloat16()", TWICE),
        Edit(CLAMP, f"{CLAMP}.half()", TWICE),
        Edit(
            RESULT,
            "(elements.float() * scales.unsqueeze(-1)).flatten(1)[:, :n], scales",
            DEQUANTIZED,
        ),
        Edit(".to(dtype)", "", DEQUANTIZED),
        Own(_writes, CALLERS),
    ),
)
