"""Tools for the checks of 09_zero: tensors laid out flat, and calls in any order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.expectations import Demand
from course_lib.checks.properties import NOT_WAITED
from course_lib.checks.watch import WAIT, Step
from course_lib.ranks.work_handle import TrackedWork

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


# --- for the checks of other lessons, which still list what they expect


def nearly(got: Tensor, need: Tensor) -> bool:
    """Return whether rounding to a shorter dtype explains the difference."""
    return torch.allclose(got.double(), need.double(), rtol=0.01, atol=0)


@contextmanager
def unwaited_calls() -> Iterator[dict[int, str]]:
    """Yield the kinds of the calls that were started and that nobody has waited for, by number."""
    begin, unwaited = TrackedWork.__init__, dict[int, str]()

    def note_begin(work: TrackedWork, *args: Any, **kwargs: Any) -> None:
        begin(work, *args, **kwargs)
        unwaited[work.post.number] = work.post.kind

    def noting(ends: Callable[..., Any]) -> Callable[..., Any]:
        def note_end(work: TrackedWork, *args: Any) -> Any:
            unwaited.pop(work.post.number, None)
            return ends(work, *args)

        return note_end

    with (
        patch.object(TrackedWork, "__init__", note_begin),
        patch.object(TrackedWork, "wait", noting(TrackedWork.wait)),
        patch.object(TrackedWork, "get_future", noting(TrackedWork.get_future)),
    ):
        yield unwaited


ALL_WAITED = Demand(
    lambda at: not at.seen.unwaited,
    lambda at: f"nothing waits for {' and '.join(sorted(set(at.seen.unwaited)))}",
    NOT_WAITED,
)
