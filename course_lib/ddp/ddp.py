"""Data parallelism with buckets: gradients are reduced while backward still computes the others.

A hook on each parameter is called when its gradient is complete. Gradients are copied side by side
into buckets, the last layer's first, and a full bucket is launched at once as one all_reduce. After
backward, `finish` waits for the launched buckets; then every `param.grad` is the mean over the
ranks, as a view of its bucket. Notebook 06_ddp.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.coalesced import broadcast_together
from course_lib.collectives.group import Group, group_of, member_of
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import check_wrappable, mark_wrapped
from course_lib.data_parallel.gradients import (
    NoSync,
    NotCopied,
    all_zero,
    call_when_accumulated,
    check_not_replaced,
    not_cleared,
    require_gradients,
    require_known,
    some_names,
    used_on_any_rank,
)
from course_lib.data_parallel.guarded import OwnGrads
from course_lib.ddp.buckets import Bucket, make_buckets


class Mean:
    """Mean over the group, in place: an asynchronous all_reduce that `wait` completes."""

    def __init__(self, flat: Tensor, group: Group) -> None:
        self.flat = flat
        self.p = dist.get_world_size(group)
        self.work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum and divide it by the number of ranks."""
        self.work.wait()
        self.flat.div_(self.p)


class DDP(NotCopied, NoSync, nn.Module):
    """`module` on every rank of a group, with gradients that are means over the group.

    model = DDP(module); loss_of(model(inputs)).backward(); model.finish(); optimizer.step()

    Inside `no_sync()` backward only accumulates into `param.grad`, and `finish` does nothing.

    bucket_bytes       a bucket takes parameters up to this size; a larger one has its own
    overlap            launch a bucket as soon as it is full; False: all of them in `finish`
    find_unused        a missing gradient counts as zero; it stays None if no rank has one. Costs
                       one more all_reduce, of 1 byte per parameter
    broadcast_buffers  before a forward pass in training, broadcast the buffers of the group's first
                       rank; with accumulation once, after the step
    comm_hook          (flat, group) -> object whose wait() leaves the mean in flat; its method
                       `watch(buckets)`, if it has one, is called first. See ddp/comm_hooks.py

    Cost:    one all_reduce per bucket, of all trainable parameters' bytes together
    Raises:  CourseError here, from `backward` and from `finish`; MeshError for another's group
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_bytes: float = 25 * 2**20,
        group: Group = None,
        overlap: bool = True,
        *,
        find_unused: bool = False,
        broadcast_buffers: bool = True,
        comm_hook: Callable[[Tensor, Group], Any] | None = None,
    ) -> None:
        super().__init__()
        member_of(group, "DDP")
        check_wrappable(module, group, "DDP")
        self.module, self.group, self.overlap = module, group or dist.group.WORLD, overlap
        self.find_unused, self.broadcast_buffers = find_unused, broadcast_buffers
        self.comm_hook = comm_hook or Mean
        self.buckets = make_buckets(module, bucket_bytes)
        if watch := getattr(comm_hook, "watch", None):
            watch(self.buckets)
        self._known = {param for bucket in self.buckets for param in bucket.params}
        self._works: list[Any] = []  # one handle per launched bucket
        self._buffers_may_differ = False
        self._busy = False  # True in backward and in finish, and after an error in them
        self._own_grads = OwnGrads(self)
        broadcast_together([*module.parameters(), *module.buffers()], self.group)
        for number, bucket in enumerate(self.buckets):
            for index, param in enumerate(bucket.params):
                call_when_accumulated(param, self._mark_ready, number, index)
        mark_wrapped(module.parameters(), self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed with the buffers of the group's first rank."""
        self._check_ended()
        if self.broadcast_buffers and self.training and self._buffers_may_differ:
            broadcast_together(self.module.buffers(), self.group)
        self._buffers_may_differ = self._syncs and torch.is_grad_enabled()  # as PyTorch has it
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch the remaining buckets and wait for all; `param.grad` is then the mean."""
        if not self._syncs:
            return
        self._check_ended()
        require_known(self.module, self._known, "DDP")
        self._busy = True
        used = self._copy_remaining()
        while len(self._works) < len(self.buckets):
            self._launch()
        if self.find_unused and self.buckets:
            used = used_on_any_rank(used, self.buckets[0].flat.device, self.group)
        for bucket, work in zip(self.buckets, self._works, strict=True):
            if bucket.flat._version != bucket.launched_at:
                self._refuse_change(bucket)
            work.wait()
        self._clear_unused(used)
        self._begin_round()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those of a backward that nobody will finish."""
        self._own_grads.check_not_stepped()
        for work in self._works:
            work.wait()
        super().zero_grad(set_to_none)
        self._begin_round()

    @property
    def is_unfinished(self) -> bool:
        """Whether there are gradients which are not means yet, and should be: not in no_sync()."""
        return self._syncs and self._own_grads.exist

    def _begin_round(self) -> None:
        self._works.clear()
        self._busy = False
        self._own_grads.end()
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.params)))

    def _check_ended(self) -> None:
        """Discard what a backward or a finish has launched before it raised an error.

        Raises:  CourseError unless the gradients have been cleared since
        """
        check_not_replaced(self)
        if not self._busy:
            self._own_grads.check_not_stepped()
            return
        num_launched = len(self._works)
        left = [one for one in self.buckets[:num_launched] if one.flat._version == one.launched_at]
        left += self.buckets[num_launched:]
        if not all_zero(param for bucket in left for param in bucket.params):
            raise not_cleared("DDP", "model.zero_grad()", "an error in backward or in finish()")
        for work, bucket in zip(self._works, self.buckets, strict=False):
            work.wait()
            for param in bucket.params:
                param.grad = None
        self._begin_round()

    def _end_backward(self) -> None:
        self._busy = False

    def _mark_ready(self, number: int, index: int) -> None:
        """Copy a complete gradient into its bucket, and launch full buckets in their order."""
        if not self._busy:
            self._busy = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._own_grads.begin()
        if not self._syncs:
            return
        bucket = self.buckets[number]
        if index not in bucket.missing:
            bucket.launched_at = bucket.flat._version  # added to, not cleared
            raise CourseError(
                f"rank {dist.get_rank()}, DDP: need finish() after each backward; got a second "
                f"gradient for {bucket.names[index]} before it. Try model.finish(), or no_sync() "
                "around every backward but the last. (Checkpointing that reuses a parameter: try "
                "use_reentrant=False.)"
            )
        bucket.copy_grad(index)
        while self.overlap and len(self._works) < len(self.buckets):
            if self.buckets[len(self._works)].missing:
                break
            self._launch()

    def _launch(self) -> None:
        """Start the all_reduce of the next bucket: in the same order on every rank."""
        bucket = self.buckets[len(self._works)]
        self._works.append(self.comm_hook(bucket.flat, group_of(bucket.params[0], self.group)))
        bucket.launched_at = bucket.flat._version

    def _refuse_change(self, bucket: Bucket) -> NoReturn:
        raise CourseError(
            f"rank {dist.get_rank()}, DDP: need gradients that nobody changes while they are sent; "
            f"got a change in the bucket of {some_names(bucket.names)} since its launch. Try to "
            "change gradients after finish(), or by hooks registered before DDP(...)."
        )

    def _copy_remaining(self) -> list[bool]:
        """Copy the gradients that no hook has copied; return which parameters have one."""
        used, unused = [], []
        for bucket in self.buckets:
            for index, param in enumerate(bucket.params):
                used.append(param.grad is not None)
                optional = self.find_unused or not param.requires_grad  # frozen since
                if param.grad is None and not optional:
                    unused.append(bucket.names[index])
                elif index in bucket.missing:
                    bucket.copy_grad(index)
        attempt = "finish() after backward(), or DDP(..., find_unused=True) if a step skips them"
        require_gradients(unused, "DDP.finish", attempt)
        return used

    def _clear_unused(self, used: list[bool]) -> None:
        """Clear the gradients that no rank has computed, so that the optimizer skips them."""
        params = [param for bucket in self.buckets for param in bucket.params]
        for param, is_used in zip(params, used, strict=True):
            if not is_used:
                param.grad = None
