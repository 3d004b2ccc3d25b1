"""ZeRO: data parallelism that stops keeping copies, one kind of state after the other.

Every rank still computes the whole model on its own part of the batch. Stage 1 shards what only the
optimizer needs, stage 2 the gradients too, stage 3 the parameters as well. Each stage is the one
before, and what it says differently is what it no longer keeps whole. Notebook 09_zero.

                    ZeRO1                     ZeRO2                      ZeRO3
    parameters      whole                     whole                      shard
    gradients       whole until the step      a bucket at a time, shard  a module at a time, shard
    optimizer       shard                     shard                      shard
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.collectives.coalesced import broadcast_together, group_alike
from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.zero.flat_param import FlatParam
from course_lib.zero.gather_hooks import GatherHooks
from course_lib.zero.offload import Offload
from course_lib.zero.reducer import Reducer, agree_on_used
from course_lib.zero.sharded_optimizer import ShardedOptimizer, need_elementwise, need_some

BUCKET_BYTES = 25 * 2**20


class ZeRO1:
    """Stage 1: a model and its optimizer, whose state every rank of the group has 1/p of.

    engine = ZeRO1(module, torch.optim.AdamW, lr=1e-3)
    engine.zero_grad(); loss_of(engine(inputs)).backward(); engine.step()

    Several backward passes before a step add up. Parameters and buffers are those of the group's
    first rank; its buffers also before each forward in training.

    param_groups  as for the optimizer; everything that is trained if not given
    bucket_bytes  gradients travel in buckets of about this size
    find_unused   a parameter without a gradient on this rank counts as zero, and is not stepped if
                  no rank has one. Costs one small all_reduce more. Otherwise it is an error
    offload       the optimizer's state, and its step, are in the host's memory

    Cost:    a step: one reduce_scatter of all gradients, one all_gather of all parameters
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
        **defaults: Any,
    ) -> None:
        member_of(group, type(self).__name__)
        need_elementwise(optimizer_cls)
        self.module, self.group = module, group or dist.group.WORLD
        self.find_unused, self.broadcast_buffers = find_unused, broadcast_buffers
        trained = [param for param in module.parameters() if param.requires_grad]
        need_some(trained)
        broadcast_together([*module.parameters(), *module.buffers()], self.group)
        self.offload = Offload(next(module.parameters()).device) if offload else None
        self.flat_params = self._lay_out(bucket_bytes)
        self.optimizer = ShardedOptimizer(
            trained if param_groups is None else param_groups,
            optimizer_cls,
            self.group,
            offload=self.offload or False,
            flat_params=self.flat_params,
            **defaults,
        )
        self.reducer, self._agreed = Reducer(self.flat_params), False
        this = weakref.ref(self)  # a hook lives as long as its parameter: it must not keep us
        for number, flat_param in enumerate(self.flat_params):
            for index, param in enumerate(flat_param.params):
                param.register_post_accumulate_grad_hook(partial(_arrived, this, number, index))

    def _lay_out(self, bucket_bytes: float) -> list[FlatParam]:
        """One flat_param a bucket, in the order in which backward fills them: the last parameter first."""
        named = [item for item in self.module.named_parameters() if item[1].requires_grad][::-1]
        parts = group_alike([param for _, param in named], bucket_bytes)
        return [FlatParam([named[n] for n in part], self.group) for part in sorted(parts, key=max)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self.broadcast_buffers and self.module.training and torch.is_grad_enabled():
            broadcast_together(self.module.buffers(), self.group)
        return self.module(*args, **kwargs)

    def _arrive(self, number: int, index: int) -> None:
        """Backward has added to a parameter's gradient. Stage 1: it stays there until the step."""
        self.reducer.note(number, index)
        self._agreed = False

    def finish(self) -> None:
        """Let all gradients leave: what is left is this rank's shard of their mean.

        `step` and `clip_grad_norm_` call it.
        """
        self.reducer.end()
        if not self._agreed:
            agree_on_used(self.flat_params, self.group, self.find_unused, type(self).__name__)
            self._agreed = True

    def step(self) -> None:
        """Step this rank's shard, and let everybody have the parameters again."""
        self.finish()
        self.optimizer.step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Make the norm of the whole mean gradient max_norm at most; return what it was."""
        self.finish()
        return self.optimizer.clip_grad_norm_(max_norm)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.reducer.forget()
        self._agreed = False
        self.optimizer.zero_grad()

    @property
    def all_flat_params(self) -> list[FlatParam]:
        """Every flat_param that parameters lie in."""
        return self.flat_params

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of everything: for the same rank of a group of the same size."""
        return {
            "shards": [flat_param.shard.clone() for flat_param in self.all_flat_params],
            "others": {name: tensor.clone() for name, tensor in self._others().items()},
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict()`. Raises: CourseError for another rank's."""
        kept = [[*shard.shape] for shard in state["shards"]]
        wanted = [[*flat_param.shard.shape] for flat_param in self.all_flat_params]
        if kept != wanted:
            raise CourseError(
                f"{type(self).__name__}.load_state_dict: need shards of {wanted[:3]}; got "
                f"{kept[:3]}. Try full_state_dict() and load_full_state_dict(): any layout fits."
            )
        for flat_param, shard in zip(self.all_flat_params, state["shards"], strict=True):
            flat_param.shard.copy_(shard)
            if not flat_param.only_shard:
                flat_param.gather()
        for name, tensor in self._others().items():
            tensor.copy_(state["others"][name])
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """`model` and `optimizer` as one process would save them, on every rank, on the host."""
        values: dict[int, Tensor] = {}
        for flat_param in self.all_flat_params:
            if flat_param.is_free:
                flat_param.gather()
            values |= {id(param): _on_host(param) for param in flat_param.params}
            flat_param.free()
        model = self.module.state_dict(keep_vars=True)
        return {
            "model": {
                name: values[id(tensor)] if id(tensor) in values else _on_host(tensor)
                for name, tensor in model.items()
            },
            "optimizer": self.optimizer.full_state_dict(),
        }

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `full_state_dict()` of any stage and any number of ranks."""
        model, saved = self.module.state_dict(keep_vars=True), state["model"]
        if model.keys() != saved.keys():
            odd = sorted(model.keys() ^ saved.keys())
            raise CourseError(
                f"{type(self).__name__}.load_full_state_dict: need the state of the same model; "
                f"got one that differs in {', '.join(odd[:4])}. Try the model it was saved with."
            )
        values = {id(tensor): saved[name] for name, tensor in model.items()}
        for flat_param in self.all_flat_params:
            flat_param.load([values[id(param)] for param in flat_param.params])
        for name, tensor in self._others().items():
            tensor.copy_(saved[name])
        self.optimizer.load_full_state_dict(state["optimizer"])

    def _others(self) -> dict[str, Tensor]:
        """Buffers, and frozen parameters that lie in no flat_param."""
        in_rows = {id(param) for flat_param in self.all_flat_params for param in flat_param.params}
        model = self.module.state_dict(keep_vars=True)
        return {name: x.detach() for name, x in model.items() if id(x) not in in_rows}


class ZeRO2(ZeRO1):
    """Stage 2: gradients leave during backward, a bucket at a time, and only shards are kept.

    Each backward sends all gradients, so with micro-batches each of them pays; the shards add up.

    Cost:    a micro-batch: one reduce_scatter of all gradients; a step: one all_gather
    Source:  Rajbhandari et al. 2020 (ZeRO), section 5.2
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; what an unused parameter has held up leaves first."""
        self.reducer.end()
        return super().__call__(*args, **kwargs)

    def _arrive(self, number: int, index: int) -> None:
        super()._arrive(number, index)
        self.flat_params[number].take(index)
        self._send_what_is_full(number)

    def _send_what_is_full(self, number: int) -> None:
        """In the order of the flat_params, because ranks may use other layers than each other."""
        while not self.flat_params[len(self.reducer.left)].missing:
            self.reducer.send(len(self.reducer.left))


class ZeRO3(ZeRO2):
    """Stage 3: a module's parameters are gathered when it computes, and freed when it has.

    So twice a micro-batch: in forward, and again in backward. On demand: the module waits for them.
    Between its uses a parameter is empty; all ranks have to run the same modules in the same order.
    A module has a flat_param of its own, or several where it is larger than bucket_bytes.

    offload       the parameters' shards are in the host's memory too

    Cost:    a micro-batch: two all_gathers of all parameters, one reduce_scatter of all gradients
    Raises:  CourseError for a module that reads the parameters of one inside it
    Source:  Rajbhandari et al. 2020 (ZeRO), sections 5.3 and 7.2.2
    """

    def _lay_out(self, bucket_bytes: float) -> list[FlatParam]:
        self.modules = GatherHooks(self.module, self.group, bucket_bytes, self.offload)
        return [
            flat_param
            for flat_param in self.modules.flat_params[::-1]
            if flat_param.params[0].requires_grad
        ]

    @property
    def all_flat_params(self) -> list[FlatParam]:
        """Every flat_param that parameters lie in, frozen ones too."""
        return self.modules.flat_params

    def _send_what_is_full(self, number: int) -> None:
        """At once: gathers have their order from the program, so it is the same on all ranks."""
        if not self.flat_params[number].missing:
            self.reducer.send(number)
            self.flat_params[number].free()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        self.modules.free()
        return super().__call__(*args, **kwargs)

    def finish(self) -> None:
        """As in stage 2; and what backward has not freed, because it did not come by, is freed."""
        super().finish()
        self.modules.free()


def _arrived(this: "weakref.ref[ZeRO1]", number: int, index: int, param: Tensor) -> None:
    """The hook of one parameter, called each time backward has added to its `grad`."""
    engine = this()
    if engine is not None:
        with torch.no_grad():
            engine._arrive(number, index)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
