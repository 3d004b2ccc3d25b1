"""ZeRO-2 in one short file: an optimizer step in three phases, with one message per parameter.

It says what a rank does, and nothing else. `zero.py` puts many parameters into one message, and
adds stages 1 and 3, clipping, masters in float32, offload and checkpoints. Notebook 09_zero.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import check_wrappable, mark_wrapped, wrapper_of
from course_lib.data_parallel.elementwise import need_elementwise
from course_lib.data_parallel.gradients import (
    NotCopied,
    call_when_accumulated,
    check_not_replaced,
    need_dense,
    require_gradients,
    require_known,
)
from course_lib.data_parallel.guarded import CLIP, MODULE_CLEAR, STEP, GuardedParameter, guard


class SentParam(GuardedParameter):
    """A parameter whose gradient has been sent: whoever would read it is told so."""

    engine = "WholeZeRO2"
    instead: ClassVar = {
        **dict.fromkeys((CLIP, MODULE_CLEAR), "ZeRO2 of course_lib.zero, which clears and clips"),
        STEP: "step() of WholeZeRO2",
    }

    @property
    def is_part(self) -> bool:
        """Whether no other wrapper has replaced it."""
        return isinstance(wrapper_of(self), WholeZeRO2)

    @property
    def is_kept(self) -> bool:
        """Whether a step would use this rank's part of it."""
        return bool(wrapper_of(self).own)


class WholeZeRO2(NotCopied):
    """`module` on every rank; each rank keeps 1/p of the gradients and of the optimizer state.

    optimizer = WholeZeRO2(module, torch.optim.AdamW, lr=1e-3)
    loss_of(module(inputs)).backward(); optimizer.step()

    Every rank begins with the weights of the group's first one. A step needs a gradient of every
    trained parameter, and one backward. `param.grad` is None after it: nothing is left to clip.

    Cost:    per step one reduce_scatter of each gradient, one all_gather of each parameter
    Raises:  CourseError that names parameters without a gradient, or with a second one
    Source:  Rajbhandari et al. 2020 (ZeRO), sections 5.2 and 7.2.1
    """

    def __init__(
        self, module: nn.Module, cls: type[Optimizer], group: Group = None, **options: Any
    ) -> None:
        self.member = member_of(group, "WholeZeRO2")
        check_wrappable(module, group, "WholeZeRO2")
        need_elementwise(cls)
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self.names, self.params = [name for name, _ in named], [param for _, param in named]
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, self.member.global_rank(0), group)
            tensor.detach().copy_(whole)
        # A rank owns the same part of every parameter: the optimizer knows nothing else.
        slots = (self._slots(x.detach()) for x in self.params)
        self.shards = [nn.Parameter(one[self.member.rank].clone()) for one in slots]
        self.optimizer = cls(self.shards, **options)
        self.own: dict[int, Tensor] = {}  # this rank's parts of the sums of gradients
        self.in_flight: list[tuple[dist.Work, Tensor]] = []
        self.module = module
        mark_wrapped(self.params, self)
        for number, param in enumerate(self.params):
            call_when_accumulated(param, self._reduce, number)
            guard(param, SentParam)

    def _slots(self, whole: Tensor) -> Tensor:
        """Return p equal parts of a tensor, the last ones filled up with zeros [p, ceil(n / p)]."""
        width = -(-whole.numel() // self.member.size)
        slots = whole.new_zeros(self.member.size * width)
        slots[: whole.numel()] = whole.flatten()
        return slots.view(self.member.size, width)

    def _reduce(self, number: int) -> None:
        """Phase 1, in backward: send a gradient as soon as it is complete, and free it."""
        param = self.params[number]
        need_dense(param.grad, self.names[number], "WholeZeRO2")
        if param.grad is None or number in self.own:
            raise CourseError(
                f"WholeZeRO2: need one backward before each step; got a second gradient for "
                f"{self.names[number]}, or none. Try step() first, or ZeRO2 of course_lib.zero."
            )
        self._wait()  # one whole gradient is in flight at a time
        slots, param.grad = self._slots(param.grad), None
        own = self.own[number] = torch.empty_like(slots[0])
        work = dist.reduce_scatter_single(
            own, slots.view(-1), group=self.member.group, async_op=True
        )
        self.in_flight.append((work, slots))

    def _wait(self) -> None:
        for work, _ in self.in_flight:
            work.wait()
        self.in_flight.clear()

    @torch.no_grad()
    def step(self) -> None:
        """Step this rank's shards, and give all ranks the new parameters."""
        check_not_replaced(self)
        require_known(self.module, {*self.params}, "WholeZeRO2")
        missing = [name for n, name in enumerate(self.names) if n not in self.own]
        require_gradients(missing, "WholeZeRO2.step", "backward() before step()")
        # Phase 2: the mean of this rank's part of each gradient; the optimizer steps
        self._wait()
        for number, own in self.own.items():
            self.shards[number].grad = own.div_(self.member.size)
            self.shards[number].copy_(self._slots(self.params[number])[self.member.rank])  # loaded?
        self.own.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Phase 3: gather the parameters
        for param, shard in zip(self.params, self.shards, strict=True):
            slots = shard.new_empty(self.member.size * shard.numel())
            dist.all_gather_single(slots, shard.detach(), group=self.member.group)
            param.copy_(slots[: param.numel()].view(param.shape))
