"""Exercise 4 of 09_zero: a linear layer whose weights are allocated only while it computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Bytes, Calls, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.zero.linear_use import (
    IDLE,
    TRANSPOSED_INPUTS,
    Use,
    Whole,
    runs_on,
    use_layer,
    whole_layer,
)
from course_lib.checks.zero.parts import (
    ALL_WAITED,
    BESIDE,
    DTYPE,
    LENGTHS,
    NOT_A_NAN,
    NOT_WAITED,
    OF_THE_CLASS,
    ROUNDING,
    WRONG_BUFFER,
    lost_nan,
    shard_of,
    unless_alone,
)
from course_lib.core import Event

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
ONE_GATHER = Cause("A forward makes one all_gather, that of whole(): do not send the output.")
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
LOST = Cause(
    "Used once it is right, used twice one gradient is lost: return it, and let autograd add."
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
STRIDES = Cause(
    "The numbers of a transposed tensor do not lie in memory one after the other: use reshape in "
    "place of view, and no as_strided."
)
NO_TOKENS = Cause(
    "A rank without tokens does what the others do: all sums over its tokens are 0, also in the "
    "mean over all {p} ranks. Divide by no number of tokens, nor by that of the ranks with tokens."
)
EVERY_RANK = Cause(
    "Not every rank makes the same calls: also without tokens, or with a gradient of 0, a rank has "
    "a shard that the others need. Make each call on every rank, whatever its numbers are."
)
STALE = Cause(
    "Those are the weights from before the shard was changed, as an optimizer does: gather each "
    "time, also without autograd, and keep nothing of it."
)


def _whole(at: At) -> Whole:
    return whole_layer(at.options["use"], at.world_size)


def _grads(at: At) -> Tensor:
    return torch.stack(_whole(at).grads)


def _mean(at: At) -> Tensor:
    return shard_of(_grads(at).sum(0) / at.world_size, at.rank, at.world_size)


def _first(at: At) -> Tensor:
    """Return this rank's shard of the mean of the gradients of the first use alone."""
    return shard_of(torch.stack(_whole(at).first).sum(0) / at.world_size, at.rank, at.world_size)


def _own(at: At) -> Tensor:
    return shard_of(_grads(at)[at.rank], at.rank, at.world_size)


def _computed_by(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[At], Tensor]:
    """Return the output of another formula."""

    def out(at: At) -> Tensor:
        use: Use = at.options["use"]
        whole, x = use.layer(), use.batch(at.rank, at.world_size)[0].detach()
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


def _out(at: At) -> Tensor:
    return _whole(at).outs[at.rank]


def _x_grad(at: At) -> Tensor:
    return _whole(at).x_grads[at.rank]


def _once(at: At) -> Tensor:
    return _whole(at).once[at.rank]


def _doubled(at: At) -> Tensor:
    return 2 * _once(at)


def _only_if(right: Callable[[At], Tensor]) -> tuple[tuple[Callable[..., bool], Cause], ...]:
    """Return causes of what is wrong in one of `ODD_USES` only: a plain use goes before."""
    return (
        (lambda at, got, _item: lost_nan(got, right(at)), NOT_A_NAN),
        (lambda at, *_: at.options["use"].beside is not None, OF_THE_CLASS),
        (lambda at, *_: at.options["use"].transposed, STRIDES),
        (lambda at, *_: at.options["use"].idle, NO_TOKENS),
    )


def _rtol(at: At) -> float:
    return ROUNDING[at.options["use"].dtype]


GATHERS = "weight, bias = whole(shard, layout)"
COMPUTES = "F.linear(x, weight, bias)"
SAVES, SAVED = "ctx.save_for_backward(x, shard)", "x, shard = ctx.saved_tensors"
KEPT = "ShardedLinear.kept"
FORWARD = f"{SAVES}\n        ctx.layout = layout\n        {GATHERS}"
KEEPING = f"{GATHERS}\n        ctx.layout = layout\n        ctx.save_for_backward(x, shard, weight)"
AGAIN = f"{SAVED}\n        weight, _ = whole(shard, ctx.layout)"
FLATTENS = "ctx.layout.flatten([grad.T @ x, grad.sum(0)])"
SENDS = "dist.reduce_scatter_single(mean, flat)"
MINE = "flat[ctx.layout.shard_slice(dist.get_rank())]"
MEAN = "mean / dist.get_world_size()"
GATHERED = "dist.all_gather_single(flat, shard.detach())"

LINEAR = Exercise(
    key="zero-4",
    title="gather, use, free",
    check=OnRanks(
        observe_on_rank=use_layer,
        runs=runs_on,
        trouble=(
            ("raised", BESIDE, OF_THE_CLASS),
            ("raised", f"{TRANSPOSED_INPUTS}|view size is not compatible", STRIDES),
            ("raised", IDLE, NO_TOKENS),
            ("raised", "invalid gradient at index 0", INPUT_ORDER),
            ("raised", "invalid gradient at index 1", NO_SHARD),
            ("raised", "not allocated|of storage|setStorage", FREED),
            *WRONG_BUFFER,
            *((kind, "", EVERY_RANK) for kind in ("mismatch", "hang")),
        ),
        expect=(
            ALL_WAITED,
            Numbers(
                "out",
                _out,
                rtol=_rtol,
                what="the output",
                predicates=_only_if(_out),
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
                lambda at: at.options["use"].out_bytes(at.rank),
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
                _x_grad,
                rtol=_rtol,
                what="the gradient of x",
                predicates=_only_if(_x_grad),
                look=TOKENS,
            ),
            Numbers(
                "shard_grad",
                _mean,
                rtol=_rtol,
                what="the gradient of the shard",
                predicates=_only_if(_mean),
                causes=(
                    (SUMMED, lambda at: _mean(at) * at.world_size),
                    (AVERAGED_TWICE, lambda at: _mean(at) / at.world_size),
                    (LOST, _first),
                    (OWN, _own),
                    (OWN, lambda at: _own(at) / at.world_size),
                ),
                look=SHARD_GRADIENT,
            ),
            Numbers(
                "again",
                _doubled,
                rtol=_rtol,
                what="the output without autograd",
                predicates=_only_if(_doubled),
                causes=((STALE, _once),),
                look=STALE,
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
        success="As one process (used twice, transposed, without tokens); no whole weights stay.",
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
            f"shard.grad = {MEAN}\nreturn grad @ weight, None",
            LOST,
        ),
        Edit(
            f"return grad @ weight, {MEAN}",
            f"x_grad = grad @ weight\ngrad.zero_()\nreturn x_grad, {MEAN}",
            READ_ONLY,
        ),
        Edit(SENDS, f"{SENDS}\nctx.layout.__dict__['flat'] = flat", LEFT),
        Edit(
            SAVES,
            "ShardedLinear.kept = x, shard",
            OF_THE_CLASS,
            also=((SAVED, f"x, shard = {KEPT}"),),
        ),
        Edit(
            SAVES,
            "ctx.save_for_backward(x)\nShardedLinear.kept = shard",
            OF_THE_CLASS,
            also=((SAVED, f"(x,), shard = ctx.saved_tensors, {KEPT}"),),
        ),
        Edit(
            "ctx.layout = layout",
            "ShardedLinear.layout = layout",
            OF_THE_CLASS,
            also=(
                ("whole(shard, ctx.layout)", "whole(shard, ShardedLinear.layout)"),
                ("ctx.layout.flatten", "ShardedLinear.layout.flatten"),
            ),
        ),
        Edit("grad.T @ x", "grad.as_strided(grad.T.shape, (1, len(grad.T))) @ x", STRIDES),
        Edit("grad.sum(0)", "grad.view(-1).view(grad.shape).sum(0)", STRIDES),
        Edit(COMPUTES, "F.linear(x.as_strided(x.shape, (x.shape[1], 1)), weight, bias)", STRIDES),
        Edit(FLATTENS, f"{FLATTENS} / len(grad)\nflat *= len(grad)", NO_TOKENS),
        Edit(GATHERS, f"if not len(x):\n    return x.new_zeros(0, 5)\n{GATHERS}", EVERY_RANK),
        Edit(SENDS, f"if grad.any():\n    {SENDS}\nelse:\n    mean.zero_()", EVERY_RANK),
        Edit(FLATTENS, f"{FLATTENS}.nan_to_num()", NOT_A_NAN),
        Edit("return grad @ weight", "return (grad @ weight).nan_to_num()", NOT_A_NAN),
        Edit(COMPUTES, f"{COMPUTES}.nan_to_num()", NOT_A_NAN),
        Edit(
            "return ShardedLinear",
            "if not torch.is_grad_enabled():\n"
            "    kept = [each.tolist() for each in whole(shard, layout)]\n"
            "    kept = vars(layout).setdefault('kept', kept)\n"
            "    return F.linear(x, *map(x.new_tensor, kept))\n"
            "return ShardedLinear",
            STALE,
        ),
    ),
)
