"""ZeRO: data parallelism that shards the state which every rank otherwise keeps whole.

Every rank still computes the whole model on its own part of the batch. Stage 1 shards the optimizer
state, stage 2 the gradients too, stage 3 the parameters as well. Each stage is a subclass of the
one before, and overrides only what it shards in addition. Notebook 09_zero.

                    ZeRO1                     ZeRO2                      ZeRO3
    parameters      whole                     whole                      shard
    gradients       whole until the step      a bucket at a time, shard  a module at a time, shard
    optimizer       shard                     shard                      shard
"""

import weakref
from collections.abc import Container, Iterable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.collectives.coalesced import broadcast_together, group_alike
from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.core.shards import Box, Shard
from course_lib.data_parallel.composition import check_wrappable, mark_wrapped
from course_lib.data_parallel.elementwise import need_elementwise
from course_lib.data_parallel.gradients import (
    NotCopied,
    call_when_accumulated,
    check_not_replaced,
    not_cleared,
    require_known,
    some_names,
)
from course_lib.data_parallel.guarded import guard
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.gather_hooks import GatherHooks
from course_lib.zero.guards import ZeROParameter
from course_lib.zero.offload import Offload
from course_lib.zero.reducer import Reducer, agree_on_used
from course_lib.zero.sharded_optimizer import ShardedOptimizer, need_some
from course_lib.zero.state import need_keys, on_host, range_shard

BUCKET_BYTES = 25 * 2**20
EXTRA = "_extra_state"  # the end of the name of what a module's get_extra_state returns
CLEAR = "engine.zero_grad()"  # that of the module does not reach the shards


