"""Exercise 4 of 09_zero: a linear layer whose weights are allocated only while it computes.

The planted mistakes are in `linear_answers.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, run
from course_lib.checks.tensor_parallel.parts import close_to, expect_close
from course_lib.checks.zero import linear_answers as planted
from course_lib.checks.zero.parts import (
    NUMBER_BYTES,
    WORLD_SIZES,
    alive_bytes,
    calls_in,
    expect_calls,
    flat,
    only_new,
    shard_of,
)
from course_lib.ranks import RankError, Ranks, record
from course_lib.zero.flat_layout import FlatLayout

TOKENS, WIDTH = 2, 5  # a square layer, which is used twice: 30 numbers, uneven on 4 ranks
OUT_BYTES = TOKENS * WIDTH * NUMBER_BYTES
KEEPS = (
    "Never freed: what save_for_backward, an attribute of ctx or autograd itself holds lives until "
    "backward. Keep x and the shard, and gather again in backward."
)


@dataclass
class Used:
    """The results of one use of the layer on one rank."""

    out: Tensor
    x_grad: Tensor | None
    shard_grad: Tensor | None
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    alive_bytes: int
    left_bytes: int


def _layer() -> nn.Linear:
    """Return the whole layer, the same on every rank."""
    random = torch.Generator().manual_seed(5)
    layer = nn.Linear(WIDTH, WIDTH).double()
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=random, dtype=torch.double))
    return layer


def _batch(rank: int) -> tuple[Tensor, Tensor]:
    """Return x of a rank, and the gradient from above."""
    random = torch.Generator().manual_seed(100 + rank)
    x, above = torch.randn(2, TOKENS, WIDTH, generator=random, dtype=torch.double)
    return x, above


def _layout(p: int) -> FlatLayout:
    return FlatLayout.of(_layer().parameters(), p)


def _use(rank: int, answer: Any, p: int, times: int) -> Used:
    layout, (x, above) = _layout(p), _batch(rank)
    shard = nn.Parameter(shard_of(flat([*_layer().parameters()]), rank, p))
    x.requires_grad_()
    with only_new():
        return _watched(getattr(answer, "apply", answer), (x, shard, layout), above, times)


def _watched(
    apply: Callable[..., Tensor],
    given: tuple[Tensor, Tensor, FlatLayout],
    above: Tensor,
    times: int,
) -> Used:
    x, shard, layout = given
    with record() as forward:
        out = x
        for _ in range(times):
            out = apply(out, shard, layout)
    result = out.detach().clone()
    between = alive_bytes(x, shard, result, enough=OUT_BYTES * times)
    with record() as backward:
        if out.requires_grad:
            out.backward(above)
    del out
    x_grad, shard_grad = (None if one.grad is None else one.grad.clone() for one in (x, shard))
    x.grad = shard.grad = None
    grads = [grad for grad in (x_grad, shard_grad) if grad is not None]
    left = alive_bytes(x, shard, result, *grads, enough=0)
    sent, back = (calls_in(log.events) for log in (forward, backward))
    return Used(result, x_grad, shard_grad, sent, back, between, left)


def check_linear(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, used once and twice: values, gradients, calls, what is alive."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            for times in (1, 2):
                for rank, used in enumerate(_run(ranks, answer, p, times)):
                    _judge(used, rank, p, times)
    return "As one process, once and twice; the whole weights are gone after forward and backward."


def _run(ranks: Ranks, answer: Any, p: int, times: int) -> list[Used]:
    try:
        return run(ranks, _use, answer, p, times)
    except CheckFailed as failed:
        cause = failed.__context__
        raised = cause.failures.values() if isinstance(cause, RankError) else ()
        invalid = [text for _, text in raised if "returned an invalid gradient" in text]
        if any("at index 0" in text for text in invalid):
            raise CheckFailed(
                "the gradient for x has another shape than x: backward returns gradients in the "
                f"order in which forward takes x, shard and layout. {failed}"
            ) from None
        if invalid:
            raise CheckFailed(
                "the gradient for `shard` has another shape than the shard: each rank keeps its "
                f"part of the mean, and that is what reduce_scatter leaves. {failed}"
            ) from None
        raise


def _whole(p: int, times: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Compute on one process: the output and gradient of x of each rank, and the mean gradient."""
    layer, outs, x_grads = _layer(), [], []
    for rank in range(p):
        x, above = _batch(rank)
        x.requires_grad_()
        out = x
        for _ in range(times):
            out = layer(out)
        out.backward(above)
        outs.append(out.detach())
        x_grads.append(_grad(x))
    return outs, x_grads, flat([_grad(param) for param in layer.parameters()]) / p


