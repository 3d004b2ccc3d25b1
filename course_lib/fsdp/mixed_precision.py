"""FSDP's dtypes: compute in one, sum gradients in another, keep the shards in a third.

Gathers and the computation are cheaper in bf16; sums over many ranks lose digits in it, and so
would the optimizer's small updates. Notebook 10_fsdp.
"""

from dataclasses import dataclass

import torch

from course_lib.core.errors import CourseError


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionPolicy:
    """Dtypes besides the parameters' own, which shards and their gradients keep.

    param_dtype    of gathered parameters, of floating inputs, and so of the computation
    reduce_dtype   of the sums of gradients; None: the parameters' own
    output_dtype   of the model's floating outputs
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for dtype in (self.param_dtype, self.reduce_dtype, self.output_dtype):
            if dtype is not None and not dtype.is_floating_point:
                raise CourseError(
                    f"FSDP: need floating dtypes to compute and reduce in; got {dtype}. "
                    "Try torch.bfloat16."
                )


def policy_of(
    compute_dtype: torch.dtype | None, mixed_precision: MixedPrecisionPolicy | None
) -> MixedPrecisionPolicy:
    """Return the policy of an FSDP. Raises: CourseError for two of them"""
    if mixed_precision is None:
        return MixedPrecisionPolicy(param_dtype=compute_dtype)
    if compute_dtype is not None:
        raise CourseError(
            f"FSDP: need compute_dtype or mixed_precision; got both, {compute_dtype} and "
            f"{mixed_precision}. Try MixedPrecisionPolicy(param_dtype={compute_dtype})."
        )
    return mixed_precision
