"""Exercise 4 of 09_zero: a linear layer whose weights are allocated only while it computes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Bytes, Calls, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of, copied
from course_lib.checks.zero.parts import (
    ALL_WAITED,
    DTYPE,
    LENGTHS,
    NOT_WAITED,
    ROUNDING,
    WRONG_BUFFER,
    alive_bytes,
    flat,
    named,
    only_new,
    shard_of,
    unless_alone,
    unwaited_calls,
)
from course_lib.core import Event
from course_lib.ranks import record
from course_lib.zero.flat_layout import FlatLayout


@dataclass(frozen=True)
class Use:
    """Use of a layer: tokens of `num_in` numbers go through it `times` times."""

    num_in: int
    num_out: int
    tokens: int
    times: int
    dtype: torch.dtype

    def layer(self) -> nn.Linear:
        """Return the whole layer, the same on every rank."""
        layer = nn.Linear(self.num_in, self.num_out)
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(_numbers(5, *param.shape))
        return layer.to(self.dtype)

    def layout(self, p: int) -> FlatLayout:
        """Return the layout of its weight and bias on p ranks."""
        return FlatLayout(((self.num_out, self.num_in), (self.num_out,)), p)

    def batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return x of a rank, and the gradient from above."""
        x = _numbers(100 + rank, self.tokens, self.num_in)
        above = _numbers(200 + rank, self.tokens, self.num_out)
        return x.to(self.dtype).requires_grad_(), above.to(self.dtype)

    def __str__(self) -> str:
        times = {1: "once", 2: "twice"}[self.times]
        sizes = f"{self.num_in} to {self.num_out} numbers"
        return f"a layer of {sizes} in {named(self.dtype)}, used {times}"


def _numbers(seed: int, *shape: int) -> Tensor:
    """Return numbers between 1 and 2, so that no sum cancels and rounding stays small."""
    return 1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed)).double()


USES = (
    Use(5, 5, 2, 1, torch.float64),  # 30 numbers: uneven on 4 ranks
    Use(5, 5, 2, 2, torch.float64),
    Use(2, 5, 3, 1, torch.bfloat16),
)

INPUT_ORDER = Cause(
    "The gradient for x has another shape than x: backward returns gradients in the order in which "
    "forward takes x, shard and layout."
)
NO_SHARD = Cause(
    "The gradient for `shard` has another shape than the shard: each rank keeps its part of the "
    "mean, and that is what reduce_scatter leaves."
)
FREED = Cause("Backward works on what forward has freed: gather the weights again.")
TRANSPOSED = Cause("The weight is [out, in]: x @ weight.T, which F.linear does.")
NO_BIAS = Cause("The bias is missing.")
KEEPS = Cause(
    "Never freed: what save_for_backward, an attribute of ctx or autograd itself holds lives until "
    "backward. Keep x and the shard, and gather again in backward."
)
ONE_GATHER = Cause("One all_gather puts it together; what one rank computes, it need not send.")
NO_GRADIENT = Cause("backward returns a gradient for x, one for the shard, and None for layout.")
TOKENS = Cause(
    "The gradient of x is grad @ weight, with no sum over the ranks: each has tokens of its own."
)
SUMMED = Cause("{p} times too large: summed, not averaged. Divide by the number of ranks.")
AVERAGED_TWICE = Cause("{p} times too small: divide by the number of ranks once.")
OWN = Cause("Only this rank's own tokens are in it: the others' come with a reduce_scatter.")
SHARD_GRADIENT = Cause(
    "weight has the gradient grad.T @ x, the bias grad.sum(0); flat, in that order, filled up; "
    "then the mean over the ranks."
)
ALL_REDUCE = Cause(
    "An all_reduce gives every rank the whole gradient: a reduce_scatter leaves a shard."
)
NO_GATHER = Cause("Without a gather in backward, somebody kept the weights from forward.")
BACKWARD_CALLS = Cause("Backward: gather the weights again, then reduce_scatter their gradient.")
LEFT = Cause("Who holds a whole tensor after backward: an attribute, a list, a view of it?")
VIEW = Cause(
    "The gradient of the shard is a view, and keeps the whole flat gradient that it was cut from."
)
READ_ONLY = Cause("backward and forward only read what they get: others may need it.")


