"""Fully sharded data parallelism: gather a unit, use it, free it.

Every rank owns a shard of each unit. A hook gathers a unit's whole parameters before its forward,
and frees them after; another gathers them again before its backward, and when its gradients are
complete, one reduce_scatter is launched. Meanwhile the next unit is prefetched. An optimizer steps
the shards: `parameters()` returns nothing else. Notebook 10_fsdp.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.data_parallel.gradients import NoSync, call_when_accumulated
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.fsdp.prefetch import UnitOrder
from course_lib.fsdp.state import full_state, load_full, load_sharded, sharded_state
from course_lib.fsdp.units import Choice, Unit, check_wrappable, make_units, share_buffers
from course_lib.zero.clip import clip_shards


class FSDP(NoSync, nn.Module):
    """`module` sharded over a group; after backward, each rank's shards have their mean gradient.

    model = FSDP(module); optimizer = AdamW(model.parameters())
    loss_of(model(inputs)).backward(); model.clip_grad_norm_(1.0); optimizer.step()

    units                  modules to gather and free as one, or a test for them; the rest is the
                           root, which stays gathered from forward to backward.
                           None: the members of every ModuleList
    compute_dtype          to gather, compute and cast floating inputs in; the shards keep theirs
    reduce_dtype           to sum gradients in; None: the parameters' own
    reshard_after_forward  free a unit between its forward and its backward
    prefetch               launch the next unit's all_gather before a unit computes, in the order of
                           the last pass; the first step records it

    All ranks start from the weights and buffers of the group's first one; on the others the module
    may be on the meta device. Every rank has to use the same units in a step. The gradient of a
    parameter that a step does not use counts as zero, if others of its unit are used. Inside
    `no_sync()` backward keeps whole gradients on the rank, and the next backward outside reduces
    them.

    Cost:    per step and unit one all_gather, another one if it was freed, and one reduce_scatter
    Raises:  CourseError, MeshError for another's group
    Source:  Zhao et al. 2023 (PyTorch FSDP), sections 3.2 and 3.3
    """

    def __init__(
        self,
        module: nn.Module,
        units: Choice = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        prefetch: bool = True,
        group: Group = None,
    ) -> None:
        super().__init__()
        member = member_of(group, "FSDP")
        check_wrappable(module, FSDP, compute_dtype, reduce_dtype)
        self.module, self.group, self.compute_dtype = module, group, compute_dtype
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.units = make_units(module, units, member, compute_dtype, reduce_dtype)
        self.param_groups = [group for unit in self.units for group in unit.param_groups]
        share_buffers(module, member)
        self.forward_order, self.backward_order = UnitOrder(), UnitOrder()
        self._reducing: FSDPParamGroup | None = None  # one reduce_scatter at a time
        self._trains, self._in_backward = False, False
        for unit in self.units:
            hook = partial(self._before_forward, unit)
            unit.module.register_forward_pre_hook(hook, with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        for param_group in self.param_groups:
            for index, param in enumerate(param_group.params):
                if param.requires_grad:
                    call_when_accumulated(param, self._mark_ready, param_group, index)

    @property
    def root(self) -> Unit:
        """The unit of all parameters outside of other units."""
        return self.units[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        if self._in_backward:  # the last backward raised an error
            self._reset()
        self._trains = torch.is_grad_enabled()
        self.forward_order.visits = []
        output = self.module(*args, **kwargs)
        self.forward_order.end_pass()
        return output

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the remaining gradients, wait, free everything; called at the end of backward."""
        for param_group in self.param_groups:
            if param_group.has_grads() or (self._syncs and param_group.kept_grad is not None):
                self._reduce(param_group)
            param_group.free()
        self._wait_reduce()
        self.backward_order.end_pass()
        self._in_backward = False

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient so that its norm over all shards is at most max_norm; return it.

        Cost:    one all_reduce of one number
        """
        shards = [group.shard for group in self.param_groups]
        grads = [shard.grad for shard in shards if shard.grad is not None]
        return clip_shards(grads, max_norm, self.group, shards[0].device if shards else None)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards, one per parameter group."""
        yield from ((param_group.name, param_group.shard) for param_group in self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the shards' gradients, and whole ones that no_sync has kept."""
        super().zero_grad(set_to_none)
        for param_group in self.param_groups:
            param_group.kept_grad = None

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the plain module's state_dict(), on one rank or on all; all ranks have to call it.

        Cost:    one all_gather per parameter group
        """
        return full_state(self.module, self.param_groups, rank in (None, dist.get_rank()))

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a plain module's state_dict; every rank copies its shards from it."""
        load_full(self.module, self.param_groups, state)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's shards and the buffers; `merge_shards` joins those of all ranks."""
        return sharded_state(self.module, self.param_groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load `state_dict()` of the same rank of an equally large group."""
        load_sharded(self.module, self.param_groups, state)

    # --- hooks

    def _use(self, unit: Unit, order: UnitOrder) -> None:
        """Gather a unit's parameters, and prefetch those of the next unit."""
        unit.start_gather()
        following = order.visit(unit)
        if self.prefetch and following is not None:
            following.start_gather()
        unit.wait_gather()

    def _before_forward(self, unit: Unit, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._use(unit, self.backward_order if self._in_backward else self.forward_order)
        if self.compute_dtype is not None:
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        if unit.has_frozen and not unit.has_units and torch.is_grad_enabled():
            args, kwargs = unit.free_behind((args, kwargs))
        return args, kwargs

    def _after_forward(self, unit: Unit, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in unit.tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit))
        keep = self._trains and (unit is self.root or not self.reshard_after_forward)
        if not keep and not self._in_backward:  # recomputation in backward needs them at once
            unit.free()

    def _before_backward(self, unit: Unit, _grad: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        unit.check_unchanged()
        self._use(unit, self.backward_order)

    def _mark_ready(self, param_group: FSDPParamGroup, index: int) -> None:
        """Note a complete gradient; with the last one of its group, reduce and free the group."""
        param_group.missing.discard(index)
        if not param_group.missing:
            self._reduce(param_group)
            param_group.free()

    def _reduce(self, param_group: FSDPParamGroup) -> None:
        """Launch the reduce_scatter of a group's gradients, or keep them inside no_sync."""
        param_group.collect()
        param_group.drop_grads()
        if not self._syncs:
            param_group.keep()
            return
        self._wait_reduce()  # so that whole gradients of at most two groups exist
        param_group.start_reduce()
        self._reducing = param_group

    def _wait_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.wait_reduce()
            self._reducing = None

    def _reset(self) -> None:
        self._wait_reduce()
        for param_group in self.param_groups:
            param_group.drop_grads()
            param_group.free()
        self._in_backward = False

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise CourseError(
            "FSDP: need dtype and device before the weights are sharded; got .to() or the like "
            "after. Try FSDP(module.to(...))."
        )

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor
