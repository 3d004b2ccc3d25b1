"""Local SGD: every rank trains alone, and every few steps the ranks average their parameters.

Data parallelism communicates in each step, independent training never; local SGD is in between. It
sends a fraction of the bytes, and the replicas drift apart between two averages. With `every=1` and
plain SGD it is data parallelism, since the mean of the stepped weights equals a step with the mean
gradient. Notebook 05_data_parallel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.data_parallel.naive_ddp import broadcast_state


class LocalSGD(nn.Module):
    """A replica of `module` on every rank; call `step_done()` after each `optimizer.step()`.

    All ranks start from the state of the group's first rank. Trainable parameters and buffers of a
    floating dtype are averaged; frozen parameters stay equal, and integer buffers stay local. The
    optimizer state (momentum, Adam's moments) stays local too.

    Cost:    one all_reduce per parameter every `every` steps: 1 / every of NaiveDDP's bytes
    Raises:  CourseError for every < 1
    Source:  Stich 2019 (Local SGD Converges Fast and Communicates Little), section 1
    """

    def __init__(self, module: nn.Module, every: int, group: Group = None) -> None:
        super().__init__()
        if every < 1:
            raise CourseError(f"LocalSGD: need every >= 1; got {every}. Try 8.")
        self.module, self.every, self.group = module, every, group
        self.num_steps = 0
        broadcast_state(module, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output; no communication."""
        return self.module(*args, **kwargs)

    def step_done(self) -> bool:
        """Count a step, average if it is the last of `every`, and return whether it was."""
        self.num_steps += 1
        averages_now = self.num_steps % self.every == 0
        if averages_now:
            self.average()
        return averages_now

    @torch.no_grad()
    def average(self) -> None:
        """Replace trainable parameters and floating buffers by their means over the group."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        buffers = [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]
        p = dist.get_world_size(self.group)
        for tensor in [*trained, *buffers]:
            total = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            tensor.copy_(total / p)
