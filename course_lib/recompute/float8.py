"""FP8: numbers of 8 bits, with one scale for a whole tensor.

E4M3 has more precision, E5M2 more range, and a training needs more range than either has. So a
tensor is divided by a scale that brings its largest number near the largest of the format. Current
scaling reads the tensor for that; delayed scaling takes the largest numbers of earlier steps. All
of it is emulated: numbers are rounded to the format, and then used in fp32. Notebook 03_recompute.
"""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.core.errors import CourseError

FP32_EXPONENT = 0x7F800000  # its bits


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A floating-point format with few bits, and rounding to it.

    mantissa_bits     behind the leading 1
    lowest_exponent   of a normal number; below 2**lowest_exponent, steps get no smaller
    largest           finite number
    dtype             PyTorch's own, where a CPU can convert to it

    Source: OCP Microscaling Formats (MX) v1.0, section 5.3; for FP8 Micikevicius et al. 2022 (FP8
            Formats for Deep Learning), section 3
    """

    name: str
    mantissa_bits: int
    lowest_exponent: int
    largest: float
    dtype: torch.dtype | None = None

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest number: 8 for 448 = 1.75 * 2**8."""
        return math.frexp(self.largest)[1] - 1

    def nearest(self, x: Tensor) -> Tensor:
        """Round to the nearest number of the format, ties to even; larger ones become `largest`.

        Below the largest, it has the bits of PyTorch's cast to `dtype`.

        Shapes: [...] -> [...] in fp32
        """
        x = x.float().clamp(-self.largest, self.largest)
        power = (x.view(torch.int32) & FP32_EXPONENT).view(torch.float32)  # of two, at most |x|
        step = power.clamp(2.0**self.lowest_exponent) * 2.0**-self.mantissa_bits
        return torch.round(x / step) * step  # torch.round takes ties to even


E4M3 = NumberFormat(
    name="E4M3", mantissa_bits=3, lowest_exponent=-6, largest=448.0, dtype=torch.float8_e4m3fn
)
E5M2 = NumberFormat(
    name="E5M2", mantissa_bits=2, lowest_exponent=-14, largest=57344.0, dtype=torch.float8_e5m2
)


def current_scale(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the scale with which the largest |x| becomes the largest number; 1 for zeros.

    Shapes: [...] -> []; numbers are `nearest(x / scale) * scale`
    """
    largest = x.abs().amax().float()
    return torch.where(largest > 0, largest / fmt.largest, 1.0)


@dataclass(frozen=True)
class CurrentScaling:
    """Rounds a tensor with one scale, from the largest number that the tensor has now.

    Source: NVIDIA Transformer Engine, user guide, FP8 Current Scaling
    """

    fmt: NumberFormat

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rounded tensor twice: all products can use the same one."""
        scale = current_scale(x, self.fmt)
        rounded = self.fmt.nearest(x / scale) * scale
        return rounded, rounded


class DelayedScaling:
    """Rounds a tensor with one scale, from the largest numbers that it had in earlier steps.

    So the tensor is read once. What is larger than in all of them saturates. In the first step the
    scale is 1.

    history   the number of steps that count; Transformer Engine's default is 1024

    Source: NVIDIA Transformer Engine, user guide, FP8 Delayed Scaling; API, recipe.DelayedScaling
    Raises: CourseError for a history of less than 1
    """

    def __init__(self, fmt: NumberFormat, history: int = 1024) -> None:
        if history < 1:
            raise CourseError(f"DelayedScaling: need a history of 1 step or more; got {history}.")
        self.fmt = fmt
        self.largest: deque[Tensor] = deque(maxlen=history)

    @property
    def scale(self) -> Tensor:
        """Scale of the next step."""
        seen = torch.stack([torch.zeros(()), *self.largest])
        return torch.ones(()) if not seen.any() else current_scale(seen, self.fmt)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rounded tensor twice, and note its largest number for the steps to come."""
        scale = self.scale
        self.largest.append(x.abs().amax().float())
        rounded = self.fmt.nearest(x / scale) * scale
        return rounded, rounded
