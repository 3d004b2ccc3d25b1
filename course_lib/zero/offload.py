"""Offload: keep the optimizer state in the host's memory, and count the bytes of every transfer.

Gradients are copied to the host, the optimizer steps there, and new parameters are copied back.
Each transfer is recorded as an event with its bytes. Where the ranks compute on the CPU there is no
other memory: a second buffer emulates it, so copies and bytes are real, but their time is not that
of PCIe. Notebook 09_zero.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Offload:
    """The host's memory as used by one rank.

    emulated   True where the device is the CPU itself
    num_bytes  bytes of all transfers so far
    """

    def __init__(self, device: torch.device) -> None:
        self.emulated = device.type == "cpu"
        self.num_bytes = 0

    @contextmanager
    def transfer(self, what: str, num_bytes: int) -> Iterator[None]:
        """Count and record what is copied in the block as one event `offload: what`."""
        from course_lib.ranks.recorder import current_recorder  # not above: it starts a server

        start_s = time.perf_counter()
        yield
        self.num_bytes += num_bytes
        if (recorder := current_recorder()) is not None:
            label = f"offload: {what}"
            recorder.add("compute", start_s, time.perf_counter(), num_bytes=num_bytes, label=label)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in the host's memory."""
        return tensor.detach().to("cpu", copy=True)
