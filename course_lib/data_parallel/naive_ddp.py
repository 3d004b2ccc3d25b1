"""Data parallelism in five steps: every rank has a replica, and mean gradients keep them equal.

`NaiveDDP` broadcasts the state once; then each step all-reduces one gradient per parameter.
`weighted_loss` weighs ranks by how many items they got, and `fingerprint` tells whether two
replicas are equal. Notebook 05_data_parallel.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.coalesced import overwrite
from course_lib.collectives.group import Group, group_of
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import check_wrappable, mark_wrapped
from course_lib.data_parallel.gradients import (
    NoSync,
    NotCopied,
    call_when_accumulated,
    check_not_replaced,
    need_dense,
    require_gradients,
    require_known,
)
from course_lib.data_parallel.guarded import OwnGrads


class NaiveDDP(NotCopied, NoSync, nn.Module):
    """A replica of `module` on every rank of the group; `finish()` averages the gradients.

    Call `finish()` after backward. The group's first rank broadcasts its parameters and buffers at
    construction, and its buffers again before a forward pass in training, as PyTorch's DDP does.
    Several backward passes before one `finish()` accumulate; inside `no_sync()` it does nothing. A
    parameter without a gradient is an error that names it; with `find_unused` its gradient counts
    as zero, and stays None if no rank has one.

    Cost:    one all_reduce per trainable parameter and step: 2 (p-1)/p * its bytes sent per rank
             (on a ring); with find_unused one more, of 8 bytes per parameter
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        *,
        find_unused: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        check_wrappable(module, group, type(self).__name__)
        self.module, self.group, self.find_unused = module, group, find_unused
        self._broadcast_buffers, self._known = broadcast_buffers, {*module.parameters()}
        self._buffers_may_differ = False  # as PyTorch has it: after a forward that will be synced
        self._own_grads = OwnGrads(self)  # from backward to finish
        broadcast_state(module, group)
        for param in module.parameters():
            if param.requires_grad:
                call_when_accumulated(param, self._mark_ready)
        mark_wrapped(module.parameters(), self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed with the first rank's buffers."""
        check_not_replaced(self)
        self._own_grads.check_not_stepped()
        if self._buffers_may_differ and self._broadcast_buffers and self.training:
            _broadcast(self.module.buffers(), self.group)
        self._buffers_may_differ = self._syncs and self.training and torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    def finish(self) -> None:
        """Replace every `param.grad` by its mean over the group. Call it after backward.

        Raises: CourseError that names parameters without a gradient (find_unused=False), or added
                since the construction
        """
        if not self._syncs:
            return
        check_not_replaced(self)
        self._own_grads.check_not_stepped()
        require_known(self.module, self._known, type(self).__name__)
        for name, param in self._with_gradient():
            group = group_of(param, self.group)
            grad = _gradient_of(param)
            need_dense(grad, name, type(self).__name__)
            total = grad.contiguous()
            dist.all_reduce(total, group=group)
            grad.copy_(total / dist.get_world_size(group))
        self._own_grads.end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those of a backward that nobody will finish."""
        check_not_replaced(self)
        self._own_grads.check_not_stepped()
        super().zero_grad(set_to_none)
        self._own_grads.end()

    @property
    def is_unfinished(self) -> bool:
        """Whether there are gradients which are not means yet, and should be: not in no_sync()."""
        return self._syncs and self._own_grads.exist

    def _mark_ready(self) -> None:
        self._own_grads.begin()

    def _with_gradient(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters to average: the same, in the same order, on every rank."""
        named = [(name, x) for name, x in self.module.named_parameters() if x.requires_grad]
        if not self.find_unused:
            missing = [name for name, param in named if param.grad is None]
            attempt = "backward() before finish(), find_unused=True, or requires_grad_(False)"
            require_gradients(missing, f"{type(self).__name__}.finish", attempt)
            return named
        device = named[0][1].device if named else None
        used = torch.tensor([int(x.grad is not None) for _, x in named], device=device)
        dist.all_reduce(used, group=self.group)
        return [one for one, count in zip(named, used.tolist(), strict=True) if count]


def weighted_loss(loss: Tensor, num_items: int, group: Group = None) -> Tensor:
    """Weigh a rank's mean loss by its share of all items: loss * num_items * p / total.

    The mean over ranks of the gradients is then the gradient of the mean over all items, and the
    mean of the returned values is that mean. A rank without items (its mean is 0 / 0) counts zero.

    Cost:    one all_reduce of one number
    Raises:  CourseError for num_items < 0
    """
    if num_items < 0:
        raise CourseError(f"weighted_loss: need num_items >= 0; got {num_items}. Try len(targets).")
    total = torch.tensor(num_items, device=loss.device)
    dist.all_reduce(total, group=group)
    if num_items == 0:
        return loss.nan_to_num() * 0  # still in the graph, so that backward gives zeros
    return loss * (num_items * dist.get_world_size(group) / total.item())


def broadcast_state(module: nn.Module, group: Group = None) -> None:
    """Broadcast the parameters and buffers of the group's first rank, one message per tensor."""
    _broadcast([*module.parameters(), *module.buffers()], group)


def fingerprint(module: nn.Module) -> str:
    """Return six characters that change with any bit of the state, to compare replicas."""
    digest = hashlib.sha256()
    for tensor in [*module.parameters(), *module.buffers()]:
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:6]


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], group: Group) -> None:
    for tensor in tensors:
        values, own = tensor.detach().contiguous(), group_of(tensor, group)
        dist.broadcast(values, dist.get_process_group_ranks(own)[0], group=own)
        overwrite(tensor, values)


def _gradient_of(param: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter; zeros if this rank has none."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
