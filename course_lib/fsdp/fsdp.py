"""Fully sharded data parallelism: gather a unit, use it, free it.

Nobody owns more than its shard. A hook gathers a unit's whole parameters before its forward, and
frees them after; another gathers them again before its backward, and when its gradients are there,
they leave as one reduce_scatter. Meanwhile the next unit's parameters are already on their way. An
optimizer steps the shards, which are all that `parameters()` gives. Notebook 10_fsdp.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.fsdp.state import full_state, load_full, load_sharded, sharded_state
from course_lib.fsdp.units import Choice, Order, Unit, check_wrappable, make_units, share_buffers


class FSDP(nn.Module):
    """`module` dealt out over a group; after backward, each rank's shards have their mean gradient.

    model = FSDP(module); optimizer = AdamW(model.parameters())
    loss_of(model(inputs)).backward(); model.clip_grad_norm_(1.0); optimizer.step()

    units                  modules that are gathered and freed as one, or a test for them; the
                           rest is the root, which stays whole from forward to backward.
                           None: the members of every ModuleList
    compute_dtype          to gather, compute and cast floating inputs in; the shards keep theirs
    reduce_dtype           to sum gradients in; None: the parameters' own
    reshard_after_forward  free a unit between its forward and its backward
    prefetch               let the next unit's gather leave before a unit computes, in the order of
                           the last pass; the first step learns it

    All ranks begin with the weights and buffers of the group's first one; on the others the module
    may be on the meta device. Every rank has to use the same units in a step. A parameter that a
    step does not use counts as zero, if others of its unit are used.

    Cost:    per step an all_gather a unit, and one more if it was freed; a reduce_scatter a unit
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
        self.param_groups = [
            param_group for unit in self.units for param_group in unit.param_groups
        ]
        share_buffers(module, member)
        self.forward_order, self.backward_order = Order(), Order()
        self._reducing: FSDPParamGroup | None = None  # one message of gradients at a time
        self._sync, self._trains, self._in_backward = True, False, False
        for unit in self.units:
            hook = partial(self._before_forward, unit)
            unit.module.register_forward_pre_hook(hook, with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        this = weakref.ref(self)  # a hook lives as long as its parameter: it must not keep us
        for param_group in self.param_groups:
            for index, param in enumerate(param_group.params):
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(
                        partial(_arrived, this, param_group, index)
                    )

    @property
    def root(self) -> Unit:
        """The unit of all that lies in no other."""
        return self.units[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self._in_backward:  # which broke off
            self._forget_backward()
        self._trains = torch.is_grad_enabled()
        self.forward_order.visits = []
        output = self.module(*args, **kwargs)
        self.forward_order.close()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here sends nothing: every rank adds up whole gradients, which stay."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is left, wait for all, free everything. Backward calls it at its end."""
        for param_group in self.param_groups:
            if param_group.has_grads() or (self._sync and param_group.kept_grad is not None):
                self._reduce(param_group)
            param_group.free()
        self._wait_reduce()
        self.backward_order.close()
        self._in_backward = False

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down if their norm, over all ranks' shards, is above; return it.

        Cost:    one all_reduce of one number
        """
        grads = [
            param_group.shard.grad
            for param_group in self.param_groups
            if param_group.shard.grad is not None
        ]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        device = self.param_groups[0].shard.device if self.param_groups else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        total = sum((norm**2 for norm in norms), total)
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        for grad in grads:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, one a param_group."""
        yield from ((param_group.name, param_group.shard) for param_group in self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the shards' gradients, and whole ones that no_sync has kept."""
        super().zero_grad(set_to_none)
        for param_group in self.param_groups:
            param_group.kept_grad = None

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """What the plain module's state_dict() would be, on one rank or on all; all have to call.

        Cost:    one all_gather a param_group
        """
        return full_state(self.module, self.param_groups, rank in (None, dist.get_rank()))

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a plain module's state_dict; every rank takes its shards out of it."""
        load_full(self.module, self.param_groups, state)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's shards and the buffers. `fsdp_state.merge_shards` puts them together."""
        return sharded_state(self.module, self.param_groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Go on from `state_dict()` of the same rank of a group of the same size."""
        load_sharded(self.module, self.param_groups, state)

    # --- what the hooks do

    def _use(self, unit: Unit, order: Order) -> None:
        """Have a unit's parameters, and let those of the next one leave meanwhile."""
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
        if not keep and not self._in_backward:  # there, what was recomputed is needed at once
            unit.free()

    def _before_backward(self, unit: Unit, _grad: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        unit.check_unchanged()
        self._use(unit, self.backward_order)

    def _arrive(self, param_group: FSDPParamGroup, index: int) -> None:
        """A gradient is there; with the last one of its param_group, the param_group is done."""
        param_group.missing.discard(index)
        if not param_group.missing:
            self._reduce(param_group)
            param_group.free()

    def _reduce(self, param_group: FSDPParamGroup) -> None:
        """Send a param_group's gradients, or keep them."""
        param_group.collect()
        param_group.drop_grads()
        if not self._sync:
            param_group.keep()
            return
        self._wait_reduce()  # so that no more than two param_groups of gradients lie about
        param_group.start_reduce()
        self._reducing = param_group

    def _wait_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.wait_reduce()
            self._reducing = None

    def _forget_backward(self) -> None:
        self._wait_reduce()
        for param_group in self.param_groups:
            param_group.drop_grads()
            param_group.free()
        self._in_backward = False

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise CourseError(
            "FSDP: need dtype and device before the weights are dealt out; got .to() or the like "
            "after. Try FSDP(module.to(...))."
        )

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor


def _arrived(
    this: "weakref.ref[FSDP]", param_group: FSDPParamGroup, index: int, _param: Tensor
) -> None:
    """The hook of one parameter, called each time backward has added to its `grad`."""
    model = this()
    if model is not None:
        with torch.no_grad():
            model._arrive(param_group, index)
