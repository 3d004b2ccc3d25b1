"""Fully sharded data parallelism: gather a unit, use it, free it.

Every rank owns a shard of each parameter: some of its rows. A hook gathers a unit's whole
parameters before its forward, and frees them after; another gathers them again before its backward,
and when its gradients are complete, one reduce_scatter is launched. Meanwhile the next unit is
prefetched. An optimizer steps the shards: `parameters()` returns nothing else. Notebook 10_fsdp.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.core.shards import ParamShard
from course_lib.data_parallel.composition import (
    check_norm_is_whole,
    check_wrappable,
    mark_wrapped,
)
from course_lib.data_parallel.gradients import (
    NoSync,
    NotCopied,
    all_zero,
    call_when_accumulated,
    need_plain_backward,
    not_cleared,
    require_known,
    tensors_kept,
)
from course_lib.fsdp.mesh import sharding_groups
from course_lib.fsdp.mixed_precision import MixedPrecisionPolicy, policy_of
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.fsdp.prefetch import UnitOrder
from course_lib.fsdp.state import (
    full_state,
    load_full,
    load_sharded,
    param_shards,
    refuse_shards,
    sharded_state,
)
from course_lib.fsdp.units import Choice, Unit, make_units, share_buffers
from course_lib.zero.clip import clip_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP(NotCopied, NoSync, nn.Module):
    """`module` sharded over a group; after backward, each rank's shards have their mean gradient.

    model = FSDP(module); optimizer = AdamW(model.parameters())
    loss_of(model(inputs)).backward(); model.clip_grad_norm_(1.0); optimizer.step()

    compute_dtype          short for mixed_precision=MixedPrecisionPolicy(param_dtype=...)
    reshard_after_forward  free a unit between its forward and its backward; with a number k, each
                           rank keeps 1/k of it, and k consecutive ranks gather it for backward
    mesh                   sizes (replicate, shard) of a grid of the group's ranks, or a DeviceMesh
                           of these axes: parameters are sharded in a row only
    mixed_precision        dtypes to compute, reduce and return in; the shards keep theirs
    units                  modules to gather and free as one, or a test for them; the rest is the
                           root, which stays gathered from forward to backward.
                           None: the members of every ModuleList
    prefetch               launch the next unit's all_gather before a unit computes, in the order of
                           the last pass; the first step records it

    All ranks start from the weights and buffers of the group's first one; on the others the module
    may be on the meta device. Every rank has to use the same units in a step. A parameter that a
    rank does not use counts as zero there; one that no rank uses has no gradient. Inside
    `no_sync()` backward keeps whole gradients on the rank, and the next backward outside reduces
    them. Hooks on shards are called when their gradient is complete; `requires_grad_()` counts from
    the next forward on. Weights may be used in the forward of their unit alone, the root's in that
    of the model. A copy or a pickle is refused: use `full_state_dict()`.

    Cost:    per step and unit one all_gather, another one if it was freed, and one reduce_scatter;
             with replicas one all_reduce of its shards' gradients
    Raises:  CourseError, MeshError for another's group
    Source:  Zhao et al. 2023 (PyTorch FSDP), sections 3.2 and 3.3
    """

    copy_instead = "full_state_dict(), or copies of parameters() to average weights"

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool | int = True,
        group: Group = None,
        mesh: "tuple[int, int] | DeviceMesh | None" = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        units: Choice = None,
        prefetch: bool = True,
    ) -> None:
        super().__init__()
        self.policy = policy_of(compute_dtype, mixed_precision)
        self.groups = sharding_groups(group, mesh, reshard_after_forward)
        for member in self.groups.members:
            check_wrappable(module, member.group, "FSDP")
        self.module, self.prefetch, plain = module, prefetch, [*module.parameters()]
        self.reshard_after_forward = reshard_after_forward is True or reshard_after_forward > 1
        self.units = make_units(module, units, self.groups, self.policy)
        self.param_groups = [unit.param_group for unit in self.units if unit.param_group]
        self._named_shards = list(module.named_parameters())
        whole = [param for param_group in self.param_groups for param in param_group.params]
        self._known = {*whole, *(shard for _, shard in self._named_shards)}
        share_buffers(module, self.groups)
        self.forward_order, self.backward_order = UnitOrder(), UnitOrder()
        self._to_reduce: list[tuple[Unit, FSDPParamGroup]] = []  # the next one is the last
        self._reducing: FSDPParamGroup | None = None  # one reduce_scatter at a time
        self._trains, self._in_backward, self._num_uses = False, False, 0
        for unit in self.units:
            hook = partial(self._before_forward, unit)
            unit.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))
            self._call_when_ready(unit)
        if self.groups.shard.size > 1:
            for part in self.root.owners:
                part.register_forward_pre_hook(self._check_gathered)
            module.register_state_dict_pre_hook(refuse_shards)
        mark_wrapped(plain, self)  # to replace an earlier wrapper

    @property
    def root(self) -> Unit:
        """The unit of all parameters outside of other units."""
        return self.units[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        self._check_backward_ended()
        self._trains = torch.is_grad_enabled()
        if self._trains:
            require_known(self.module, self._known, "FSDP")
        for param_group in self.param_groups:
            param_group.begin_forward()
        self.forward_order.visits = []
        try:
            output = self.module(*args, **kwargs)
        finally:
            for param_group in self.param_groups:
                param_group.end_forward()
        self.forward_order.end_pass()
        return tree_map_only(Tensor, partial(_cast, dtype=self.policy.output_dtype), output)

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the remaining gradients, wait, free everything; called at the end of backward."""
        self._reduce_next(after=-1)
        for param_group in self.param_groups:
            if param_group.has_grads():
                self._reduce(param_group)
            param_group.end_backward()
        self._wait_reduce()
        for param_group in self.param_groups:
            param_group.finish_reduce()
        self.backward_order.end_pass()
        self._end_backward()

    @contextmanager
    def stays_whole(self) -> Iterator[None]:
        """Keep what is gathered, and whole gradients, until the block ends; then reduce them once.

        For the micro-batches of a pipeline, whose forward and backward passes take turns: each
        parameter is gathered once for all of them. Without it, once for each pass.

        Memory:  inside, all parameters of the module, and their gradients in reduce_dtype
        Cost:    for all passes one all_gather and one reduce_scatter per unit
        """
        for param_group in self.param_groups:
            param_group.stays = True
        try:
            with self.no_sync():
                yield
        finally:
            for param_group in self.param_groups:
                param_group.stays = False
        self.finish()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient so that its norm over all shards is at most max_norm; return it.

        Cost:    one all_reduce of one number
        """
        self._check_backward_ended()
        for param_group in self.param_groups:
            param_group.kept_grads.drop_cleared(all_reduced=True)
        shards = [shard for _, shard in self._named_shards]
        check_norm_is_whole(shards, "FSDP")
        grads = [shard.grad for shard in shards if shard.grad is not None]
        device = shards[0].device if shards else None
        return clip_shards(grads, max_norm, self.groups.shard.group, device)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards by the names that the parameters have in the plain module."""
        yield from self._named_shards

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the shards' gradients, and whole ones that no_sync has kept."""
        super().zero_grad(set_to_none)
        for param_group in self.param_groups:
            param_group.kept_grads.clear()

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the plain module's state_dict(), on one rank or on all; all ranks have to call it.

        Cost:    one all_gather per parameter
        """
        return full_state(self.module, self.param_groups, rank in (None, dist.get_rank()))

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a plain module's state_dict; every rank copies its shards from it."""
        load_full(self.module, self.param_groups, state)

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's shards and the buffers; `merge_shards` joins those of all ranks."""
        if options:  # of a module that has this one in it
            refuse_shards(self.module, "", keep_vars=False)
        return sharded_state(self.module, self.param_groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load `state_dict()` of the same rank of an equally large group."""
        load_sharded(self.module, self.param_groups, state)

    def param_shards(self) -> list[ParamShard]:
        """Return every parameter with this rank's shard of it, for a checkpoint."""
        return param_shards(self.param_groups)

    # --- hooks

    def _call_when_ready(self, unit: Unit) -> None:
        """Call `_mark_ready` with each gradient of a unit; a frozen parameter may train later."""
        group = unit.param_group
        for index, param in enumerate(group.params if group else ()):
            trains = param.requires_grad
            if param.is_floating_point() or param.is_complex():
                param.requires_grad_(True)
                call_when_accumulated(param, self._mark_ready, unit, index)
                param.requires_grad_(trains)

    def _check_gathered(self, part: nn.Module, _args: Any) -> None:
        if self.root.param_group and not self.root.param_group.is_whole:
            raise CourseError(
                f"FSDP: need a call of the whole model, which gathers weights; got one of "
                f"{type(part).__name__} alone, which has this rank's shard. Try model(inputs), or "
                "units= with it."
            )

    def _use(self, unit: Unit, order: UnitOrder) -> None:
        """Gather a unit's parameters, and prefetch those of the next unit."""
        unit.start_gather()
        unit.wait_gather()
        following = order.visit(unit)
        if self.prefetch and following is not None:
            following.start_gather()

    def _before_forward(self, unit: Unit, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._use(unit, self.backward_order if self._in_backward else self.forward_order)
        if self._trains and not self._in_backward:
            self._num_uses += 1
            unit.first_use = unit.first_use or self._num_uses
        cast = partial(_cast, dtype=self.policy.param_dtype)
        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        if unit.has_frozen and not unit.has_units and torch.is_grad_enabled():
            args, kwargs = unit.free_behind((args, kwargs))
        return args, kwargs

    def _after_forward(self, unit: Unit, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in (*unit.tensors_in(output), *tensors_kept(unit.parts)):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit, self._num_uses))
        trains = self._trains and torch.is_grad_enabled()
        keep = trains and (unit is self.root or not self.reshard_after_forward)
        if not keep and not self._in_backward:  # recomputation in backward needs them at once
            unit.free(keep_part=trains)

    def _before_backward(self, unit: Unit, num_uses: int, _grad: Tensor) -> None:
        need_plain_backward("FSDP", "DDP")
        if not self._in_backward:
            self._in_backward = True
            used = [(unit, unit.param_group) for unit in self.forward_order.used]
            self._to_reduce = [(unit, own) for unit, own in used if own is not None and own.trained]
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._reduce_next(after=num_uses)
        unit.check_unchanged()
        unit.needed = unit.has_frozen
        self._use(unit, self.backward_order)

    def _mark_ready(self, unit: Unit, index: int) -> None:
        """Note a complete gradient; with the last one of its unit, reduce and free the unit."""
        if unit.param_group is not None:
            unit.param_group.missing.discard(index)
            unit.free_if_done()
            self._reduce_next()

    def _reduce_next(self, *, after: float = math.inf) -> None:
        """Reduce units, those used last in forward first, so that all ranks have the same order.

        after    backward is back at this use: units first used after it receive no more gradients,
                 as autograd goes from the last node to the first. Stop at others that wait for one
        """
        while self._to_reduce:
            unit, param_group = self._to_reduce[-1]
            if param_group.missing and unit.first_use <= after:
                return
            self._to_reduce.pop()
            unit.complete()
            self._reduce(param_group)

    def _reduce(self, param_group: FSDPParamGroup) -> None:
        """Launch the reduce_scatter of a unit's gradients, or keep them inside no_sync."""
        if not self._syncs:
            param_group.keep()
            param_group.drop_grads()
            return
        param_group.collect()
        param_group.drop_grads()
        self._wait_reduce()  # so that whole gradients of at most two units exist
        param_group.start_reduce()
        self._reducing = param_group

    def _wait_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.wait_reduce()
            self._reducing = None

    def _check_backward_ended(self) -> None:
        """Discard what a backward has left when it raised an error.

        Raises:  CourseError unless the gradients have been cleared since
        """
        if not self._in_backward:
            return
        self._to_reduce, self._reducing = [], None
        for param_group in self.param_groups:
            param_group.discard_reduce()
            param_group.drop_grads()
            param_group.end_backward()
            param_group.kept_grads.drop_cleared()
        is_kept = any(param_group.kept_grads for param_group in self.param_groups)
        if is_kept or not all_zero(shard for _, shard in self._named_shards):
            raise not_cleared("FSDP", "model.zero_grad()")
        self._end_backward()

    def _end_backward(self) -> None:
        for unit in self.units:
            unit.first_use = 0
        self._in_backward, self._num_uses = False, 0

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise CourseError(
            "FSDP: need dtype and device before the weights are sharded; got .to() or the like "
            "after. Try FSDP(module.to(...))."
        )


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