@dataclass
class Used:
    """One use of the layer on one rank."""

    out: Any
    x_grad: Any
    shard_grad: Any
    forward: list[Event]
    backward: list[Event]
    unwaited: list[str]
    alive_bytes: int
    left_bytes: int
    grad_bytes: int  # that the gradient of the shard keeps
    changed: bool


def _use(rank: int, answer: Any, use: Use) -> dict[str, Used]:
    p = dist.get_world_size()
    layout, (x, above) = use.layout(p), use.batch(rank)
    shard = nn.Parameter(shard_of(flat([*use.layer().parameters()]), rank, p))
    given = [tensor.detach().clone() for tensor in (x, shard, above)]
    apply = getattr(answer, "apply", answer)
    with only_new(), unwaited_calls() as unwaited:
        with record() as forward:
            out = x
            for _ in range(use.times):
                out = apply(out, shard, layout)
        result = copied(out)
        results = [result] if isinstance(result, Tensor) else []
        between = alive_bytes(x, shard, *results, enough=_out_bytes(use))
        with record() as backward:
            if isinstance(out, Tensor) and out.requires_grad:
                out.backward(above)
        del out
        x_grad, shard_grad = copied([x.grad, shard.grad])
        grad_bytes = 0 if shard.grad is None else shard.grad.untyped_storage().nbytes()
        x.grad = shard.grad = None
        grads = [grad for grad in (x_grad, shard_grad) if grad is not None]
        left = alive_bytes(x, shard, *results, *grads, enough=0)
    changed = not all(map(torch.equal, given, (x, shard, above)))
    calls = calls_of(forward.events), calls_of(backward.events)
    unwaited_kinds = list(unwaited.values())
    return {
        str(use): Used(
            result, x_grad, shard_grad, *calls, unwaited_kinds, between, left, grad_bytes, changed
        )
    }


def _out_bytes(use: Use) -> int:
    """Return the bytes of the outputs: of the layer, and under way."""
    return use.tokens * use.num_out * use.dtype.itemsize * use.times


