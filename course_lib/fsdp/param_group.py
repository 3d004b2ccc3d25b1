"""FSDP's parameter group: a unit's parameters, each sharded on dim 0, that communicate together.

All shards of a rank are copied side by side into one buffer for one all_gather, and copied out to
whole parameters behind it; one reduce_scatter does the same for gradients, the other way. Whole
parameters have memory only while they are needed: tensors that autograd has saved are views of it,
so they are valid again after the next gather. Notebook 10_fsdp.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.call_names import call_for
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import mark_split
from course_lib.data_parallel.gradients import accumulate, need_dense
from course_lib.data_parallel.guarded import ReplacedParameter, guard
from course_lib.fsdp.dim0_layout import Dim0Layout, columns
from course_lib.fsdp.kept_grads import KeptGrads, is_negative_zero
from course_lib.fsdp.mesh import ShardingGroups
from course_lib.fsdp.mixed_precision import MixedPrecisionPolicy
from course_lib.ranks.world import is_dry
from course_lib.zero.guards import (
    AwayParam,
    FSDPGrad,
    FSDPShard,
    refuse_gradient,
)


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

    def replace(self, param: nn.Parameter) -> None:
        """Let all owners use another parameter in its place."""
        self.param = param
        for _, module, attribute in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = param  # the same, in a tenth of the time
            else:  # an LSTM keeps lists of its weights
                setattr(module, attribute, param)


class FSDPParamGroup:
    """The parameters of a unit; this rank owns a shard of each.

    shards      this rank's shards in the parameters' own dtypes, which the optimizer steps;
                modules have them whenever the unit is not gathered, but in forward
    away        what modules have instead in forward, so that nobody computes with shards
    params      whole parameters in param_dtype, which modules have while it is gathered
    whole       the memory of `params`, in bytes; emptied when they are freed
    gathered    every rank's slots, in bytes, during an all_gather [p, row_bytes]
    kept_part   a part of `whole`, where only some ranks gather it again for backward
    flat_grad   every rank's slots of the gradients, during a reduce_scatter [p, numbers]
    reduced     this rank's slots of their sum [numbers]
    kept_grads  whole gradients that no_sync has accumulated, by index
    missing     indices of the parameters whose gradient is not complete yet
    stays       `free` does nothing
    """

    def __init__(
        self,
        name: str,
        found: Sequence[FoundParam],
        groups: ShardingGroups,
        policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> None:
        self.name, self.found, self.groups, self.member = name, found, groups, groups.shard
        self.policy, self.stays = policy, False
        self.names = [one.names for one in found]
        self.layouts = [Dim0Layout(tuple(one.param.shape), self.member.size) for one in found]
        self.shards = [
            _scatter_shard(one.param, layout, groups, device)
            for one, layout in zip(found, self.layouts, strict=True)
        ]
        own = [shard.dtype for shard in self.shards]
        dtypes = [policy.param_dtype or one if one.is_floating_point else one for one in own]
        self._columns, self.row_bytes = columns(self.layouts, dtypes)
        self.whole = torch.empty(
            self.row_bytes * self.member.size, dtype=torch.uint8, device=device
        )
        self._whole_slots = self._slots_in_whole()
        self.params = [
            nn.Parameter(layout.whole_in(slots.flatten()).data, shard.requires_grad)
            for layout, slots, shard in zip(
                self.layouts, self._whole_slots, self.shards, strict=True
            )
        ]
        self.whole.untyped_storage().resize_(0)
        self._set_trained()
        self.gathering: Any = None
        self.gathered: Tensor | None = None
        self.kept_part: Tensor | None = None
        self.reducing: Any = None
        self.flat_grad: Tensor | None = None
        self.reduced: Tensor | None = None
        self.kept_grads = KeptGrads([names[0] for names in self.names], self.shards)
        self.absent: set[int] = set()
        self.version = -1  # of the shards when they were gathered
        self.away: list[nn.Parameter] = [AwayParam(shard.detach(), False) for shard in self.shards]
        if groups.num_ranks > 1:
            first = [names[0] for names in self.names]
            self._accumulators = [*map(refuse_gradient, self.shards, first)]
        self._idle = self.shards  # what modules have when the unit is not gathered
        self._register(self.shards)

    # --- parameters

    @property
    def is_whole(self) -> bool:
        """Whether `whole` has memory, or an all_gather is in flight."""
        return self.gathering is not None or self.whole.untyped_storage().nbytes() > 0

    def begin_forward(self) -> None:
        """Free what a forward without a backward has left, and follow requires_grad_() since then.

        It may be that of a shard, or of a whole parameter where such a forward has left one.
        """
        self.free()
        self.kept_part = None
        flags = [shard.requires_grad for shard in self.shards]
        if not flags == self._flags == [param.requires_grad for param in self.params]:
            for shard, param, before in zip(self.shards, self.params, self._flags, strict=True):
                if param.requires_grad != before:
                    shard.requires_grad_(param.requires_grad)
                param.requires_grad_(shard.requires_grad)
            self._set_trained()
        self._idle = self.away if self.groups.num_ranks > 1 else self.shards
        if not self.is_whole:
            self._register(self._idle)

    def end_forward(self) -> None:
        """Give the modules the shards again, which a parameter list of theirs should show."""
        self._idle = self.shards
        if self.gathering is not None or not self.is_whole:
            self._register(self.shards)

    def _set_trained(self) -> None:
        self._flags = [shard.requires_grad for shard in self.shards]
        self.trained = [index for index, trains in enumerate(self._flags) if trains]
        own = [self.shards[index].dtype for index in self.trained] or [torch.float32]
        self.reduce_dtype = self.policy.reduce_dtype or reduce(torch.promote_types, own)
        self.missing = set(self.trained)

    def start_gather(self) -> None:
        """Launch the all_gather, unless the unit is gathered and no shard has changed since.

        Shapes:  each shard -> its slot in [row_bytes] -> [p, row_bytes]
        Cost:    one all_gather: (p-1)/p * whole bytes sent per rank
        """
        if self.is_whole and not self.has_changed():
            return
        self.wait_gather()
        if self.kept_part is not None and self.groups.part and not self.has_changed():
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            with self._calls():
                self.gathering = dist.all_gather_single(
                    self.whole, self.kept_part, self.groups.part.group, async_op=True
                )
            return
        self.version = self._shard_version()
        self.gathered = self.whole.new_empty(self.member.size, self.row_bytes)
        own = self.gathered[self.member.rank]
        for slots, shard in zip(self._slots_in(own[None]), self.shards, strict=True):
            slots[0, : shard.numel()].copy_(shard.detach().flatten())  # rounds to param_dtype
        with self._calls():
            self.gathering = dist.all_gather_single(
                self.gathered.view(-1), own, self.member.group, async_op=True
            )

    def wait_gather(self) -> None:
        """Wait for the all_gather; the modules then use the whole parameters."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = self.kept_part = None
            if self.gathered is not None:
                self.copy_out()
                self.gathered = None
            self._register(self.params)

    def copy_out(self) -> None:
        """Copy all ranks' slots out of the message, so that each parameter lies in one piece.

        Shapes:  [p, row_bytes] -> those of the parameters
        """
        if self.gathered is not None:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            for out, slots in zip(self._whole_slots, self._slots_in(self.gathered), strict=True):
                out.copy_(slots)

    def keep_part(self) -> None:
        """Keep 1/k of `whole`, where k ranks gather it again for backward."""
        part = self.groups.part
        if part is not None:
            self.kept_part = self.whole.view(part.size, -1)[part.rank].clone()

    def free(self) -> None:
        """Free (reshard) the whole parameters; the modules use the shards again."""
        self.wait_gather()
        if self.is_whole and not self.stays:
            self.whole.untyped_storage().resize_(0)
            self._register(self._idle)

    def has_changed(self) -> bool:
        """Return whether a shard has been changed in place since the last gather."""
        return self.version != self._shard_version()

    # --- gradients

    def has_grads(self) -> bool:
        """Return whether a parameter has a gradient that has not been reduced."""
        return bool(self.kept_grads) or any(param.grad is not None for param in self.params)

    def keep(self) -> None:
        """Keep whole gradients on this rank, in reduce_dtype, until a later backward."""
        self.kept_grads.drop_cleared()
        for index in self.trained:
            grad = self._grad(index)
            if grad is not None:
                self.kept_grads.keep(index, grad.to(self.reduce_dtype))

    def collect(self) -> None:
        """Copy all gradients to the slots of the ranks that own their shards.

        A missing gradient counts as -0.0, the only number that adds nothing to any other, 0.0
        included: a sum is -0.0 only if no rank had a gradient. Slots of others do not begin so.

        Shapes:  those of the parameters -> [p, numbers]
        """
        self.kept_grads.drop_cleared()
        sizes = [self.layouts[index].slot_numel for index in self.trained]
        flat = self.whole.new_empty(self.member.size, sum(sizes), dtype=self.reduce_dtype)
        self.absent = set()
        for index, slots in zip(self.trained, flat.split(sizes, dim=1), strict=True):
            grad = self._grad(index)
            if grad is None:
                slots.fill_(-0.0)
                self.absent.add(index)
            else:
                self.layouts[index].copy_to_slots(grad, slots)
                slots[:, :1] += 0.0  # -0.0 + 0.0 is 0.0
        self.flat_grad = flat
        self.kept_grads.clear()

    def drop_grads(self) -> None:
        """Free the whole gradients of the parameters."""
        for param in self.params:
            param.grad = None

    def end_backward(self) -> None:
        """Free what backward has not, and wait for all gradients in the next one."""
        self.free()
        self.kept_part = None
        self.missing = set(self.trained)

    def start_reduce(self) -> None:
        """Launch the reduce_scatter of the gradients: every rank receives the sum of its slots.

        Shapes:  [p, numbers] -> [numbers]
        Cost:    one reduce_scatter: (p-1)/p * bytes in reduce_dtype sent per rank
        """
        if self.flat_grad is not None:
            self.reduced = self.flat_grad.new_empty(self.flat_grad.shape[1])
            with self._calls():
                self.reducing = dist.reduce_scatter_single(
                    self.reduced, self.flat_grad.view(-1), group=self.member.group, async_op=True
                )

    def wait_reduce(self) -> None:
        """Wait for the reduce_scatter; then set the shards' gradients, or all_reduce replicas'.

        Cost:    with replicas one all_reduce of the shards' gradients, which `finish_reduce` awaits
        """
        if self.reducing is None or self.reduced is None:
            return
        self.reducing.wait()
        self.reducing = self.flat_grad = None
        if self.groups.replicas is None:
            self._set_grads(self.reduced)
        else:
            self.reducing = dist.all_reduce(
                self.reduced, group=self.groups.replicas.group, async_op=True
            )

    def finish_reduce(self) -> None:
        """Wait for the replicas' all_reduce, if one is in flight."""
        if self.reducing is not None and self.reduced is not None:
            self.reducing.wait()
            self._set_grads(self.reduced)

    def discard_reduce(self) -> None:
        """Wait for the message in flight and drop it: its backward has raised an error."""
        if self.reducing is not None:
            self.reducing.wait()
        self.reducing = self.flat_grad = self.reduced = None

    def _set_grads(self, total: Tensor) -> None:
        """Add the mean over all ranks to the gradients of the shards.

        Shapes:  [numbers] -> those of the shards
        """
        total /= self.groups.num_ranks
        sizes = [self.layouts[index].slot_numel for index in self.trained]
        for index, slot in zip(self.trained, total.split(sizes), strict=True):
            if index in self.absent and (not len(slot) or is_negative_zero(slot[0])):
                continue  # no rank had a gradient
            shard = self.shards[index]
            mean = self.layouts[index].shard_in(slot, self.member.rank).to(shard.dtype)
            if self.member.size > 1:
                mean = mean.as_subclass(FSDPGrad)
            accumulate(shard, mean)
        self.reducing = self.reduced = None

    def _grad(self, index: int) -> Tensor | None:
        """Return the whole gradient that a parameter has, with what no_sync has kept."""
        grad, kept = self.params[index].grad, self.kept_grads.get(index)
        need_dense(grad, self.names[index][0], "FSDP")
        return kept if grad is None else grad if kept is None else kept.add_(grad)

    def _register(self, params: Sequence[nn.Parameter]) -> None:
        """Make these the modules' parameters."""
        for one, param in zip(self.found, params, strict=True):
            one.replace(param)

    def _calls(self) -> AbstractContextManager[None]:
        """Name the unit's messages, so that ranks which use other units are told."""
        return call_for(self.name or "the root")

    def _shard_version(self) -> int:
        return sum(shard._version for shard in self.shards)

    def _slots_in_whole(self) -> list[Tensor]:
        """Return the memory of each whole parameter, with padding [p, slot_numel]."""
        p = self.member.size
        return [
            self.whole[p * start : p * (start + layout.slot_numel * dtype.itemsize)]
            .view(dtype)
            .view(p, layout.slot_numel)
            for start, layout, dtype in self._columns
        ]

    def _slots_in(self, rows: Tensor) -> list[Tensor]:
        """Return the slots of each parameter in some ranks' rows of a message.

        Shapes:  [ranks, row_bytes] -> [ranks, slot_numel] each
        """
        return [
            rows[:, start : start + layout.slot_numel * dtype.itemsize].view(dtype)
            for start, layout, dtype in self._columns
        ]


def _scatter_shard(
    param: nn.Parameter, layout: Dim0Layout, groups: ShardingGroups, device: torch.device
) -> nn.Parameter:
    """Return this rank's shard of a parameter of the first rank, in a slot of its own.

    Shapes:  the parameter's -> [up to shard_rows, ...]
    """
    member, replicas = groups.shard, groups.replicas
    slot = torch.empty(layout.slot_numel, dtype=param.dtype, device=device)
    if replicas is None or replicas.rank == 0:
        first, slots = member.global_rank(0), None
        if member.rank == 0:
            if param.is_meta and not is_dry():
                raise CourseError(
                    f"rank {first}, FSDP: need weights on the group's first rank; got shapes only. "
                    'Try torch.device("meta") on the other ranks alone.'
                )
            slots = slot.new_empty(layout.p, layout.slot_numel)
            layout.copy_to_slots(param.detach(), slots)
        dist.scatter(slot, None if slots is None else list(slots), first, member.group)
    if replicas is not None:
        dist.broadcast(slot, replicas.global_rank(0), replicas.group)
    shard = FSDPShard(layout.shard_in(slot, member.rank), param.requires_grad)
    mark_split(shard, "FSDP", member.ranks, source=param)
    guard(param, ReplacedParameter)
    return shard
