"""Offload: state that only the optimizer needs waits in the host's memory, and pays for trips.

Gradients travel to the host, the optimizer steps there, and new parameters travel back. Each trip
is an event of the recorder, with its bytes. Where the ranks compute on the CPU there is no other
memory: a second buffer stands for it, so copies and bytes are real, and their time is not that of
PCIe. Notebook 09_zero.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Offload:
    """The host's memory for one rank, and the bytes that have travelled.

    emulated   True where the device is the CPU itself
    num_bytes  of all trips so far
    """

    def __init__(self, device: torch.device) -> None:
        self.emulated = device.type == "cpu"
        self.num_bytes = 0

    @contextmanager
    def trip(self, what: str, num_bytes: int) -> Iterator[None]:
        """What is copied in here is one trip: an event `offload: what`, of so many bytes."""
        from course_lib.ranks.recorder import current_recorder  # not above: it starts a server

        start_s = time.perf_counter()
        yield
        self.num_bytes += num_bytes
        if (recorder := current_recorder()) is not None:
            label = f"offload: {what}"
            recorder.add("compute", start_s, time.perf_counter(), num_bytes=num_bytes, label=label)

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy that lies in the host's memory."""
        return tensor.detach().to("cpu", copy=True)
