"""Exercise 2 of 07_tensor_parallel: an MLP that is split over the ranks.

The planted mistakes are in `mlp_answers.py`.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, run
from course_lib.checks.tensor_parallel import mlp_answers as planted
from course_lib.checks.tensor_parallel.parts import (
    OUTSIDE,
    WORLD_SIZES,
    calls_in,
    close_to,
    expect_close,
    expect_one_sum,
    is_outside,
    kept_bytes,
)
from course_lib.core import Event
from course_lib.ranks import RankError, Ranks, record

X_ONLY = "x's gradient, and no more: that of a bias behind the sum is whole on every rank."
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


@dataclass
class Used:
    """The results of one MLP on one rank."""

    shapes: dict[str, Any]
    values: dict[str, Tensor]
    out: Tensor
    grads: dict[str, Any] = field(default_factory=dict)
    x_grad: Tensor | None = None
    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    kept_bytes: int = 0
    outside: bool = False


def _use(rank: int, answer: Callable[..., nn.Module], width: int) -> Used:
    x, above = batch(width)
    x.requires_grad_()
    model = answer(*layers(width))
    params = {name: getattr(model, name, None) for name in NAMES}
    kinds = {
        name: list(param.shape) if isinstance(param, nn.Parameter) else _kind(param)
        for name, param in params.items()
    }
    values = {name: param.detach().clone() for name, param in params.items() if param is not None}
    with record() as forward:
        out = model(x)
    used = Used(kinds, values, out.detach().clone(), forward=calls_in(forward.events))
    used.kept_bytes = kept_bytes(model)
    with record() as backward:
        if out.requires_grad:
            used.outside = is_outside(lambda: out.backward(above))
    used.backward, used.x_grad = calls_in(backward.events), x.grad
    used.grads = {name: getattr(param, "grad", None) for name, param in params.items()}
    return used


def _kind(param: Any) -> str:
    return "nothing" if param is None else f"a {type(param).__name__}"


def check_mlp(answer: Callable[..., nn.Module]) -> str:
    """Check 1 to 4 ranks, even and uneven: values, gradients, one sum each way, only parts."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            for width in WIDTHS:
                for rank, used in enumerate(_run(ranks, answer, width)):
                    _judge(used, rank, p, width)
    return "As one process on 1 to 4 ranks, also uneven; a part of the weights on each."


def _run(ranks: Ranks, answer: Callable[..., nn.Module], width: int) -> list[Used]:
    try:
        return run(ranks, _use, answer, width, on={"mismatch": SHAPES, "hang": SHAPES})
    except CheckFailed as failed:
        cause = failed.__context__
        raised = cause.failures.values() if isinstance(cause, RankError) else ()
        if any("shape" in text or "size of tensor" in text for _, text in raised):
            raise CheckFailed(
                f"with {width} outputs of up, the shapes do not fit: a rank's outputs of up are "
                f"its inputs of down, and a width need not divide by p. {failed}"
            ) from None
        raise


def _judge(used: Used, rank: int, p: int, width: int) -> None:
    where = f"rank {rank} of {p}, {width} outputs of up"
    out, grads, x_grad = whole(width)
    mine = torch.arange(width).tensor_split(p)[rank]
    n = len(mine)
    shapes = {"up_weight": [n, HIDDEN], "up_bias": [n], "down_weight": [HIDDEN, n]}
    for name, shape in {**shapes, "down_bias": [HIDDEN]}.items():
        if used.shapes[name] != shape:
            raise CheckFailed(
                f"{where}: need {name} as an nn.Parameter of shape {shape}; got "
                f"{used.shapes[name]}. {why_shape(name, used.shapes[name], width)}"
            )
    _expect_values(used, where, mine, width, p)
    num_bytes = out.numel() * 8
    causes = output_causes(used.forward, out, width, rank, p)
    expect_close(used.out, out, f"{where}, the output", causes, ORDER)
    says = "Nothing has to be sent between up and down: their parts fit."
    expect_one_sum(f"{where}, forward", used.forward, num_bytes, says)
    if used.x_grad is None:
        raise CheckFailed(
            f"{where}: no gradient arrives at x. Did forward leave the graph, by detach or no_grad?"
        )
    whole_grad = [(close_to(p * x_grad), f"{p} times too large: who sums twice?")]
    look = NO_F if not used.backward else "Which parts are in it?"
    expect_close(used.x_grad, x_grad, f"{where}, the gradient of x", whole_grad, look)
    expect_one_sum(f"{where}, backward", used.backward, num_bytes, X_ONLY)
    parts = {"up_weight": grads["up_weight"][mine], "up_bias": grads["up_bias"][mine]}
    parts |= {"down_weight": grads["down_weight"][:, mine], "down_bias": grads["down_bias"]}
    for name, part in parts.items():
        _expect_grad(used.grads[name], part, f"{where}, the gradient of {name}", p)
    _expect_parts(used, where, shapes)
    if used.outside:
        raise CheckFailed(f"{where}: {OUTSIDE}")


