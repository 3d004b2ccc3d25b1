"""The flat buffer of FSDP: parameters side by side, of which a rank owns a shard.

The whole param_group has bytes only while it is needed: an all_gather fills it, and `free` gives the bytes
back. The tensors that look at it stay, so what autograd has saved is right again as soon as the param_group
is. Gradients go the other way: one reduce_scatter a param_group. Notebook 10_fsdp.
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
class Found:
    """A parameter, and every module that holds it: tied ones have several names."""

    param: nn.Parameter
    unit: str
    places: list[tuple[str, nn.Module, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Its names in the model, the first one first."""
        return [name for name, _, _ in self.places]


class FSDPParamGroup:
    """Parameters of one kind (dtype, trained or frozen) side by side; this rank owns a shard.

    shard    this rank's numbers, in the parameters' own dtype: what the optimizer steps
    whole    the numbers of all ranks in compute_dtype, or no bytes at all
    params   what the modules compute with: views of `whole` while it is there, else empty
    """

    def __init__(
        self,
        name: str,
        found: Sequence[Found],
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
            _dealt([one.param for one in found], self.layout, member, device), first.requires_grad
        )
        casts = compute_dtype is not None and first.is_floating_point()
        dtype = compute_dtype if casts else first.dtype
        self.reduce_dtype = reduce_dtype or first.dtype
        self.whole = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        self.views = self.layout.views(self.whole)
        self.whole_bytes = self.whole.nbytes
        self.nothing = self.whole.new_empty(0)
        self.params = [nn.Parameter(self.nothing, first.requires_grad) for _ in found]
        for one, param in zip(found, self.params, strict=True):
            for _, module, attribute in one.places:
                setattr(module, attribute, param)
        self.missing = set(range(len(found)))  # whose gradients backward has not brought yet
        self.gathering: Any = None
        self.reducing: tuple[Any, Tensor] | None = None
        self.flat_grad: Tensor | None = None  # all gradients in one param_group, on their way
        self.kept_grad: Tensor | None = None  # those of micro-batches that were not sent
        self.version = -1
        self.free()

    @property
    def is_whole(self) -> bool:
        """Has `whole` its bytes, or are they on their way?"""
        return self.whole.untyped_storage().nbytes() > 0

    def start_gather(self) -> None:
        """Let the all_gather leave, unless everything is there and no shard has changed since."""
        if self.is_whole and self.version == self.shard._version:
            return
        self.wait_gather()
        self.whole.untyped_storage().resize_(self.whole_bytes)
        whole = self.whole.data  # for autograd nothing changes: the same numbers come back
        mine = whole[self.layout.shard_slice(self.member.rank)]
        mine.copy_(self.shard.detach())  # and rounds to compute_dtype
        self.gathering = dist.all_gather_single(whole, mine, self.member.group, async_op=True)
        self.version = self.shard._version

    def wait_gather(self) -> None:
        """Wait for what is under way, and show the parameters."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            for param, view in zip(self.params, self.views, strict=True):
                param.data = view

    def free(self) -> None:
        """Give the bytes of the whole param_group back; the parameters are empty until the next gather."""
        self.wait_gather()
        for param in self.params:
            param.data = self.nothing
        self.whole.untyped_storage().resize_(0)

    def collect(self) -> None:
        """Copy all gradients side by side; what has none counts as zero, and so does the tail."""
        flat = self.whole.new_empty(self.layout.padded_numel, dtype=self.reduce_dtype)
        flat[self.layout.numel :] = 0
        for index, view in enumerate(self.layout.views(flat)):
            self._copy_grad(index, view)
        if self.kept_grad is not None:
            flat += self.kept_grad
        self.flat_grad, self.kept_grad = flat, None

    def drop_grads(self) -> None:
        """The parameters' own gradients are in the param_group now; the next ones are awaited."""
        self.missing = set(range(len(self.params)))
        for param in self.params:
            param.grad = None

    def keep(self) -> None:
        """Hold the whole gradient here, for a later backward that sends it along."""
        self.kept_grad, self.flat_grad = self.flat_grad, None

    def start_reduce(self) -> None:
        """Let the gradients leave: every rank gets its shard of their sum."""
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
        """Has backward brought any gradient that is not in the param_group yet?"""
        return any(param.grad is not None for param in self.params)

    def _copy_grad(self, index: int, view: Tensor) -> None:
        grad = self.params[index].grad
        if grad is not None and grad.is_sparse:
            raise CourseError(
                f"FSDP: need dense gradients; got a sparse one for {self.names[index][0]}. "
                "Try sparse=False in its nn.Embedding."
            )
        view.zero_() if grad is None else view.copy_(grad)


def _dealt(
    params: Sequence[Tensor], layout: FlatLayout, member: GroupMember, device: torch.device
) -> Tensor:
    """This rank's shard of the values that the group's first rank has."""
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