class ZeRO1(NotCopied):
    """Stage 1: a model and its optimizer, of whose state every rank of the group keeps 1/p.

    engine = ZeRO1(module, torch.optim.AdamW, lr=1e-3)
    engine.zero_grad(); loss_of(engine(inputs)).backward(); engine.step()

    Several backward passes before a step accumulate; clear gradients with the engine's zero_grad(),
    as a module's does not reach their shards. `param.grad` is this rank's own, and None from
    `finish()` on (in stages 2 and 3 already in backward): clip the mean with the engine. Parameters
    and buffers are broadcast from the group's first rank; its buffers again before each forward in
    training.

    param_groups  as for the optimizer; default: all trainable parameters
    bucket_bytes  gradients are sent in flat parameters of about this size
    find_unused   a missing gradient on this rank counts as zero, and the parameter is not stepped
                  if no rank has one. Costs one more all_reduce, of 1 byte per parameter. Without
                  it a missing gradient is an error
    offload       keep the optimizer state, and compute its step, in the host's memory
    apart         parameters with a flat parameter each, such as one that is tied to another stage's
                  and has to be in equal shards there

    Cost:    per step: one reduce_scatter of all gradients, one all_gather of all parameters
    Raises:  CourseError, MeshError
    Source:  Rajbhandari et al. 2020 (ZeRO), sections 5.1 and 7.2.1
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_cls: type[Optimizer],
        group: Group = None,
        *,
        param_groups: Iterable[Any] | None = None,
        bucket_bytes: float = BUCKET_BYTES,
        find_unused: bool = False,
        broadcast_buffers: bool = True,
        offload: bool = False,
        apart: Container[nn.Parameter] = (),
        **defaults: Any,
    ) -> None:
        member_of(group, type(self).__name__)
        check_wrappable(module, group, type(self).__name__)
        need_elementwise(optimizer_cls)
        self.module, self.group = module, group or dist.group.WORLD
        self.find_unused, self.broadcast_buffers = find_unused, broadcast_buffers
        trained = [param for param in module.parameters() if param.requires_grad]
        need_some(trained)
        broadcast_together([*module.parameters(), *module.buffers()], self.group)
        self.offload = Offload(next(module.parameters()).device) if offload else None
        self._apart = apart
        self.flat_params = self._lay_out(bucket_bytes)
        self.optimizer = ShardedOptimizer(
            trained if param_groups is None else param_groups,
            optimizer_cls,
            self.group,
            offload=self.offload or False,
            flat_params=self.flat_params,
            **defaults,
        )
        self.optimizer.engine = weakref.ref(self)
        self.reducer, self._agreed = Reducer(self.flat_params), False
        self._in_backward = False
        self._trained = {param for one in self.flat_params for param in one.params}
        for number, flat_param in enumerate(self.flat_params):
            for index, param in enumerate(flat_param.params):
                call_when_accumulated(param, self._mark_ready, number, index)
                if not isinstance(param, ZeROParameter):  # freed ones are
                    guard(param, ZeROParameter)
        mark_wrapped(self._trained, self)

    def _lay_out(self, bucket_bytes: float) -> list[FlatParam]:
        """Return one flat parameter per bucket, in the order in which backward fills them."""
        named = [item for item in self.module.named_parameters() if item[1].requires_grad][::-1]
        together = [n for n, (_, param) in enumerate(named) if param not in self._apart]
        groups = group_alike([named[n][1] for n in together], bucket_bytes)
        parts = [[together[n] for n in group] for group in groups]
        parts += [[n] for n in range(len(named)) if n not in together]
        return [FlatParam([named[n] for n in part], self.group) for part in sorted(parts, key=max)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        self._check_backward_ended()
        if self.broadcast_buffers and self.module.training and torch.is_grad_enabled():
            broadcast_together(self.module.buffers(), self.group)
        return self.module(*args, **kwargs)

    def _mark_ready(self, number: int, index: int) -> None:
        """Note a complete gradient. In stage 1 it stays in `param.grad` until the step."""
        if self.flat_params[number].stepped:
            raise not_cleared(type(self).__name__, CLEAR, "each step")
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.reducer.mark_ready(number, index)
        self._agreed = False

    def _end_backward(self) -> None:
        self._in_backward = False

    def _check_backward_ended(self) -> None:
        """Check that no backward has raised an error since zero_grad(), and nobody replaced us."""
        check_not_replaced(self)
        if self._in_backward:
            raise not_cleared(type(self).__name__, CLEAR)

    def finish(self) -> None:
        """Reduce-scatter all remaining gradients, and keep this rank's shard of their mean.

        `step` and `clip_grad_norm_` call it, also those of the optimizer.
        """
        self._check_backward_ended()
        require_known(self.module, self._trained, type(self).__name__)
        self.reducer.flush()
        if not self._agreed:
            agree_on_used(self.flat_params, self.group, self.find_unused, type(self).__name__)
            self._agreed = True

    def step(self) -> None:
        """Step this rank's shard, then gather the parameters."""
        self.optimizer.step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the mean gradient so that its norm is at most max_norm; return the norm before."""
        return self.optimizer.clip_grad_norm_(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, or set those that exist to zeros."""
        self.optimizer.zero_grad(set_to_none)

    def begin_round(self) -> None:
        """Forget what backward has done; the optimizer's zero_grad calls it."""
        self.reducer.reset()
        self._agreed, self._in_backward = False, False

    @property
    def all_flat_params(self) -> list[FlatParam]:
        """Every flat parameter of the module."""
        return self.flat_params

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of everything: for the same rank of an equally large group."""
        return {
            "shards": [flat_param.shard.clone() for flat_param in self.all_flat_params],
            "others": deepcopy(self._others()),
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's `state_dict()`.

        Raises:  CourseError for that of another rank
        """
        where, others = f"{type(self).__name__}.load_state_dict", self._others()
        attempt = "engine.state_dict(), or load_full_state_dict() for another"
        need_keys(state, ("shards", "others", "optimizer"), where, attempt)
        need_keys(state["others"], [*others], where, attempt)
        kept = [[*shard.shape] for shard in state["shards"]]
        wanted = [[*flat_param.shard.shape] for flat_param in self.all_flat_params]
        if kept != wanted:
            raise CourseError(
                f"{where}: need shards of {wanted[:3]}; got {kept[:3]}. "
                "Try full_state_dict() and load_full_state_dict(): any layout fits."
            )
        for flat_param, shard in zip(self.all_flat_params, state["shards"], strict=True):
            flat_param.shard.copy_(shard)
            if not flat_param.only_shard:
                flat_param.gather()
        self.module.load_state_dict({name: state["others"][name] for name in others}, strict=False)
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return on every rank `model` and `optimizer` as one process saves them, on the host."""
        values: dict[int, Tensor] = {}
        for flat_param in self.all_flat_params:
            if flat_param.is_free:
                flat_param.gather()
            values |= {id(param): on_host(param) for param in flat_param.params}
            flat_param.free()
        model = self.module.state_dict(keep_vars=True)
        return {
            "model": {
                name: values[id(tensor)] if id(tensor) in values else on_host(tensor)
                for name, tensor in model.items()
            },
            "optimizer": self.optimizer.full_state_dict(),
        }

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `full_state_dict()` of any stage and any number of ranks."""
        where = f"{type(self).__name__}.load_full_state_dict"
        attempt = (
            "engine.full_state_dict(), or {'model': ..., 'optimizer': ...} of one process's two"
        )
        need_keys(state, ("model", "optimizer"), where, attempt)
        model, saved = self.module.state_dict(keep_vars=True), state["model"]
        if model.keys() != saved.keys():
            odd = sorted(model.keys() ^ saved.keys())
            raise CourseError(
                f"{where}: need the state of the same model; "
                f"got one that differs in {some_names(odd)}. Try the model it was saved with."
            )
        for name, shard in self.shards().items():
            if not name.endswith(EXTRA) and saved[name].shape != shard.shape:
                raise CourseError(
                    f"{where}: need {name} of shape {[*shard.shape]}; got "
                    f"{[*saved[name].shape]}. Try the model it was saved with."
                )
        values = {id(tensor): saved[name] for name, tensor in model.items()}
        for flat_param in self.all_flat_params:
            flat_param.load([values[id(param)] for param in flat_param.params])
        self.module.load_state_dict({name: saved[name] for name in self._others()}, strict=False)
        self.optimizer.load_full_state_dict(state["optimizer"])

    def shards(self) -> dict[str, Shard]:
        """Return what this rank holds of the model's state, by name, for a checkpoint.

        In stages 1 and 2 that is all of it, in stage 3 its pieces of the flat parameters.
        """
        sharded = [one for one in self.all_flat_params if one.only_shard]
        found = {
            id(param): Shard(shape)  # without a piece on this rank
            for one in sharded
            for param, shape in zip(one.params, one.layout.shapes, strict=True)
        }
        for one in sharded:
            for piece in one.pieces:
                shape, part = one.layout.shapes[piece.index], piece.within(one.shard)
                found[id(one.params[piece.index])] = range_shard(shape, piece.start, part)
        state = self.module.state_dict(keep_vars=True)
        model = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
        for tensor in model.values():
            box = Box.whole(tensor.shape)
            pieces = [(box, tensor.detach())] if box.numel else []
            found.setdefault(id(tensor), Shard(box.sizes, pieces))
        return {name: found[id(tensor)] for name, tensor in model.items()}

    def _others(self) -> dict[str, Any]:
        """Return buffers, extra state, and frozen parameters that belong to no flat parameter."""
        flat = {id(param) for flat_param in self.all_flat_params for param in flat_param.params}
        model = self.module.state_dict(keep_vars=True)
        others = {name: x for name, x in model.items() if id(x) not in flat}
        return {n: x.detach() if isinstance(x, Tensor) else x for n, x in others.items()}