def _expect_values(used: Used, where: str, mine: Tensor, width: int, p: int) -> None:
    up, down = layers(width)
    parts = {"up_weight": up.weight[mine], "up_bias": up.bias[mine]}
    parts |= {"down_weight": down.weight[:, mine], "down_bias": down.bias}
    for name, part in parts.items():
        causes = value_causes(name, part.detach(), p)
        look = "A rank keeps its numbers of the hidden layer, those in `mine`, in order."
        expect_close(used.values[name], part.detach(), f"{where}, {name}", causes, look)


def _expect_grad(got: Any, part: Tensor, where: str, p: int) -> None:
    causes: list[Cause] = [
        (close_to(part * p), f"{p} times too large: g hands its gradient on as it is."),
        (close_to(part / p), f"{p} times too small: add the whole bias, after the sum."),
    ]
    if got is None:
        raise CheckFailed(f"{where} is missing: every rank has to train it, or ranks drift apart.")
    expect_close(got, part, where, causes, "The first ranks' part comes first.")


def _expect_parts(used: Used, where: str, shapes: dict[str, list[int]]) -> None:
    needed = 8 * (HIDDEN + sum(torch.Size(shape).numel() for shape in shapes.values()))
    if used.kept_bytes > needed:
        raise CheckFailed(
            f"{where}: its part of the weights is {needed} bytes, it keeps {used.kept_bytes}. A "
            "view keeps the whole matrix it was cut from: clone it; and do not keep up and down."
        )


MLP = Exercise(
    key="tensor_parallel-2",
    title="a split MLP",
    check=check_mlp,
    reference=planted.SplitMLP,
    mistakes=(
        Mistake("bias on every rank", planted.BiasEach, says="is in it 3 times"),
        Mistake("bias / p", planted.BiasParts, says="add the whole bias, after the sum"),
        Mistake("bias on rank 0", planted.BiasFirst, says="every rank has to train it"),
        Mistake("GELU before the sum", planted.WrongWay, says="GELU of a part of a sum"),
        Mistake("no f", planted.NoCopyIn, says="Let it in through copy_to_region"),
        Mistake("no g", planted.NoSumOut, says="Nothing was summed"),
        Mistake("f behind up", planted.LateCopy, says="f stands in front of up"),
        Mistake("bias behind GELU", planted.LateBias, says="First up and its bias"),
        Mistake("mean", planted.MeanOfParts, says="terms of one sum"),
        Mistake("gathers in between", planted.Gathers, says="Nothing has to be sent between"),
        Mistake("even parts only", planted.EvenOnly, says="need not divide by p"),
        Mistake("views", planted.Views, says="A view keeps the whole matrix"),
        Mistake("keeps the layers", planted.KeepsLayers, says="do not keep up and down"),
        Mistake("keeps all of up", planted.AllOfUp, says="That is the whole of it"),
        Mistake("keeps bias / p", planted.KeepsBiasParts, says="Each rank keeps 1 / p of it"),
        Mistake("keeps bias on rank 0", planted.KeepsBiasFirst, says="Each rank keeps zeros"),
        Mistake("transposed", planted.Transposed, says="keep a weight as [out, in]"),
        Mistake("every p-th number", planted.EveryPth, says="those in `mine`"),
        Mistake("no GELU", planted.NoGelu, says="without GELU"),
        Mistake("no bias of up", planted.NoUpBias, says="bias of up is missing"),
        Mistake("f and g swapped", planted.Swapped, says="f and g are swapped"),
        Mistake("left the graph", planted.LeftTheGraph, says="no gradient arrives at x"),
        Mistake("all_reduce in the graph", planted.InTheGraph, says="is not part of the graph"),
        Mistake("no parameters", planted.OnlyTensors, says="Wrap your part in nn.Parameter"),
    ),
)


def layers(width: int) -> tuple[nn.Linear, nn.Linear]:
    """Return the whole MLP, the same on every rank."""
    random = torch.Generator().manual_seed(width)
    up, down = nn.Linear(HIDDEN, width).double(), nn.Linear(width, HIDDEN).double()
    with torch.no_grad():
        for param in (*up.parameters(), *down.parameters()):
            param.copy_(torch.randn(param.shape, generator=random, dtype=torch.double))
    return up, down


def batch(width: int) -> tuple[Tensor, Tensor]:
    """Return x and the gradient from above, [2, 3, hidden]."""
    random = torch.Generator().manual_seed(100 + width)
    x, above = torch.randn(2, 2, 3, HIDDEN, generator=random, dtype=torch.double)
    return x, above


def whole(width: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Compute on one process: the output, the gradients by name, the gradient of x."""
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
    """Return causes for a parameter of the right shape with other numbers than this rank's part."""
    if name == "down_bias":
        return [
            (close_to(part / p), BIAS_WHOLE.format(what="1 / p of it")),
            (close_to(torch.zeros_like(part)), BIAS_WHOLE.format(what="zeros")),
        ]
    turned = "Transposed: keep a weight as [out, in], as nn.Linear and F.linear have it."
    return [(close_to(part.t()), turned)]
