"""Exercise 2 of 07_tensor_parallel: an MLP of which every rank has a part.

The planted mistakes are in `tensor_parallel_mlp_mistakes`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks import tensor_parallel_mlp_mistakes as planted
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.tensor_parallel_mlp_parts import (
    HIDDEN,
    NAMES,
    NO_F,
    ORDER,
    SHAPES,
    WIDTHS,
    batch,
    layers,
    output_causes,
    value_causes,
    whole,
    why_shape,
)
from course_lib.checks.tensor_parallel_parts import (
    OUTSIDE,
    WORLD_SIZES,
    calls_in,
    close_to,
    expect_close,
    expect_one_sum,
    is_outside,
    kept_bytes,
)
from course_lib.checks.tools import Cause, run
from course_lib.core import Event
from course_lib.ranks import RankError, Ranks, record

X_ONLY = "x's gradient, and no more: that of a bias behind the sum is whole on every rank."


@dataclass
class Used:
    """What one MLP left on one rank."""

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
    """1 to 4 ranks, even and uneven: values, gradients, one sum each way, parts and no more."""
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
        Mistake("mean", planted.Mean, says="terms of one sum"),
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
        Mistake("no parameters", planted.Tensors, says="Wrap your part in nn.Parameter"),
    ),
)
