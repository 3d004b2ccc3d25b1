"""FSDP in one short file: gather a unit, use it, free it, reduce its gradients.

It says what a rank does, and nothing else. It shards a unit's parameters side by side, as FSDP1
did; `fsdp.py` shards each parameter on its dim 0, as fully_shard does, and adds prefetching, mixed
precision, frozen, tied and unused parameters, hybrid sharding, clipping, checkpoints. Notebook
10_fsdp.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group, GroupMember, member_of
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import check_wrappable, mark_split, mark_wrapped
from course_lib.data_parallel.gradients import (
    NotCopied,
    accumulate,
    need_plain_backward,
    require_known,
)
from course_lib.data_parallel.guarded import STEP, GuardedParameter, guard
from course_lib.zero.clip import clip_shards
from course_lib.zero.guards import Away, FSDPGrad, FSDPShard, refuse_gradient


class NotGathered(Away, GuardedParameter):
    """A parameter while its unit is freed: whatever computes with it, or steps it, is told so."""

    engine, is_kept = "WholeFSDP", True
    instead: ClassVar = {STEP: "an optimizer of model.shards"}
    needs = (
        "WholeFSDP: need weights inside the forward of their unit, where they are gathered; got "
        "one that is used outside. Try the whole model, or FSDP of course_lib.fsdp."
    )


class WholeUnit:
    """Some parameters side by side; a rank owns `shard`, and `whole` comes and goes."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], member: GroupMember) -> None:
        self.params, self.member, self.num_ready = [x for _, x in named], member, 0
        params = self.params
        self.whole = self._side_by_side([x.detach() for x in params])
        dist.broadcast(self.whole, member.global_rank(0), member.group)
        self.shard = FSDPShard(self.whole.view(member.size, -1)[member.rank].clone())
        sizes = [x.numel() for x in params]
        parts = self.whole[: sum(sizes)].split(sizes)  # the rest is padding
        self.views = [part.view(x.shape) for part, x in zip(parts, params, strict=True)]
        for param in (self.shard, *params):
            mark_split(param, "WholeFSDP", member.ranks)
        for param in params:
            param.register_post_accumulate_grad_hook(self._mark_ready)
        if member.size > 1:
            self._accumulator = refuse_gradient(self.shard, f"the unit of {named[0][0]}")
        self.free()

    def _side_by_side(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([x.flatten() for x in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.member.size))  # equal shards

    @torch.no_grad()
    def gather(self, *_: Any) -> None:
        """Give `whole` its memory, and fill it with the shards of all ranks."""
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            dist.all_gather_single(self.whole, self.shard.detach(), group=self.member.group)
            self._let_params_be(nn.Parameter, self.views)

    def free(self) -> None:
        """Take its memory: what autograd has saved of parameters is valid after the next gather."""
        self.whole.untyped_storage().resize_(0)
        self._let_params_be(NotGathered, [self.whole.new_empty(0)] * len(self.params))

    def _let_params_be(self, kind: type[nn.Parameter], values: Sequence[Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            guard(param, kind)
            param.data = value

    def after_forward(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        """Free after forward; gather again when backward comes to the output."""
        self.free()
        if output.requires_grad:
            output.register_hook(self.gather)

    def _mark_ready(self, _param: Tensor) -> None:
        need_plain_backward("WholeFSDP", "DDP")
        self.num_ready += 1
        if self.num_ready == len(self.params):
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Free the unit, whose gradients are complete; give each rank its part of their mean."""
        self.free()
        grads = [x.grad for x in self.params if x.grad is not None]
        mean = torch.empty_like(self.shard.data)
        dist.reduce_scatter_single(mean, self._side_by_side(grads), group=self.member.group)
        mean /= self.member.size
        accumulate(self.shard, mean.as_subclass(FSDPGrad))
        self.num_ready = 0
        for param in self.params:
            param.grad = None


class WholeFSDP(NotCopied, nn.Module):
    """`module` in units of which every rank owns a shard; `shards` is what an optimizer steps.

    model = WholeFSDP(module, module.blocks); optimizer = AdamW(model.shards)

    blocks   a unit each, which returns a tensor; the rest of the module, if it has parameters, is
             a unit, too, which stays gathered from forward to backward

    Cost:    per unit two all_gathers and one reduce_scatter; nothing overlaps
    Raises:  CourseError unless each parameter is trained, in one module only, and of one dtype;
             from forward, if the backward before did not reach all parameters of a unit
    Source:  Zhao et al. 2023 (PyTorch FSDP), section 3.2
    """

    copy_instead = "FSDP of course_lib.fsdp, and its full_state_dict()"

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module] = (), group: Group = None
    ) -> None:
        super().__init__()
        check_wrappable(module, group, "WholeFSDP")
        self.module, self.member = module, member_of(group, "WholeFSDP")
        named = [*module.named_parameters(remove_duplicate=False)]
        everything = [x for _, x in named]
        kinds = {(x.dtype, x.requires_grad) for x in everything}
        if len({*everything}) < len(everything) or len(kinds) != 1 or not kinds.pop()[1]:
            raise CourseError(
                "WholeFSDP: need parameters of one dtype that are all trained, and not tied; got "
                "others. Try FSDP of course_lib.fsdp."
            )
        inner = {x for block in blocks for x in block.parameters()}
        own = [(name, x) for name, x in named if x not in inner]
        self.root = [WholeUnit(own, self.member)] if own else []
        self.units = [*self.root]
        for block in blocks:
            self.units.append(unit := WholeUnit([*block.named_parameters()], self.member))
            block.register_forward_pre_hook(unit.gather)
            block.register_forward_hook(unit.after_forward)
        self.shards = [unit.shard for unit in self.units]
        self._known = {*everything}
        mark_wrapped(everything, self)

    def forward(self, *args: Any) -> Any:
        """Return the module's output."""
        require_known(self.module, self._known, "WholeFSDP")
        if any(unit.num_ready for unit in self.units):
            raise CourseError(
                "WholeFSDP: need a gradient of every parameter of a unit; got some without one. "
                "Try FSDP of course_lib.fsdp."
            )
        for unit in self.root:  # a forward without a backward has left it, before a step
            unit.free()
            unit.gather()
        return self.module(*args)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the shards."""
        yield from ((f"shards.{number}", shard) for number, shard in enumerate(self.shards))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient so that its norm over all shards is at most max_norm; return it."""
        grads = [shard.grad for shard in self.shards if shard.grad is not None]
        return clip_shards(grads, max_norm, self.member.group, self.shards[0].device)
