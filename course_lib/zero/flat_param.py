"""The flat parameter: parameters side by side in one tensor, of which every rank owns a shard.

`param.data` is a view of the flat tensor, so the model computes as before. The optimizer steps
`masters`: this rank's pieces of the shard, or of an fp32 copy of it where parameters are in 16
bits. Gradients are reduce-scattered from a buffer of the same layout, and new parameters are
all-gathered. With `keep_only_shard` (stage 3) the flat tensor has no memory except between `gather`
and `free`. Notebook 09_zero.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group, group_of
from course_lib.core.call_names import call_for
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import mark_split
from course_lib.data_parallel.gradients import NotCopied, need_dense
from course_lib.data_parallel.guarded import guard
from course_lib.zero.flat_layout import FlatLayout, Piece
from course_lib.zero.guards import Away, ZeROParameter
from course_lib.zero.offload import Offload

FULL = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class PendingReduceScatter:
    """A launched reduce_scatter: whole gradients in, this rank's shard of their sum out."""

    input: Tensor  # [padded_numel]
    output: Tensor  # [padded_numel / p]
    work: dist.Work


class FreedParam(Away, ZeROParameter):
    """A parameter that has no memory: whatever computes with it is told so."""

    needs = (
        "ZeRO3: need a parameter that is gathered; got one that is freed between uses of its "
        "module. Try engine.full_state_dict() to save or copy; for an L2 term the optimizer's "
        "weight_decay, or ZeRO2."
    )

    @property
    def is_part(self) -> bool:
        """True, also without an engine that could gather it."""
        return True


