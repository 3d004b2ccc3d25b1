"""MX formats: a scale for every 32 numbers, so that an outlier costs only its neighbors precision.

A block is 32 consecutive numbers along the dim that a matrix product sums over. Their shared scale
is a power of two (E8M0, 8 bits), so scaling itself rounds nothing. MXFP8 has elements of 8 bits
(E4M3, or E5M2), MXFP4 of 4 bits (E2M1). DeepSeek-V3 had used the same idea with fp32 scales for
1 x 128 activations and 128 x 128 weights (DeepSeek-AI 2024, section 3.3.2). Notebook 03_recompute.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.core.errors import CourseError
from course_lib.recompute.float8 import E4M3, NumberFormat

BLOCK = 32  # OCP Microscaling Formats (MX) v1.0, section 5.2: of all its formats
LOWEST_SCALE, HIGHEST_SCALE = -127, 127  # exponents of E8M0; section 5.4.1
# 0, 0.5, 1, 1.5, 2, 3, 4, 6: PyTorch 2.13 has the dtype, but no cast on a CPU
E2M1 = NumberFormat(name="E2M1", mantissa_bits=1, lowest_exponent=0, largest=6.0)


def quantize_blocks(
    x: Tensor, fmt: NumberFormat = E4M3, *, block: int = BLOCK, round_up: bool = False
) -> tuple[Tensor, Tensor]:
    """Round x in blocks along its last dim; return elements and scales.

    A scale is the largest power of two that is at most the block's largest |x|, divided by the
    largest power of two that the format has. What is then beyond the format's largest number
    saturates. The last block may be shorter. A block of zeros has any scale, a block with an inf or
    a nan becomes nan.

    round_up   the smallest power of two with which nothing saturates, instead

    Shapes: [..., n] -> [..., n] and [..., ceil(n / block)], both fp32
    Source: OCP Microscaling Formats (MX) v1.0, section 6.3; `round_up` is what Mishra et al. 2025
            (Recipes for Pre-training LLMs with MXFP8) propose
    Raises: CourseError for a block of less than 1 number
    """
    if block < 1:
        raise CourseError(f"quantize_blocks: need blocks of 1 number or more; got {block}.")
    n = x.shape[-1]
    blocks = F.pad(x.float(), (0, -n % block)).unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1 - fmt.largest_exponent
    if round_up:
        mantissa, exponents = torch.frexp(largest / fmt.largest)
        exponents = exponents - (mantissa == 0.5).int()  # a power of two is its own ceiling
    scales = torch.exp2(exponents.clamp(LOWEST_SCALE, HIGHEST_SCALE))
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    elements = fmt.nearest(blocks / scales.unsqueeze(-1))
    return elements.flatten(-2)[..., :n], scales


def dequantize_blocks(elements: Tensor, scales: Tensor, *, block: int = BLOCK) -> Tensor:
    """Return the numbers that elements and scales stand for: element times its block's scale.

    Shapes: [..., n] and [..., ceil(n / block)] -> [..., n]
    """
    return elements * scales.repeat_interleave(block, -1)[..., : elements.shape[-1]]


@dataclass(frozen=True, kw_only=True)
class BlockScaling:
    """Rounds a matrix twice, in blocks along its rows and in blocks along its columns.

    A product needs blocks along the dim that it sums over, and forward and backward sum over
    different ones. (Transformer Engine calls the two rowwise and columnwise data.)

    rows, columns   formats; the one along the columns is for backward
    """

    rows: NumberFormat = E4M3
    columns: NumberFormat = E4M3
    block: int = BLOCK
    round_up: bool = False

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrix, rounded in blocks along its rows, then along its columns.

        Shapes: [n, m] -> [n, m] twice
        """
        return self._rounded(x, self.rows), self._rounded(x.T, self.columns).T

    def _rounded(self, x: Tensor, fmt: NumberFormat) -> Tensor:
        elements, scales = quantize_blocks(x, fmt, block=self.block, round_up=self.round_up)
        return dequantize_blocks(elements, scales, block=self.block)
