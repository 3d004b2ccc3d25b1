"""The roofline: the speed that a device's arithmetic, its memory and its links allow.

An operation with an arithmetic intensity of I FLOP per byte of memory traffic runs at most at
min(peak, I * bandwidth): below the ridge point peak / bandwidth it is memory-bound, above it
compute-bound. The same division with a link's bandwidth says when training waits for messages.
Notebook 01b_speed; used again in 04, 07, 10 and by the planner.
"""

from dataclasses import dataclass

from course_lib.core.errors import CourseError
from course_lib.cost.hardware import Device


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The roof of a device: its peak, and the bandwidth of its memory.

    Raises: CourseError unless both are positive
    Source:  Williams, Waterman and Patterson 2009 (Roofline), section 3
    """

    name: str
    flop_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.flop_per_s > 0 and self.bytes_per_s > 0):
            raise CourseError(
                f"Roof {self.name}: expected a positive peak and bandwidth; got "
                f"{self.flop_per_s:g} FLOP/s and {self.bytes_per_s:g} bytes/s."
            )

    @property
    def ridge(self) -> float:
        """The intensity, in FLOP per byte, from which the peak can be reached."""
        return self.flop_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """Return the most FLOP/s at an intensity in FLOP per byte."""
        return min(self.flop_per_s, intensity * self.bytes_per_s)

    def bound(self, intensity: float) -> str:
        """Return what limits an operation of this intensity: "memory" or "compute"."""
        return "memory" if intensity < self.ridge else "compute"


def roof_of(device: Device, dtype: str = "bf16") -> Roof:
    """Return the roof of a device by its data sheet, with the dense peak of a dtype."""
    return Roof(name=device.name, flop_per_s=device.peak(dtype), bytes_per_s=device.bytes_per_s)


def matmul_intensity(m: int, k: int, n: int, number_bytes: int = 2) -> float:
    """Return FLOP per byte of [m, k] @ [k, n]: both are read once, the product is written once.

    That is 2mkn / (number_bytes (mk + kn + mn)): about 2m / number_bytes where m is small beside
    k and n, and n / (1.5 number_bytes) for squares.
    """
    return 2 * m * k * n / (number_bytes * (m * k + k * n + m * n))


def add_intensity(number_bytes: int = 2) -> float:
    """Return FLOP per byte of the sum of two tensors: two are read and one is written."""
    return 1 / (3 * number_bytes)


def data_parallel_tokens(
    p: int, flop_per_s: float, bytes_per_s: float, grad_bytes: int = 2
) -> float:
    """Return the tokens per rank below which the all-reduce takes longer than backward.

    Backward computes 4 FLOP per parameter and token, and a ring sends 2 (p-1)/p gradients per
    parameter, so the times are equal at grad_bytes / 2 * (p-1)/p * flop_per_s / bytes_per_s tokens,
    however large the model is.

    flop_per_s    that backward reaches
    bytes_per_s   of the slowest link of the ring, in one direction
    """
    return grad_bytes / 2 * (p - 1) / p * flop_per_s / bytes_per_s


def fsdp_tokens(p: int, flop_per_s: float, bytes_per_s: float, number_bytes: int = 2) -> float:
    """Return the tokens per rank below which gathering parameters takes longer than forward.

    Forward computes 2 FLOP per parameter and token, and receives (p-1)/p of each parameter. In
    backward both double (gather again, and reduce-scatter gradients of the same dtype), so the same
    number of tokens holds for both.
    """
    return number_bytes / 2 * (p - 1) / p * flop_per_s / bytes_per_s
