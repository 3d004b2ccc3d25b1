"""Stand-ins on the CPU for calls that Megatron-Core hard-codes to CUDA.

    device="cuda" in any call        the tensor is made on the CPU
    torch.Tensor.cuda                the tensor itself
    torch.cuda.current_device        the CPU's device
    torch.cuda.synchronize           does nothing: the CPU has no queue of kernels
    CudaRNGStatesTracker.fork        does nothing: it keeps a GPU's random states, for dropout

Everything else is Megatron-Core as it is installed. After the block all of this is as before, and
on a GPU nothing is replaced. They are written for Megatron-Core 0.16.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from course_lib.ranks.world import rank_device


class _MakeOnCpu(TorchFunctionMode):
    """Replace a CUDA device by the CPU in the arguments of each call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace what is listed above in the block; on a GPU only make the rank's GPU current."""
    if rank_device().type == "cuda":
        with torch.cuda.device(rank_device()):
            yield
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with ExitStack() as replaced:
        replaced.enter_context(_MakeOnCpu())
        for owner, name, instead in (
            (torch.Tensor, "cuda", lambda tensor, *_args, **_options: tensor),
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda *_args: None),
            (CudaRNGStatesTracker, "fork", lambda *_args, **_options: nullcontext()),
        ):
            replaced.enter_context(patch.object(owner, name, instead))
        yield
