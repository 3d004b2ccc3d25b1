"""Tools for the checks of 09_zero: tensors laid out flat, and calls in any order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.watch import WAIT, Step

CALLS = "calls"  # a facet


def named(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers in one flat tensor, copied."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def shard_numel(numel: int, p: int) -> int:
    """Return the numbers in an equal shard."""
    return -(-numel // p)


def calls_of(step: Step) -> list[str]:
    """Return the calls of a step, in no order; of one rank none, for it may do without."""
    return sorted(line for line in step.order if line != WAIT) if dist.get_world_size() > 1 else []