class FlatParam(NotCopied):
    """Parameters of one dtype, side by side; every rank of the group owns an equal shard.

    flat         the parameters, padded with zeros [padded_numel]
    shard        this rank's part [padded_numel / p]: a view of `flat`, or with `keep_only_shard`
                 a tensor of its own
    grad_shard   this rank's part of the mean gradient [padded_numel / p]; None before there is one
    buffer       accumulated gradients before their reduce_scatter [padded_numel], or None
    used         indices of the parameters that have a gradient
    arrived      indices of the parameters whose gradient backward has computed in this round
    missing      indices of the parameters whose gradient is not in `buffer` yet
    stepped      the optimizer has used the gradients, and nobody has cleared them since
    """

    copy_instead = "full_state_dict(), loaded into another model"

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], group: Group) -> None:
        self.names, self.params = [name for name, _ in named], [param for _, param in named]
        group = group_of(self.params[0], group)
        self.group, self.p, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.layout = FlatLayout.of(self.params, self.p)
        self.shard_slice, self.pieces = self.layout.shard_slice(rank), self.layout.pieces(rank)
        self.flat = self.layout.flatten(self.params)
        self.views = self.layout.views(self.flat)
        self.shard = self.flat[self.shard_slice]
        self.only_shard = False
        self.offload: Offload | None = None
        self._set_views()
        self.master, self.masters = self.shard, list[Tensor]()
        self._versions: list[int] = []  # of the parameters when the masters followed them
        self.buffer: Tensor | None = None
        self.pending: PendingReduceScatter | None = None
        self.grad_shard: Tensor | None = None
        self.used, self.arrived = set[int](), set[int]()
        self.missing, self.stepped = set(range(len(self.params))), False

    # --- parameters

    def _set_views(self) -> None:
        for param, view in zip(self.params, self.views, strict=True):
            if isinstance(param, FreedParam):
                param.__class__ = ZeROParameter  # type: ignore[assignment]
            param.data = view

    def keep_only_shard(self, offload: Offload | None) -> None:
        """Keep only the shard from now on, on the host if it is offloaded."""
        self.only_shard, self.offload = True, offload
        for param in self.params:
            mark_split(param, "ZeRO3", dist.get_process_group_ranks(self.group))
        self.shard = self.master = offload.copy_of(self.shard) if offload else self.shard.clone()
        self.free()

    def free(self) -> None:
        """Free the memory of the whole parameters, also of the views that autograd has saved."""
        if self.only_shard:
            self.flat.untyped_storage().resize_(0)
            for param in self.params:
                param.data = self.flat.new_empty(0)
                guard(param, FreedParam)  # using it now is an error, not a wrong number

    @property
    def is_free(self) -> bool:
        """Whether the whole parameters have no memory."""
        return self.flat.untyped_storage().nbytes() == 0

    def gather(self) -> None:
        """Gather the shards of all ranks into `flat`; the parameters are views of it again.

        Shapes:  [padded_numel / p] -> [padded_numel]
        Cost:    one all_gather: (p-1)/p * padded bytes sent per rank
        """
        shard = self.shard
        if self.only_shard:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            with self._transfer("params to the device", shard.nbytes):
                shard = shard.to(self.flat.device, copy=bool(self.offload))
        with call_for(self.names[0]):
            dist.all_gather_single(self.flat, shard, group=self.group)
        self._set_views()

    def check_views(self) -> None:
        """Check that every parameter is still a view of `flat`.

        Raises:  CourseError if one was given other memory
        """
        for param, view, name in zip(self.params, self.views, self.names, strict=True):
            if not self.is_free and param.data_ptr() != view.data_ptr():
                raise CourseError(
                    f"rank {dist.get_rank()}, ShardedOptimizer: need parameters that stay views of "
                    f"their flat parameter; {name} has moved. "
                    "Try model.to(...) before the optimizer is made."
                )

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy these values into the parameters, the shard and the masters."""
        flat = self.layout.flatten([tensor.to(self.flat) for tensor in tensors])  # [padded_numel]
        self.shard.copy_(flat[self.shard_slice])
        if not self.only_shard:
            self.flat.copy_(flat)
        self.copy_params_to_masters()

    # --- what the optimizer steps

    def make_masters(self, offload: Offload | None) -> list[Tensor]:
        """Return this rank's pieces of the shard, or of its copy in fp32 or on the host.

        A piece is a tensor of its own, so that a parameter without a gradient can be skipped.
        """
        shard, self.offload = self.shard, offload
        self.master = shard if shard.dtype in FULL else shard.float()
        if offload and not self.only_shard:
            self.master = offload.copy_of(self.master)
        self.masters = [piece.within(self.master) for piece in self.pieces]
        self._versions = [param._version for param in self.params]
        return self.masters

    @property
    def has_fp32_master(self) -> bool:
        """Whether the master is a copy of the shard in a wider dtype."""
        return self.master.dtype != self.flat.dtype

    @property
    def holds_grads(self) -> bool:
        """Whether a part of the mean gradient is here, which `param.grad` does not show."""
        return any(one is not None for one in (self.grad_shard, self.buffer, self.pending))

    def follow_params(self) -> None:
        """Take over what others than the optimizer have written into parameters since last time.

        Only numbers that differ from the rounded master's: the others keep what is rounded away.
        """
        versions = [param._version for param in self.params]
        if versions == self._versions or self.only_shard or self.master is self.shard:
            return
        for piece, master in zip(self.pieces, self.masters, strict=True):
            if versions[piece.index] != self._versions[piece.index]:
                now = piece.within(self.shard).to(master.device)
                changed = now != master.to(now.dtype)
                master.copy_(torch.where(changed, now.to(master.dtype), master))
        self._versions = versions

    def copy_params_to_masters(self) -> None:
        """Set the masters to the values of the parameters."""
        if self.masters:
            self.master.copy_(self.shard)

    def grads(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yield this rank's piece of each gradient that exists."""
        for piece in self.pieces:
            whole = self.params[piece.index].grad
            if self.grad_shard is None and whole is not None:
                yield piece, piece.of(whole)
            elif self.grad_shard is not None and piece.index in self.used:
                yield piece, piece.within(self.grad_shard)

    def all_grads(self) -> list[Tensor]:
        """Return the gradients on this rank: the shard, or the parameters' whole ones."""
        if self.grad_shard is not None:
            return [self.grad_shard]
        return [param.grad for param in self.params if param.grad is not None]

    def copy_grads_to_masters(self) -> None:
        """Set the gradients of the masters; a master without one is not stepped."""
        grads, self.stepped = dict(self.grads()), True
        with self._transfer("grads to the host", sum(grad.nbytes for grad in grads.values())):
            for piece, master in zip(self.pieces, self.masters, strict=True):
                grad = grads.get(piece)
                master.grad = None if grad is None else grad.to(master, copy=bool(self.offload))

    def copy_masters_to_params(self) -> None:
        """Round the stepped masters into the shard, and gather unless only shards are kept."""
        for master in self.masters:
            master.grad = None
        if self.only_shard:
            self.shard.copy_(self.master)  # the same tensor, or one on the same device
            return
        with self._transfer("params to the device", self.shard.nbytes):
            self.shard.copy_(self.master)
        self.gather()

    def _transfer(self, what: str, num_bytes: int) -> AbstractContextManager[None]:
        return self.offload.transfer(what, num_bytes) if self.offload else nullcontext()

    # --- gradients

    def accumulate(self, index: int) -> None:
        """Add a parameter's gradient to the buffer, and free `param.grad`."""
        buffer = self._open_buffer()
        param, start = self.params[index], self.layout.starts[index]
        if param.grad is not None:
            need_dense(param.grad, self.names[index], "ZeRO")
            buffer[start : start + param.grad.numel()].add_(param.grad.reshape(-1))
            param.grad = None
        elif index in self.arrived:
            raise CourseError(
                f"rank {dist.get_rank()}, ZeRO: need gradients that stay until engine.step(); got "
                f"none for {self.names[index]}, which backward had computed. Try no hook that "
                "clears it, and engine.zero_grad() for gradients that nobody wants."
            )
        self.missing.discard(index)

    def _open_buffer(self) -> Tensor:
        if self.buffer is None:
            self.buffer = self.flat.new_zeros(self.layout.padded_numel)  # [padded_numel]
        return self.buffer

    def launch_reduce_scatter(self) -> None:
        """Start to sum the buffer over the ranks; each rank receives its shard of the sum.

        Shapes:  [padded_numel] -> [padded_numel / p]
        Cost:    one reduce_scatter: (p-1)/p * padded bytes sent per rank
        """
        for index in sorted(self.missing):
            self.accumulate(index)
        self.missing, self.arrived = set(range(len(self.params))), set()
        whole, self.buffer = self._open_buffer(), None
        shard = self.flat.new_empty(self.layout.shard_numel)  # [padded_numel / p]
        with call_for(self.names[0]):
            work = dist.reduce_scatter_single(shard, whole, group=self.group, async_op=True)
        self.pending = PendingReduceScatter(whole, shard, work)

    def wait_reduce_scatter(self) -> None:
        """Wait for the sum, add the mean to `grad_shard`, and free the whole gradient."""
        if self.pending is None:
            return
        self.pending.work.wait()
        mean = self.pending.output.div_(self.p)
        self.grad_shard = mean if self.grad_shard is None else self.grad_shard.add_(mean)
        self.pending = None

    def clear_grads(self, *, to_zeros: bool = False) -> None:
        """Free the gradient shard and the buffer; a reduce_scatter in flight is discarded.

        With to_zeros a gradient that existed is zero: its parameter is stepped all the same.
        """
        if self.pending is not None:
            self.pending.work.wait()
        self.used = self.used if to_zeros else set()
        self.grad_shard = self.flat.new_zeros(self.layout.shard_numel) if self.used else None
        self.buffer, self.pending, self.arrived = None, None, set()
        self.missing, self.stepped = set(range(len(self.params))), False
