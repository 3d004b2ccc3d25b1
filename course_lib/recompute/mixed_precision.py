"""Train in 16 bits and remember in 32: master weights, and a loss that is scaled up.

The model computes in bf16 or fp16. A step of the optimizer is often smaller than half the distance
to the next 16-bit number and would be lost, so an fp32 copy of the weights takes the steps. And
fp16 has no numbers below 6e-8: small gradients survive only if the loss is multiplied before
backward and divided out afterwards. Notebook 03_recompute.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.core.errors import CourseError


@dataclass
class LossScale:
    """The factor on the loss: halved when a gradient overflows, doubled after a long calm.

    Source:  Micikevicius et al. 2018 (Mixed Precision Training), section 3.2
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    num_good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Take note of a step whose gradients were finite, or not."""
        self.num_good_steps = self.num_good_steps + 1 if finite else 0
        if not finite:
            self.scale *= self.backoff
        elif self.num_good_steps == self.interval:
            self.scale *= self.growth
            self.num_good_steps = 0


class MixedPrecisionOptimizer:
    """An optimizer of fp32 masters for parameters in bf16 or fp16.

        optimizer = MixedPrecisionOptimizer(model.parameters(), partial(AdamW, lr=1e-3))
        optimizer.scale(loss).backward()
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()

    `make` gets the list `masters` and returns the optimizer that is then `inner`. A parameter in
    fp32 is its own master; one without requires_grad has none. `loss_scale=None`: no scaling,
    which is enough for bf16.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make: Callable[[list[Tensor]], torch.optim.Optimizer],
        *,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.params = [param for param in params if param.requires_grad]
        if not self.params:
            raise CourseError(
                "MixedPrecisionOptimizer: need a parameter that requires a gradient; got none. "
                "Try model.parameters()."
            )
        self.masters = [_master(param) for param in self.params]
        self.inner = make(self.masters)
        self.loss_scale = loss_scale
        self._unscaled = False  # True from unscale() to zero_grad()
        self._finite = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer: a learning-rate schedule changes them."""
        return self.inner.param_groups

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self.loss_scale is None else loss.float() * self.loss_scale.scale

    def collect(self) -> None:
        """Move gradients into the masters' fp32 ones, which add them up.

        `step` does it by itself. Call it after each micro-batch's backward and the sum is kept in
        fp32, so that small micro-batches are not rounded away.
        """
        for param, master in self._halves():
            if param.grad is None:
                continue
            if self._unscaled:
                raise CourseError(
                    "MixedPrecisionOptimizer: need zero_grad() before the next backward; the last "
                    "step's gradients are still there. Try optimizer.zero_grad() after step()."
                )
            grad = param.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            param.grad = None

    def unscale(self) -> bool:
        """Divide the scale out of the masters' gradients, once a step; are all finite?

        Between `unscale` and `step` the masters' gradients are the true ones: look at or clip them
        there.
        """
        self.collect()
        if not self._unscaled:
            grads = [master.grad for master in self.masters if master.grad is not None]
            for grad in grads:
                grad.mul_(1.0 if self.loss_scale is None else 1.0 / self.loss_scale.scale)
            self._finite = all(bool(grad.isfinite().all()) for grad in grads)
            self._unscaled = True
        return self._finite

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> bool:
        """Unscale, clip, step the masters, round them into the parameters; True if it stepped.

        A step with gradients that are not finite is left out, and the scale goes down.
        """
        finite = self.unscale()
        if finite:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.masters, max_norm)
            self.inner.step()
            for param, master in self._halves():
                param.copy_(master)  # rounds to the nearest 16-bit number
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        return finite

    def zero_grad(self) -> None:
        """Forget all gradients, of parameters and of masters."""
        for tensor in [*self.params, *self.masters]:
            tensor.grad = None
        self._unscaled, self._finite = False, True

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs: the masters (the parameters are too coarse), inner state, scale."""
        return {
            "masters": [master.detach().clone() for master in self.masters],
            "inner": self.inner.state_dict(),
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; the parameters become the rounded masters."""
        if len(state["masters"]) != len(self.masters):
            raise CourseError(
                f"MixedPrecisionOptimizer: need the state of {len(self.masters)} parameters; got "
                f"one of {len(state['masters'])}. Try the model that the state was saved with."
            )
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        for param, master in self._halves():
            param.copy_(master)
        self.inner.load_state_dict(state["inner"])
        self.loss_scale = None if state["loss_scale"] is None else LossScale(**state["loss_scale"])

    def _halves(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that are not their own master, each with its master."""
        pairs = zip(self.params, self.masters, strict=True)
        return [(param, master) for param, master in pairs if param is not master]


def _master(param: nn.Parameter) -> Tensor:
    if param.dtype == torch.float32:
        return param
    return param.detach().float().requires_grad_()
