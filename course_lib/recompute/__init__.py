"""Activation recomputation, mixed precision and number formats (notebook 03_recompute).

`activations.py` recomputes parts of a model during backward, `peak.py` predicts the bytes;
`mixed_precision.py` trains 16-bit weights with fp32 master weights and loss scaling. `float8.py`
rounds to 8 bits with a scale for a tensor, `block_scaling.py` with one for every 32 numbers;
`quantized_linear.py` computes with that, and `lab.py` measures what it costs. `pictures.py` draws.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.recompute.activations import (
        recompute,
        recompute_full,
        recompute_none,
        recompute_segments,
        recompute_selective,
        recompute_some,
    )
    from course_lib.recompute.block_scaling import BlockScaling, dequantize_blocks, quantize_blocks
    from course_lib.recompute.float8 import CurrentScaling, DelayedScaling, NumberFormat
    from course_lib.recompute.mixed_precision import LossScale, MixedPrecisionOptimizer
    from course_lib.recompute.quantized_linear import Operands, QuantizedLinear, quantize_linears
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "LossScale",
    "MixedPrecisionOptimizer",
    "NumberFormat",
    "Operands",
    "QuantizedLinear",
    "dequantize_blocks",
    "quantize_blocks",
    "quantize_linears",
    "recompute",
    "recompute_full",
    "recompute_none",
    "recompute_segments",
    "recompute_selective",
    "recompute_some",
]
