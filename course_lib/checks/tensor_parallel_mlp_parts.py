"""The MLP of exercise 2 of 07_tensor_parallel, whole, and what wrong parts of it show."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.exercise import CheckFailed
from course_lib.checks.tensor_parallel_parts import close_to
from course_lib.checks.tools import Cause
from course_lib.core import Event

HIDDEN, WIDTHS = 3, (7, 8)  # 7 is not divisible by 2, 3 or 4
NAMES = ("up_weight", "up_bias", "down_weight", "down_bias")

BIAS = (
    "The bias of down is in it {times}: each rank adds it to its part, and then the parts are "
    "summed. Add it once, after the sum."
)
BIAS_WHOLE = (
    "Each rank keeps {what}: that adds up now, but all get the whole gradient, so a step of SGD "
    "changes the sum p times too much. Keep the whole bias on every rank, add it after the sum."
)
SWAPPED = (
    "f and g are swapped: copy_to_region (f) lets x in, reduce_from_region (g) sums at the end."
)
WRONG_WAY = {
    "up_weight": "Give each rank whole outputs of up: GELU of a part of a sum is no part of "
    "GELU. weight is [out, in], so those are rows of up.weight.",
    "up_bias": "One number for each output of up that this rank has.",
    "down_weight": "The inputs of down are the outputs of up that this rank has: columns of "
    "down.weight, which is [out, in].",
    "down_bias": "Added after the sum, so whole on every rank.",
}
ORDER = "First up and its bias, then GELU, then down; then the sum, then the bias of down."
SHAPES = (
    "What is summed has the same shape on every rank. The ranks' parts of the hidden layer have "
    "not: f stands in front of up, and g behind down."
)
NO_F = (
    "That is this rank's part of it: x goes into the MLP on every rank. Let it in through "
    "copy_to_region, whose backward adds up the parts."
)


def layers(width: int) -> tuple[nn.Linear, nn.Linear]:
    """The whole MLP, the same on every rank."""
    random = torch.Generator().manual_seed(width)
    up, down = nn.Linear(HIDDEN, width).double(), nn.Linear(width, HIDDEN).double()
    with torch.no_grad():
        for param in (*up.parameters(), *down.parameters()):
            param.copy_(torch.randn(param.shape, generator=random, dtype=torch.double))
    return up, down


def batch(width: int) -> tuple[Tensor, Tensor]:
    """x and the gradient from above, [2, 3, hidden]."""
    random = torch.Generator().manual_seed(100 + width)
    x, above = torch.randn(2, 2, 3, HIDDEN, generator=random, dtype=torch.double)
    return x, above


def whole(width: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """What one process has: the output, the gradients by name, the gradient of x."""
    up, down = layers(width)
    x, above = batch(width)
    x.requires_grad_()
    out = down(F.gelu(up(x)))
    out.backward(above)
    params = (up.weight, up.bias, down.weight, down.bias)
    grads = {name: grad_of(param) for name, param in zip(NAMES, params, strict=True)}
    return out.detach(), grads, grad_of(x)


def grad_of(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise CheckFailed("there is no gradient")
    return tensor.grad


def why_shape(name: str, got: Any, width: int) -> str:
    if isinstance(got, str):
        return "Wrap your part in nn.Parameter, and keep it under that name."
    if width in got and name != "down_bias":
        whole_one = got in ([width, HIDDEN], [HIDDEN, width], [width])
        return "That is the whole of it: keep your part." if whole_one else WRONG_WAY[name]
    if name == "up_weight" and got[0] < width and got[1] == HIDDEN:
        return "A width need not divide by p: tensor_split gives the first ranks one more."
    return WRONG_WAY[name]


def output_causes(
    forward: Sequence[Event], out: Tensor, width: int, rank: int, p: int
) -> Sequence[Cause]:
    bias = layers(width)[1].bias.detach()
    x, _ = batch(width)
    up, down = (deepcopy(layer).requires_grad_(False) for layer in layers(width))
    mine = torch.arange(width).tensor_split(p)[rank]
    many = F.gelu(up(p * x))[..., mine] @ down.weight[:, mine].T + bias
    causes: list[Cause] = [
        (close_to(many) if p > 1 else lambda got: False, SWAPPED),
        (close_to(down(up(x))), "That is without GELU, which stands between up and down."),
        (close_to(down(F.gelu(up(x) - up.bias))), "The bias of up is missing, in front of GELU."),
        (close_to(out + (p - 1) * bias), BIAS.format(times=f"{p} times")),
        (close_to(out - bias), "The bias of down is missing."),
        (close_to((out - bias) / p + bias), "That is a mean: the parts are terms of one sum."),
    ]
    if not forward:
        nothing = "Nothing was summed: every rank has a part of each output."
        causes.append((lambda got: p > 1, nothing))
    return causes


def value_causes(name: str, part: Tensor, p: int) -> list[Cause]:
    """Why a parameter of the right shape holds other numbers than this rank's part."""
    if name == "down_bias":
        return [
            (close_to(part / p), BIAS_WHOLE.format(what="1 / p of it")),
            (close_to(torch.zeros_like(part)), BIAS_WHOLE.format(what="zeros")),
        ]
    turned = "Transposed: keep a weight as [out, in], as nn.Linear and F.linear have it."
    return [(close_to(part.t()), turned)]