def _grad(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise CheckFailed("there is no gradient")
    return tensor.grad


def _judge(used: Used, rank: int, p: int, times: int) -> None:
    where = f"rank {rank} of {p}, used {'twice' if times == 2 else 'once'}"
    outs, x_grads, mean = _whole(p, times)
    row_bytes = _layout(p).padded_numel * NUMBER_BYTES
    expect_close(used.out, outs[rank], f"{where}, the output", _out_causes(rank, times))
    gathers = [("all_gather", row_bytes)] * times
    expect_calls(f"{where}, forward", used.forward, gathers, "One all_gather puts it together.")
    _expect_freed(used, where, times)
    if used.x_grad is None or used.shard_grad is None:
        raise CheckFailed(f"{where}: no gradient arrives at x, or at the shard: return both.")
    causes: list[Cause] = [
        (close_to(torch.stack(x_grads).sum(0)), f"Summed over the ranks: {TOKENS_OF_ITS_OWN}"),
        (close_to(torch.stack(x_grads).mean(0)), f"A mean over the ranks: {TOKENS_OF_ITS_OWN}"),
    ]
    look = "The gradient of x is grad @ weight."
    expect_close(used.x_grad, x_grads[rank], f"{where}, the gradient of x", causes, look)
    wanted = shard_of(mean, rank, p)
    causes = _grad_causes(wanted, rank, p, times)
    look = (
        "weight has the gradient grad.T @ x, the bias grad.sum(0); flat, in that order, filled up."
    )
    expect_close(used.shard_grad, wanted, f"{where}, the gradient of the shard", causes, look)
    back = [("all_gather", row_bytes), ("reduce_scatter", row_bytes)] * times
    got = sorted(used.backward)  # the two may come in any order
    expect_calls(f"{where}, backward", got, sorted(back), _why_back(got))


def _expect_freed(used: Used, where: str, times: int) -> None:
    """Demand that only x, and the shard by the parameter, are kept between the layers."""
    between = OUT_BYTES * times  # the outputs: of the layer, and under way
    if used.alive_bytes > between:
        raise CheckFailed(
            f"{where}: after forward {used.alive_bytes} bytes are alive that were not there "
            f"before; the outputs are {between}. {KEEPS}"
        )
    if used.left_bytes > 0:
        raise CheckFailed(f"{where}: {used.left_bytes} bytes are still alive after backward.")


def _out_causes(rank: int, times: int) -> list[Cause]:
    layer, (x, _) = _layer(), _batch(rank)
    turned, bare = x, x
    for _ in range(times):
        turned = turned @ layer.weight + layer.bias
        bare = bare @ layer.weight.T
    return [
        (close_to(turned.detach()), "The weight is [out, in]: x @ weight.T, which F.linear does."),
        (close_to(bare.detach()), "The bias is missing."),
    ]


def _grad_causes(wanted: Tensor, rank: int, p: int, times: int) -> list[Cause]:
    own = _own_grad(rank, times)
    return [
        (close_to(wanted * p), "Summed, not averaged: divide by the number of ranks."),
        (close_to(wanted / p), "Averaged twice: divide by the number of ranks once."),
        (close_to(shard_of(own, rank, p)), OWN),
        (close_to(shard_of(own / p, rank, p)), OWN),
    ]


TOKENS_OF_ITS_OWN = "but each rank has tokens of its own."
OWN = "Only this rank's own tokens are in it: the others' come with a reduce_scatter."


def _own_grad(rank: int, times: int) -> Tensor:
    layer, (x, above) = _layer(), _batch(rank)
    out = x
    for _ in range(times):
        out = F.linear(out, layer.weight, layer.bias)
    out.backward(above)
    return flat([_grad(param) for param in layer.parameters()])


def _why_back(calls: Sequence[tuple[str, int]]) -> str:
    kinds = [kind for kind, _ in calls]
    if "all_reduce" in kinds:
        return "An all_reduce gives every rank the whole gradient: a reduce_scatter leaves a shard."
    if "all_gather" not in kinds:
        return "Without a gather in backward, somebody kept the weights from forward."
    return "Backward: gather the weights again, then reduce_scatter their gradient."


LINEAR = Exercise(
    key="zero-4",
    title="gather, use, free",
    check=check_linear,
    reference=planted.ShardedLinear,
    mistakes=planted.mistakes(Mistake),
)
