"""Linear layers whose three matrix products get operands with few bits, and sum in fp32.

Forward multiplies inputs and weights; backward multiplies gradients and weights, and gradients and
inputs. Each of the three tensors is an operand of two products, which sum over different dims; so
it is rounded once for each. Notebook 03_recompute.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Rounder = Callable[[Tensor], tuple[Tensor, Tensor]]  # for products over dim 1, and over dim 0


def unrounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x twice, as it is."""
    return x, x


def to_bf16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x twice, rounded to bf16."""
    rounded = x.bfloat16().float()
    return rounded, rounded


@dataclass(frozen=True, kw_only=True)
class Operands:
    """How the operands of one layer are rounded. Delayed scaling has a history in each of them."""

    x: Rounder = unrounded
    weight: Rounder = unrounded
    grad: Rounder = unrounded


class QuantizedLinear(nn.Module):
    """A linear layer, with the parameters of the one that it is made from.

    Shapes: [..., in] -> [..., out]
    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.3.1, figure 6, for the three products
    """

    def __init__(self, linear: nn.Linear, operands: Operands) -> None:
        super().__init__()
        self.weight, self.bias, self.operands = linear.weight, linear.bias, operands

    def forward(self, x: Tensor) -> Tensor:
        y = _Products.apply(x.reshape(-1, x.shape[-1]), self.weight, self.operands)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class _Products(torch.autograd.Function):
    """The three products. x [tokens, in], weight [out, in], grad [tokens, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operands: Operands) -> Tensor:
        x_rows, x_columns = operands.x(x)
        weight_rows, weight_columns = operands.weight(weight)
        ctx.save_for_backward(x_columns, weight_columns)
        ctx.operands = operands
        return x_rows @ weight_rows.T  # sums over in

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_rows, grad_columns = ctx.operands.grad(grads[0])
        grad_x = grad_rows @ weight  # sums over out
        grad_weight = grad_columns.T @ x  # sums over tokens
        return grad_x, grad_weight, None


def quantize_linears(module: nn.Module, make: Callable[[], Operands]) -> None:
    """Replace every linear layer in a module by a QuantizedLinear with the same parameters."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, QuantizedLinear(child, make()))
