"""Split backward: the gradient of the input first (I), the gradients of the weights later (W).

Another rank waits for the input's gradient; the weights' gradients can fill bubbles. During the
forward pass every operation that takes a parameter gets a detached stand-in for it, and its output
is recorded. `backward_input` asks autograd for the gradients of the input and of these outputs,
without computing any weight gradient; `backward_weight` asks each recorded operation for the
gradient of its stand-ins. Notebook 08_pipeline.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Pairs = list[tuple[nn.Parameter, Tensor]]  # parameters with their stand-ins


@dataclass
class _Use:
    """Recorded operation that took parameters: its output, their stand-ins, its output's gradient.

    version   of the output when it was recorded: a later in-place change raises it
    """

    out: Tensor
    version: int
    stand_ins: Pairs
    grad: Tensor | None = None


class SplitBackward(TorchFunctionMode):
    """Backward of one forward pass in two parts: with SplitBackward(module) as split: module(x).

    Then `backward_input` returns the gradient of x, and `backward_weight` adds to `param.grad`.

    Cost:    together the matrix products of one backward, and some 50 us for each operation that
             takes parameters. All activations stay in memory until `backward_weight`
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.params = [param for param in module.parameters() if param.requires_grad]
        self._uses: list[_Use] = []
        self._others: Pairs = [(param, param) for param in self.params]  # uses not recorded

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation in PyTorch's place, with stand-ins, and record it."""
        stand_ins: Pairs = []

        def stand_in(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(map(stand_in, value))
            if not isinstance(value, nn.Parameter) or not value.requires_grad:
                return value
            stand_ins.append((value, value.detach().requires_grad_()))
            return stand_ins[-1][1]

        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        args = [*map(stand_in, args)]
        out = func(*args, **{name: stand_in(value) for name, value in kwargs.items()})
        if not stand_ins:
            return out
        own = isinstance(out, Tensor) and all(out is not value for value in args)
        if own and out.requires_grad:
            self._uses.append(_Use(out, out._version, stand_ins))
        else:
            self._others += stand_ins  # several outputs, or in-place: done in backward_input
        return out

    def backward_input(
        self, output: Any, grad: Tensor | None, x: Tensor | None = None
    ) -> Tensor | None:
        """Return the gradient of `x`, given that of the output (a tensor or its autograd edge)."""
        intact = [use for use in self._uses if use.out._version == use.version]
        changed = [use for use in self._uses if use.out._version != use.version]
        pairs = self._others + [pair for use in changed for pair in use.stand_ins]
        inputs = [] if x is None else [x]
        wanted = [*inputs, *(use.out for use in intact), *(stand_in for _, stand_in in pairs)]
        if not wanted:
            return None
        grads = list(
            torch.autograd.grad((output,), wanted, (grad,), retain_graph=True, allow_unused=True)
        )
        x_grad = grads.pop(0) if inputs else None
        for use, out_grad in zip(intact, grads, strict=False):
            use.grad = out_grad
        _accumulate(pairs, grads[len(intact) :])
        self._uses, self._others = [use for use in intact if use.grad is not None], []
        return x_grad

    def backward_weight(self) -> None:
        """Add the weights' gradients to `param.grad`, and free the activations."""
        while self._uses:
            use = self._uses.pop()
            stand_ins = [stand_in for _, stand_in in use.stand_ins]
            grads = torch.autograd.grad(use.out, stand_ins, use.grad, allow_unused=True)
            _accumulate(use.stand_ins, grads)


def _accumulate(pairs: Pairs, grads: Iterable[Tensor | None]) -> None:
    """Add gradients to `param.grad` as backward does, hooks included."""
    found = [(pair[0], g) for pair, g in zip(pairs, grads, strict=True) if g is not None]
    if found:
        torch.autograd.backward([param for param, _ in found], [grad for _, grad in found])
