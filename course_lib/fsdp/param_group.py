"""FSDP's parameter group: parameters of one kind, gathered and reduce-scattered together.

The whole parameters have memory only while they are needed: an all_gather fills it, and `free`
releases it (reshards). Tensors that autograd has saved are views of that memory, so they are valid
again after the next gather. Gradients are reduced by one reduce_scatter per parameter group.
Notebook 10_fsdp.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import GroupMember
from course_lib.core.errors import CourseError
from course_lib.zero.flat_layout import FlatLayout


@dataclass(eq=False)
class FoundParam:
    """A parameter with its unit and every module that owns it; tied ones have several names."""

    param: nn.Parameter
    unit: str
    owners: list[tuple[str, nn.Module, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Its names in the model, in the order of the modules."""
        return [name for name, _, _ in self.owners]


class FSDPParamGroup:
    """Parameters of one kind (dtype, trained or frozen) side by side; this rank owns a shard.

    shard      this rank's part in the parameters' own dtype, which the optimizer steps
               [padded_numel / p]
    whole      the parameters of all ranks in compute_dtype [padded_numel]; has no memory when freed
    params     what the modules compute with: views of `whole` while it is gathered, else empty
    flat_grad  all gradients side by side, during their reduce_scatter [padded_numel]
    kept_grad  whole gradients that no_sync has accumulated [padded_numel]
    missing    indices of the parameters whose gradient is not complete yet
    """

    def __init__(
        self,
        name: str,
        found: Sequence[FoundParam],
        member: GroupMember,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.name, self.member = name, member
        self.names = [one.names for one in found]
        first = found[0].param
        self.layout = FlatLayout.of([one.param for one in found], member.size)
        self.shard = nn.Parameter(
            _scatter_shard([one.param for one in found], self.layout, member, device),
            first.requires_grad,
        )
        casts = compute_dtype is not None and first.is_floating_point()
        dtype = compute_dtype if casts else first.dtype
        self.reduce_dtype = reduce_dtype or first.dtype
        self.whole = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        self.views = self.layout.views(self.whole)
        self.whole_bytes = self.whole.nbytes
        self.empty = self.whole.new_empty(0)
        self.params = [nn.Parameter(self.empty, first.requires_grad) for _ in found]
        for one, param in zip(found, self.params, strict=True):
            for _, module, attribute in one.owners:
                setattr(module, attribute, param)
        self.missing = set(range(len(found)))
        self.gathering: Any = None
        self.reducing: tuple[Any, Tensor] | None = None
        self.flat_grad: Tensor | None = None
        self.kept_grad: Tensor | None = None
        self.version = -1  # of the shard when it was gathered
        self.free()

    @property
    def is_whole(self) -> bool:
        """Whether `whole` has memory: it is gathered, or its all_gather is in flight."""
        return self.whole.untyped_storage().nbytes() > 0

    def start_gather(self) -> None:
        """Launch the all_gather, unless `whole` is gathered and the shard has not changed since.

        Shapes:  [padded_numel / p] -> [padded_numel]
        Cost:    one all_gather: (p-1)/p * whole bytes sent per rank
        """
        if self.is_whole and self.version == self.shard._version:
            return
        self.wait_gather()
        self.whole.untyped_storage().resize_(self.whole_bytes)
        whole = self.whole.data  # for autograd nothing changes: the same numbers come back
        own = whole[self.layout.shard_slice(self.member.rank)]  # [padded_numel / p]
        own.copy_(self.shard.detach())  # rounds to compute_dtype
        self.gathering = dist.all_gather_single(whole, own, self.member.group, async_op=True)
        self.version = self.shard._version

    def wait_gather(self) -> None:
        """Wait for the all_gather; the parameters are then views of `whole`."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            for param, view in zip(self.params, self.views, strict=True):
                param.data = view

    def free(self) -> None:
        """Free (reshard) `whole`; the parameters are empty until the next gather."""
        self.wait_gather()
        for param in self.params:
            param.data = self.empty
        self.whole.untyped_storage().resize_(0)

    def collect(self) -> None:
        """Copy all gradients side by side; missing ones and the padding are zero."""
        flat = self.whole.new_empty(self.layout.padded_numel, dtype=self.reduce_dtype)
        flat[self.layout.numel :] = 0
        for index, view in enumerate(self.layout.views(flat)):
            self._copy_grad(index, view)
        if self.kept_grad is not None:
            flat += self.kept_grad
        self.flat_grad, self.kept_grad = flat, None

    def drop_grads(self) -> None:
        """Free the parameters' own gradients, and wait for the next ones."""
        self.missing = set(range(len(self.params)))
        for param in self.params:
            param.grad = None

    def keep(self) -> None:
        """Keep the whole gradient on this rank until a later backward reduces it."""
        self.kept_grad, self.flat_grad = self.flat_grad, None

    def start_reduce(self) -> None:
        """Launch the reduce_scatter of the gradients: every rank receives its shard of the sum.

        Shapes:  [padded_numel] -> [padded_numel / p]
        Cost:    one reduce_scatter: (p-1)/p * bytes in reduce_dtype sent per rank
        """
        flat, group = self.flat_grad, self.member.group
        if flat is not None:
            out = flat.new_empty(self.layout.shard_numel)
            self.reducing = dist.reduce_scatter_single(out, flat, group=group, async_op=True), out

    def wait_reduce(self) -> None:
        """Wait for the sum, and add the mean to the gradient of the shard."""
        if self.reducing is not None:
            work, out = self.reducing
            work.wait()
            mean = out.div_(self.member.size).to(self.shard.dtype)
            if self.shard.grad is None:
                self.shard.grad = mean
            else:
                self.shard.grad += mean
            self.reducing = self.flat_grad = None

    def has_grads(self) -> bool:
        """Return whether a parameter has a gradient that has not been collected."""
        return any(param.grad is not None for param in self.params)

    def _copy_grad(self, index: int, view: Tensor) -> None:
        grad = self.params[index].grad
        if grad is not None and grad.is_sparse:
            raise CourseError(
                f"FSDP: need dense gradients; got a sparse one for {self.names[index][0]}. "
                "Try sparse=False in its nn.Embedding."
            )
        view.zero_() if grad is None else view.copy_(grad)


def _scatter_shard(
    params: Sequence[Tensor], layout: FlatLayout, member: GroupMember, device: torch.device
) -> Tensor:
    """Return this rank's shard of the parameters of the group's first rank.

    Shapes:  those of the layout -> [padded_numel / p]
    """
    shard = torch.empty(layout.shard_numel, dtype=params[0].dtype, device=device)
    first = member.global_rank(0)
    if member.rank != 0:
        dist.scatter(shard, None, first, member.group)
        return shard
    if any(param.is_meta for param in params):
        raise CourseError(
            f"rank {first}, FSDP: need weights on the group's first rank; got shapes only. "
            'Try torch.device("meta") on the other ranks alone.'
        )
    shards = layout.flatten(params).view(member.size, -1)
    dist.scatter(shard, list(shards), first, member.group)
    return shard
