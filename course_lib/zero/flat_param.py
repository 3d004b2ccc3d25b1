"""Parameters in one flat parameter, and what a rank owns of it: a shard of each kind of state.

`param.data` is a view of the flat_param, so the model computes as before. The optimizer steps `masters`:
this rank's pieces of the flat_param, or of an fp32 copy where parameters are in 16 bits. Gradients leave
by reduce_scatter, and new parameters come back by all_gather. A flat_param may give up its parameters too:
then nothing is left but the shard, until `gather`. Notebook 09_zero.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.zero.flat_layout import FlatLayout, Piece
from course_lib.zero.offload import Offload

FULL = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Sending:
    """A reduce_scatter under way: whole gradients leave, this rank's shard of their sum arrives."""

    leaving: Tensor
    arriving: Tensor
    work: dist.Work


class FlatParam:
    """Parameters of one dtype, side by side; every rank of the group owns an equal shard.

    shard        this rank's parameters: a view of `flat`, or, once `keep_only_shard` was called, all that
                 is kept of them between two uses
    grad_shard   this rank's part of the mean gradient; None before there is one
    used         numbers of the parameters that have a gradient
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], group: Group) -> None:
        self.names, self.params = [name for name, _ in named], [param for _, param in named]
        self.group, self.p, me = group, dist.get_world_size(group), dist.get_rank(group)
        self.layout = FlatLayout.of(self.params, self.p)
        self.mine, self.pieces = self.layout.shard_slice(me), self.layout.pieces(me)
        self.flat = self.layout.flatten(self.params)
        self.views = self.layout.views(self.flat)
        self.shard = self.flat[self.mine]
        self.only_shard = False
        self.offload: Offload | None = None
        self._place()
        self.master, self.masters = self.shard, list[Tensor]()
        self.buffer: Tensor | None = None  # gradients that wait, laid out like the flat_param
        self.sending: Sending | None = None
        self.grad_shard: Tensor | None = None
        self.used: set[int] = set()
        self.missing = set(range(len(self.params)))

    # --- parameters

    def _place(self) -> None:
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view

    def keep_only_shard(self, offload: Offload | None) -> None:
        """From now on keep only the shard: on the host, if it is offloaded."""
        self.only_shard, self.offload = True, offload
        self.shard = self.master = offload.hold(self.shard) if offload else self.shard.clone()
        self.free()

    def free(self) -> None:
        """Let go of the parameters' memory. What autograd keeps are views of it: it goes too."""
        if self.only_shard:
            self.flat.untyped_storage().resize_(0)
            for param in self.params:
                param.data = param.new_empty(0)  # who uses it now gets an error, not old numbers

    @property
    def is_free(self) -> bool:
        """Are the parameters away?"""
        return self.flat.untyped_storage().nbytes() == 0

    def gather(self) -> None:
        """Put the shards of all ranks together in the flat_param; the parameters are views of it.

        Cost:    one all_gather: (p-1)/p * flat_param bytes sent per rank
        """
        shard = self.shard
        if self.only_shard:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            with self._trip("params to the device", shard.nbytes):
                shard = shard.to(self.flat.device, copy=bool(self.offload))
        dist.all_gather_single(self.flat, shard, group=self.group)
        self._place()

    def check_place(self) -> None:
        """Raises: CourseError if somebody gave a parameter other memory."""
        for param, view, name in zip(self.params, self.views, self.names, strict=True):
            if not self.is_free and param.data_ptr() != view.data_ptr():
                raise CourseError(
                    f"rank {dist.get_rank()}, ShardedOptimizer: need parameters that stay in their "
                    f"flat parameters; {name} has moved. Try model.to(...) before the optimizer is made."
                )

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Take these values for the parameters."""
        like = [tensor.to(self.flat) for tensor in tensors]
        flat = self.layout.flatten(like)
        self.shard.copy_(flat[self.mine])
        if not self.only_shard:
            self.flat.copy_(flat)
        self.refresh()

    # --- what the optimizer steps

    def make_masters(self, offload: Offload | None) -> list[Tensor]:
        """This rank's pieces, one a parameter: of the shard, or of a copy in fp32 or on the host.

        A piece is a tensor of its own, so that a parameter without a gradient can be left out.
        """
        shard, self.offload = self.shard, offload
        self.master = shard if shard.dtype in FULL else shard.float()
        if offload and not self.only_shard:
            self.master = offload.hold(self.master)
        self.masters = [piece.within(self.master) for piece in self.pieces]
        return self.masters

    def refresh(self) -> None:
        """Let the masters be what the parameters are."""
        if self.masters:
            self.master.copy_(self.shard)

    def grads(self) -> Iterator[tuple[Piece, Tensor]]:
        """This rank's pieces of the gradient, where there is one."""
        for piece in self.pieces:
            whole = self.params[piece.index].grad
            if self.grad_shard is None and whole is not None:
                yield piece, piece.of(whole)
            elif self.grad_shard is not None and piece.index in self.used:
                yield piece, piece.within(self.grad_shard)

    def all_grads(self) -> list[Tensor]:
        """The gradients of the flat_param that this rank holds: its shard, or whole ones."""
        if self.grad_shard is not None:
            return [self.grad_shard]
        return [param.grad for param in self.params if param.grad is not None]

    def copy_grads_to_masters(self) -> None:
        """Give the masters their gradients; those without one are not stepped."""
        grads = dict(self.grads())
        with self._trip("grads to the host", sum(grad.nbytes for grad in grads.values())):
            for piece, master in zip(self.pieces, self.masters, strict=True):
                grad = grads.get(piece)
                master.grad = None if grad is None else grad.to(master, copy=bool(self.offload))

    def copy_masters_to_params(self) -> None:
        """Round the stepped masters into the shard; unless only shards are kept, gather them."""
        for master in self.masters:
            master.grad = None
        if self.only_shard:
            self.shard.copy_(self.master)  # itself, or beside it on the same device
            return
        with self._trip("params to the device", self.shard.nbytes):
            self.shard.copy_(self.master)
        self.gather()

    def _trip(self, what: str, num_bytes: int) -> AbstractContextManager[None]:
        return self.offload.trip(what, num_bytes) if self.offload else nullcontext()

    # --- gradients

    def take(self, index: int) -> None:
        """Add a parameter's gradient to the buffer, and let `param.grad` go."""
        buffer = self._open_buffer()
        param, start = self.params[index], self.layout.starts[index]
        if param.grad is not None:
            if param.grad.is_sparse:
                raise CourseError(
                    f"ZeRO: need dense gradients; got a sparse one for {self.names[index]}. "
                    "Try sparse=False in its nn.Embedding."
                )
            buffer[start : start + param.grad.numel()].add_(param.grad.reshape(-1))
            param.grad = None
        self.missing.discard(index)

    def _open_buffer(self) -> Tensor:
        if self.buffer is None:
            self.buffer = self.flat.new_zeros(self.layout.padded_numel)
        return self.buffer

    def send(self) -> None:
        """Let the buffer leave: each rank gets its shard of the sum over the ranks.

        Cost:    one reduce_scatter: (p-1)/p * flat_param bytes sent per rank
        """
        for index in sorted(self.missing):
            self.take(index)
        self.missing = set(range(len(self.params)))
        leaving, self.buffer = self._open_buffer(), None
        arriving = self.flat.new_empty(self.layout.shard_numel)
        work = dist.reduce_scatter_single(arriving, leaving, group=self.group, async_op=True)
        self.sending = Sending(leaving, arriving, work)

    def settle(self) -> None:
        """Wait for the sum, and add the mean to `grad_shard`; the whole gradient is gone."""
        if self.sending is None:
            return
        self.sending.work.wait()
        mean = self.sending.arriving.div_(self.p)
        self.grad_shard = mean if self.grad_shard is None else self.grad_shard.add_(mean)
        self.sending = None

    def clear_grads(self) -> None:
        """No gradient any more."""
        self.grad_shard, self.buffer, self.used = None, None, set()
        self.missing = set(range(len(self.params)))
