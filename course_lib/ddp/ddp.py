"""Data parallelism with buckets: gradients travel while backward still computes the others.

A hook tells when a parameter's gradient is there. Gradients are copied side by side into buckets,
the last layer's first, and a full bucket leaves at once as one all_reduce. After backward,
`finish` waits for what is under way, and every `param.grad` is the mean over the ranks, a view of
its bucket. Notebook 06_ddp.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.coalesced import broadcast_together
from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.ddp.buckets import Bucket, make_buckets


class Mean:
    """The mean over the group, in place: an all_reduce under way; `wait` ends it."""

    def __init__(self, flat: Tensor, group: Group) -> None:
        self.flat = flat
        self.p = dist.get_world_size(group)
        self.work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum, and divide it by the number of ranks."""
        self.work.wait()
        self.flat.div_(self.p)


class DDP(nn.Module):
    """`module` on every rank of a group, with gradients that are means over the group.

    model = DDP(module); loss_of(model(inputs)).backward(); model.finish(); optimizer.step()

    bucket_bytes       a bucket takes parameters up to this size; a larger one has its own
    overlap            send a bucket as soon as it is full; False: all of them in `finish`
    find_unused        a parameter without a gradient counts as zero; it keeps none if no rank used
                       it. Costs one small all_reduce more
    broadcast_buffers  before a forward pass in training, everybody gets the buffers of the group's
                       first rank; with accumulation once, after the step
    comm_hook          (flat, group) -> object whose wait() leaves the mean in flat; its method
                       `watch(buckets)`, if it has one, is called first. See ddp/comm_hooks.py

    Cost:    one all_reduce a bucket, of all trainable parameters' bytes together
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
        self.module, self.group, self.overlap = module, group or dist.group.WORLD, overlap
        self.find_unused, self.broadcast_buffers = find_unused, broadcast_buffers
        self.comm_hook = comm_hook or Mean
        self.buckets = make_buckets(module, bucket_bytes)
        if watch := getattr(comm_hook, "watch", None):
            watch(self.buckets)
        self._works: list[Any] = []  # one for each bucket that has left
        self._sync, self._buffers_differ = True, False
        broadcast_together([*module.parameters(), *module.buffers()], self.group)
        this = weakref.ref(self)  # a hook lives as long as its parameter: it must not keep us
        for number, bucket in enumerate(self.buckets):
            for index, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(partial(_arrived, this, number, index))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with the buffers of the group's first rank."""
        if self.broadcast_buffers and self.training and self._buffers_differ:
            broadcast_together(self.module.buffers(), self.group)
        self._buffers_differ = self._sync and torch.is_grad_enabled()  # when PyTorch thinks so too
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here only adds to `param.grad`; nothing is sent, and finish does nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not left, wait for all, and leave the means in `param.grad`."""
        if not self._sync:
            return
        try:
            used = self._take_the_rest()
            while len(self._works) < len(self.buckets):
                self._send()
            if self.find_unused and self.buckets:
                dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
            for work in self._works:
                work.wait()
            self._clear_unused(used)
        finally:
            self._works.clear()
            for bucket in self.buckets:
                bucket.missing = set(range(len(bucket.params)))

    def _arrive(self, bucket: Bucket, index: int) -> None:
        """A gradient is there; send all buckets that are full and whose turn it is."""
        if index not in bucket.missing:
            raise CourseError(
                f"rank {dist.get_rank()}, DDP: need finish() after each backward; got a second "
                f"gradient for {bucket.names[index]} before it. Try model.finish(), or no_sync() "
                "around every backward but the last. (Checkpointing that reuses a parameter: try "
                "use_reentrant=False. A module wrapped twice: try one DDP.)"
            )
        bucket.take(index)
        while self.overlap and len(self._works) < len(self.buckets):
            if self.buckets[len(self._works)].missing:
                break
            self._send()

    def _send(self) -> None:
        """Let the next bucket leave: on every rank they leave in the same order."""
        bucket = self.buckets[len(self._works)]
        self._works.append(self.comm_hook(bucket.flat, self.group))

    def _take_the_rest(self) -> Tensor:
        """Put into the buckets what no hook has brought; return 1 for each parameter in use."""
        used, unused = [], []
        for bucket in self.buckets:
            for index, param in enumerate(bucket.params):
                used.append(param.grad is not None)
                if param.grad is None:
                    unused.append(bucket.names[index])
                if index in bucket.missing and (self.find_unused or param.grad is not None):
                    bucket.take(index)
        if unused and not self.find_unused:
            raise CourseError(
                f"rank {dist.get_rank()}, DDP.finish: need a gradient for every parameter; got "
                f"none for {_some(unused)}. Try finish() after backward(), or "
                "DDP(..., find_unused=True) if the loss does not use them in every step."
            )
        device = self.buckets[0].flat.device if self.buckets else None
        return torch.tensor(used, dtype=torch.uint8, device=device)

    def _clear_unused(self, used: Tensor) -> None:
        """What no rank has used keeps no gradient, so that the optimizer leaves it alone."""
        params = [param for bucket in self.buckets for param in bucket.params]
        if self.find_unused:
            for param, flag in zip(params, used.tolist(), strict=True):
                if not flag:
                    param.grad = None


def _arrived(this: "weakref.ref[DDP]", number: int, index: int, param: Tensor) -> None:
    """The hook of one parameter, called each time backward has added to its `grad`."""
    model = this()
    if model is not None and model._sync:
        with torch.no_grad():
            model._arrive(model.buckets[number], index)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 5 else ""
    return ", ".join(names[:4] if more else names) + more