class ZeRO2(ZeRO1):
    """Stage 2: gradients are reduce-scattered during backward, and only their shards are kept.

    Each backward sends all gradients, so every micro-batch pays for it; the shards accumulate.

    Cost:    per micro-batch one reduce_scatter of all gradients; per step one all_gather
    Source:  Rajbhandari et al. 2020 (ZeRO), section 5.2
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output; first launch what unused parameters have held back."""
        self._check_backward_ended()
        self.reducer.flush()
        return super().__call__(*args, **kwargs)

    def _mark_ready(self, number: int, index: int) -> None:
        super()._mark_ready(number, index)
        self.flat_params[number].accumulate(index)
        self._launch_full(number)

    def _launch_full(self, number: int) -> None:
        """Launch full flat parameters in their order, as ranks may use different layers."""
        while not self.flat_params[len(self.reducer.launched)].missing:
            self.reducer.launch(len(self.reducer.launched))


class ZeRO3(ZeRO2):
    """Stage 3: a module's parameters are gathered before it computes, and freed after.

    This happens twice per micro-batch, in forward and in backward, and on demand: the module waits
    (FSDP prefetches). Between its uses a parameter is empty; all ranks have to run the same modules
    in the same order, and to use the same parameters of each. A module has a flat parameter of its
    own, or several where it is larger than bucket_bytes.

    offload       keep the parameters' shards in the host's memory too

    Cost:    per micro-batch two all_gathers of all parameters, one reduce_scatter of all gradients
    Raises:  CourseError for a module that reads the parameters of one inside it, and for whatever
             computes with a freed parameter, such as an L2 term in the loss
    Source:  Rajbhandari et al. 2020 (ZeRO), sections 5.3 and 7.2.2
    """

    copy_instead = "full_state_dict(), loaded into another model"

    def _lay_out(self, bucket_bytes: float) -> list[FlatParam]:
        self.gather_hooks = GatherHooks(self.module, self.group, bucket_bytes, self.offload)
        return [
            flat_param
            for flat_param in self.gather_hooks.flat_params[::-1]
            if flat_param.params[0].requires_grad
        ]

    @property
    def all_flat_params(self) -> list[FlatParam]:
        """Every flat parameter of the module, frozen ones too."""
        return self.gather_hooks.flat_params

    def _launch_full(self, number: int) -> None:
        """Launch a full flat parameter at once: all ranks run the same modules in one order."""
        if not self.flat_params[number].missing:
            self.reducer.launch(number)
            self.flat_params[number].free()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output; first free what the last pass left gathered."""
        self.gather_hooks.free()
        return super().__call__(*args, **kwargs)

    def finish(self) -> None:
        """Reduce-scatter as in stage 2, and free what backward did not reach."""
        super().finish()
        self.gather_hooks.free()
