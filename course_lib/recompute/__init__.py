"""Activation recomputation and mixed precision (notebook 03_recompute).

`activations.py` recomputes parts of a model during backward; `mixed_precision.py` trains 16-bit
weights with fp32 master weights and loss scaling; `pictures.py` draws bytes and times, beside
published ones.
"""

from course_lib.recompute.activations import (
    recompute,
    recompute_full,
    recompute_none,
    recompute_segments,
    recompute_selective,
    recompute_some,
)
from course_lib.recompute.mixed_precision import LossScale, MixedPrecisionOptimizer

__all__ = [
    "LossScale",
    "MixedPrecisionOptimizer",
    "recompute",
    "recompute_full",
    "recompute_none",
    "recompute_segments",
    "recompute_selective",
    "recompute_some",
]