@cache
def _whole(use: Use, p: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return each rank's output, gradient of x, and flat gradient, computed in one process."""
    outs, x_grads, grads = list[Tensor](), list[Tensor](), list[Tensor]()
    for rank in range(p):
        layer, (x, above) = use.layer(), use.batch(rank)
        out = x
        for _ in range(use.times):
            out = layer(out)
        out.backward(above)
        outs.append(out.detach())
        x_grads.append(copied(x.grad))
        grads.append(flat([copied(param.grad) for param in layer.parameters()]))
    return outs, x_grads, grads


def _grads(at: At) -> Tensor:
    return torch.stack(_whole(at.options["use"], at.world_size)[2])


def _mean(at: At) -> Tensor:
    return shard_of(_grads(at).sum(0) / at.world_size, at.rank, at.world_size)


def _own(at: At) -> Tensor:
    return shard_of(_grads(at)[at.rank], at.rank, at.world_size)


def _computed_by(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[At], Tensor]:
    """Return the output of another formula."""

    def out(at: At) -> Tensor:
        use: Use = at.options["use"]
        whole, x = use.layer(), use.batch(at.rank)[0].detach()
        for _ in range(use.times):
            x = layer(x, whole.weight.detach(), whole.bias.detach())
        return x

    return out


def _needed(*kinds: str) -> Callable[[At], list[tuple[str, int]]]:
    def calls(at: At) -> list[tuple[str, int]]:
        use: Use = at.options["use"]
        num_bytes = use.layout(at.world_size).padded_numel * use.dtype.itemsize
        return [(kind, num_bytes) for kind in kinds for _ in range(use.times)]

    return calls


def _by_kind(at: At) -> list[Event]:
    """Return the calls of backward, whose two may come in any order."""
    return sorted(at.seen.backward, key=lambda call: call.kind)


def _rtol(at: At) -> float:
    return ROUNDING[at.options["use"].dtype]


GATHERS = "weight, bias = whole(shard, layout)"
COMPUTES = "F.linear(x, weight, bias)"
FORWARD = f"ctx.save_for_backward(x, shard)\n        ctx.layout = layout\n        {GATHERS}"
KEEPING = f"{GATHERS}\n        ctx.layout = layout\n        ctx.save_for_backward(x, shard, weight)"
AGAIN = "x, shard = ctx.saved_tensors\n        weight, _ = whole(shard, ctx.layout)"
FLATTENS = "ctx.layout.flatten([grad.T @ x, grad.sum(0)])"
SENDS = "dist.reduce_scatter_single(mean, flat)"
MINE = "flat[ctx.layout.shard_slice(dist.get_rank())]"
MEAN = "mean / dist.get_world_size()"
GATHERED = "dist.all_gather_single(flat, shard.detach())"

LINEAR = Exercise(
    key="zero-4",
    title="gather, use, free",
    check=OnRanks(
        observe_on_rank=_use,
        runs=lambda _p: [{"use": use} for use in USES],
        trouble=(
            ("raised", "invalid gradient at index 0", INPUT_ORDER),
            ("raised", "invalid gradient at index 1", NO_SHARD),
            ("raised", "not allocated|of storage|setStorage", FREED),
            *WRONG_BUFFER,
        ),
        expect=(
            ALL_WAITED,
            Numbers(
                "out",
                lambda at: _whole(at.options["use"], at.world_size)[0][at.rank],
                rtol=_rtol,
                what="the output",
                causes=(
                    (TRANSPOSED, _computed_by(lambda x, weight, bias: x @ weight + bias)),
                    (NO_BIAS, _computed_by(lambda x, weight, _bias: x @ weight.T)),
                ),
                look=TRANSPOSED,
            ),
            Calls(
                unless_alone(_needed("all_gather"), "forward"),
                other_kind=ONE_GATHER,
                look=ONE_GATHER,
                value="forward",
            ),
            Bytes(
                "alive_bytes",
                lambda at: _out_bytes(at.options["use"]),
                KEEPS,
                what="besides x and the shard, after forward it keeps",
            ),
            Demand(lambda at: not at.seen.changed, "an input has changed", READ_ONLY),
            Demand(
                lambda at: at.seen.x_grad is not None and at.seen.shard_grad is not None,
                "no gradient arrives at x, or at the shard",
                NO_GRADIENT,
            ),
            Numbers(
                "x_grad",
                lambda at: _whole(at.options["use"], at.world_size)[1][at.rank],
                rtol=_rtol,
                what="the gradient of x",
                look=TOKENS,
            ),
            Numbers(
                "shard_grad",
                _mean,
                rtol=_rtol,
                what="the gradient of the shard",
                causes=(
                    (SUMMED, lambda at: _mean(at) * at.world_size),
                    (AVERAGED_TWICE, lambda at: _mean(at) / at.world_size),
                    (OWN, _own),
                    (OWN, lambda at: _own(at) / at.world_size),
                ),
                look=SHARD_GRADIENT,
            ),
            Calls(
                unless_alone(_needed("all_gather", "reduce_scatter"), _by_kind),
                other_kind=ALL_REDUCE,
                symptoms=((lambda got, need: len(got) < len(need), NO_GATHER),),
                look=BACKWARD_CALLS,
                value=_by_kind,
            ),
            Bytes("left_bytes", lambda _at: 0, LEFT, what="after backward it keeps"),
            Bytes(
                "grad_bytes",
                lambda at: at.seen.shard_grad.nbytes,
                VIEW,
                what="the gradient of the shard keeps",
            ),
        ),
        success="As one process, once and twice; the whole weights are gone after each use.",
    ),
    wrong=(
        Edit(FORWARD, KEEPING, KEEPS, also=((AGAIN, "x, shard, weight = ctx.saved_tensors"),)),
        Edit(GATHERS, f"{GATHERS}\nctx.weight = weight", KEEPS),
        Edit(
            GATHERED,
            f"if not hasattr(layout, 'flat'):\n    {GATHERED}\n    layout.__dict__['flat'] = flat\n"
            "flat = layout.__dict__['flat']",
            KEEPS,
        ),
        Edit("ShardedLinear.apply(x, shard, layout)", "F.linear(x, *whole(shard, layout))", KEEPS),
        Edit(
            FORWARD,
            KEEPING,
            FREED,
            also=(
                (
                    f"return {COMPUTES}",
                    f"out = {COMPUTES}\nweight.untyped_storage().resize_(0)\nreturn out",
                ),
                (AGAIN, "x, shard, weight = ctx.saved_tensors"),
            ),
        ),
        Edit(
            GATHERS,
            f"{GATHERS}\nctx.rows = weight.tolist()",
            NO_GATHER,
            also=(("weight, _ = whole(shard, ctx.layout)", "weight = x.new_tensor(ctx.rows)"),),
        ),
        Edit(MEAN, "mean", SUMMED),
        Edit(MEAN, f"{MEAN} ** 2", AVERAGED_TWICE),
        Edit(
            f"return grad @ weight, {MEAN}",
            f"x_grad = grad @ weight\ndist.all_reduce(x_grad)\nreturn x_grad, {MEAN}",
            TOKENS,
        ),
        Edit(
            f"return grad @ weight, {MEAN}",
            "x_grad = grad @ weight / dist.get_world_size()\ndist.all_reduce(x_grad)\n"
            f"return x_grad, {MEAN}",
            TOKENS,
        ),
        Edit("grad @ weight", "grad @ weight / dist.get_world_size()", TOKENS),
        Edit(f"grad @ weight, {MEAN}", f"{MEAN}, grad @ weight", INPUT_ORDER),
        Edit(SENDS, f"mean = {MINE}.clone()", OWN),
        Edit(SENDS, f"dist.all_reduce(flat)\nmean = {MINE}.clone()", ALL_REDUCE),
        Edit(SENDS, "dist.all_reduce(flat)\nmean = flat", NO_SHARD),
        Edit("(mean, flat)", "(mean, flat, async_op=True)", NOT_WAITED),
        Edit(
            "mean = torch.empty_like(shard)",
            f"mean = {MINE}",
            VIEW,
            also=((MEAN, "mean.div_(dist.get_world_size())"),),
        ),
        Edit(
            FLATTENS,
            "torch.cat([grad.sum(0), (grad.T @ x).flatten()])\n"
            "flat = F.pad(flat, (0, ctx.layout.padded_numel - ctx.layout.numel))",
            SHARD_GRADIENT,
        ),
        Edit("grad.sum(0)", "grad.mean(0)", SHARD_GRADIENT),
        Edit("torch.empty_like(shard)", "torch.empty(len(shard))", DTYPE),
        Edit(FLATTENS, "torch.cat([(grad.T @ x).flatten(), grad.sum(0)])", LENGTHS),
        Edit(COMPUTES, "x @ weight + bias", TRANSPOSED),
        Edit(COMPUTES, "x @ weight.T", NO_BIAS),
        Edit(MEAN, "None", NO_GRADIENT),
        Edit("return grad @ weight", "return None", NO_GRADIENT),
        Edit(
            f"return grad @ weight, {MEAN}",
            f"x_grad = grad @ weight\ngrad.zero_()\nreturn x_grad, {MEAN}",
            READ_ONLY,
        ),
        Edit(SENDS, f"{SENDS}\nctx.layout.__dict__['flat'] = flat", LEFT),
    ),
)
