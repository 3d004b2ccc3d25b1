"""Mixed precision: compute in 16 bits with fp32 master weights and loss scaling.

The model computes in bf16 or fp16. An optimizer step is often smaller than half the distance to the
next 16-bit number and would be lost, so it is applied to an fp32 copy of the weights, the masters.
And fp16 has no numbers below 6e-8: small gradients survive only if the loss is multiplied by a
scale before backward, which is divided out afterwards. Notebook 03_recompute.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.core.errors import CourseError


@dataclass
class LossScale:
    """Dynamic loss scale: halved when a gradient overflows, doubled after `interval` good steps.

    Source:  Micikevicius et al. 2018 (Mixed Precision Training), section 3.2
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    num_good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step whose gradients were all finite, or not."""
        self.num_good_steps = self.num_good_steps + 1 if finite else 0
        if not finite:
            self.scale *= self.backoff
        elif self.num_good_steps == self.interval:
            self.scale *= self.growth
            self.num_good_steps = 0


class MixedPrecisionOptimizer:
    """Optimizer of fp32 masters for parameters in bf16 or fp16.

        optimizer = MixedPrecisionOptimizer(model.parameters(), partial(AdamW, lr=1e-3))
        optimizer.scale(loss).backward()
        optimizer.step(max_norm=1.0)
        optimizer.zero_grad()

    make         builds the optimizer `inner` from the list `masters`; a parameter in fp32 is its
                 own master, one without requires_grad has none
    loss_scale   None: no scaling, which is enough for bf16

    Raises: CourseError if no parameter requires a gradient
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
        """Parameter groups of the inner optimizer, for learning-rate schedules."""
        return self.inner.param_groups

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call backward on."""
        return loss if self.loss_scale is None else loss.float() * self.loss_scale.scale

    def collect(self) -> None:
        """Add the parameters' gradients to the masters' fp32 gradients, and clear them.

        `step` calls it. Call it after each micro-batch's backward to accumulate in fp32, so that
        small contributions are not rounded away.

        Raises: CourseError between `step` and `zero_grad`
        """
        for param, master in self._pairs():
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
        """Divide the masters' gradients by the scale, once a step; return whether all are finite.

        Between `unscale` and `step` the masters' gradients are the true ones and can be inspected
        or clipped.
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
        """Unscale, clip, step the masters, round them into the parameters; return True if stepped.

        If a gradient is not finite, the step is skipped and the scale is reduced.
        """
        finite = self.unscale()
        if finite:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.masters, max_norm)
            self.inner.step()
            for param, master in self._pairs():
                param.copy_(master)  # rounds to the nearest 16-bit number
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        return finite

    def zero_grad(self) -> None:
        """Clear all gradients, of parameters and of masters."""
        for tensor in [*self.params, *self.masters]:
            tensor.grad = None
        self._unscaled, self._finite = False, True

    def state_dict(self) -> dict[str, Any]:
        """Return masters (the parameters are too coarse), inner state and scale, for a restart."""
        return {
            "masters": [master.detach().clone() for master in self.masters],
            "inner": self.inner.state_dict(),
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state_dict()`; the parameters become the rounded masters.

        Raises: CourseError for the state of another number of parameters
        """
        if len(state["masters"]) != len(self.masters):
            raise CourseError(
                f"MixedPrecisionOptimizer: need the state of {len(self.masters)} parameters; got "
                f"one of {len(state['masters'])}. Try the model that the state was saved with."
            )
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        for param, master in self._pairs():
            param.copy_(master)
        self.inner.load_state_dict(state["inner"])
        self.loss_scale = None if state["loss_scale"] is None else LossScale(**state["loss_scale"])

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return (16-bit parameter, master) for all parameters that are not their own master."""
        pairs = zip(self.params, self.masters, strict=True)
        return [(param, master) for param, master in pairs if param is not master]


def _master(param: nn.Parameter) -> Tensor:
    if param.dtype == torch.float32:
        return param
    return param.detach().float().requires_grad_()
