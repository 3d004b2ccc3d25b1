"""Local SGD and DiLoCo: every rank trains alone, and every few steps the ranks combine their work.

Data parallelism communicates in each step, independent training never; these are in between. They
send a fraction of the bytes, and the replicas drift apart in the meantime. `LocalSGD` replaces the
parameters by their mean; `DiLoCo` treats the way they have gone as a gradient and lets an outer
optimizer with momentum take the step. Notebook 05_data_parallel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import check_same_parameters
from course_lib.data_parallel.gradients import require_known
from course_lib.data_parallel.naive_ddp import broadcast_state


class LocalSGD(nn.Module):
    """A replica of `module` on every rank; call `step_done()` after each `optimizer.step()`.

    All ranks start from the state of the group's first rank. Trainable parameters and buffers of a
    floating dtype are averaged; frozen parameters stay equal, and integer buffers stay local. The
    optimizer state (momentum, Adam's moments) stays local too. With `every=1` and plain SGD this is
    data parallelism: the mean of the stepped weights equals a step with the mean gradient.

    Cost:    one all_reduce per parameter every `every` steps: 1 / every of NaiveDDP's bytes
    Raises:  CourseError for every < 1
    Source:  Stich 2019 (Local SGD Converges Fast and Communicates Little), section 1
    """

    def __init__(self, module: nn.Module, every: int, group: Group = None) -> None:
        super().__init__()
        if every < 1:
            raise CourseError(f"{type(self).__name__}: need every >= 1; got {every}. Try 8.")
        check_same_parameters(module.named_parameters(), group, type(self).__name__)
        self.module, self.every, self.group = module, every, group
        self._known = {*module.parameters()}
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
        self._check_still_whole()
        for tensor in [*self._trained(), *self._floating_buffers()]:
            tensor.copy_(mean_over(tensor, self.group))

    def _check_still_whole(self) -> None:
        """Check that nobody has added parameters, or sharded them, since the start."""
        where = type(self).__name__
        check_same_parameters(self.module.named_parameters(), self.group, where)
        require_known(self.module, self._known, where)

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self.module.parameters() if param.requires_grad]

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]


class DiLoCo(LocalSGD):
    """Local SGD whose ranks take an outer step every `every` inner steps, instead of averaging.

    The outer gradient is the parameters at the start of the round minus their mean over the ranks
    now. The outer optimizer is SGD with Nesterov momentum; its state is equal on all ranks. Inner
    optimizer state stays local. With outer_lr=1 and momentum=0 this is LocalSGD.

    Cost:    memory for two more copies of the trainable parameters (start and momentum); the same
             all_reduces as LocalSGD
    Raises:  CourseError for every < 1
    Source:  Douillard et al. 2023 (DiLoCo), algorithm 1
    """

    def __init__(
        self,
        module: nn.Module,
        every: int,
        group: Group = None,
        *,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(module, every, group)
        self._params = self._trained()
        self._known = {*self._params}
        self.starts = [param.detach().clone() for param in self._params]
        self.outer = torch.optim.SGD(
            self.starts, lr=outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def average(self) -> None:
        """Take the outer step; all ranks begin the next round from the same parameters."""
        self._check_still_whole()
        self.outer.zero_grad()
        pairs = [*zip(self.starts, self._params, strict=True)]
        starts = [start for start, param in pairs if param.requires_grad]
        params = [param for _, param in pairs if param.requires_grad]
        outer_step(starts, params, self.outer, self.group)  # what is frozen since then stays
        for buffer in self._floating_buffers():
            buffer.copy_(mean_over(buffer, self.group))


@torch.no_grad()
def outer_step(
    starts: Sequence[Tensor],
    params: Sequence[Tensor],
    outer: torch.optim.Optimizer,
    group: Group = None,
) -> None:
    """Step `starts` with the outer gradient, and copy the result into `params`, both in place.

    `outer` is an optimizer of `starts`, the parameters at the beginning of the round.

    Cost:    one all_reduce per parameter
    Source:  Douillard et al. 2023 (DiLoCo), algorithm 1
    """
    for start, param in zip(starts, params, strict=True):
        start.grad = mean_over(start - param, group)
    outer.step()
    for start, param in zip(starts, params, strict=True):
        param.copy_(start)


def mean_over(tensor: Tensor, group: Group = None) -> Tensor:
    """Return the mean of a tensor over the group; the tensor itself stays as it is."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)
