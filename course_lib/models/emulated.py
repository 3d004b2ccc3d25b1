"""Emulated layers: they take a given time without using a processor, as on an accelerator.

On a laptop the ranks share the processors, so overlap cannot be measured with real layers.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn


def emulated_model(
    num_layers: int = 12,
    layer_bytes: int = 2**20,
    backward_s: float = 0.01,
    forward_s: float = 0.005,
) -> nn.Module:
    """Return layers that sleep for the given seconds and have float32 gradients of given bytes."""
    return nn.Sequential(
        *(EmulatedLayer(layer_bytes, forward_s, backward_s) for _ in range(num_layers))
    )


def emulated_loss(model: nn.Module, rank: int) -> Tensor:
    """Return a loss for `emulated_model`, the same on every rank."""
    return model(torch.ones(1)).sum()


class EmulatedLayer(nn.Module):
    """Layer that returns x + weight[0] and sleeps as long as a real layer would compute."""

    def __init__(self, num_bytes: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4))
        self.seconds = (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, *self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        weight_grad = torch.zeros_like(ctx.saved_tensors[0])
        weight_grad[0] = grad.sum()
        return grad, weight_grad, None, None
