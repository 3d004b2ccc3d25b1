"""Exercise 4 of 09_zero: a linear layer whose weights are allocated only while it computes."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.memory_watch import MemoryWatch, held_bytes
from course_lib.checks.properties import NOT_WAITED
from course_lib.checks.watch import CHANGED, OVERWRITTEN, UNWAITED, Watch
from course_lib.checks.zero.parts import CALLS, calls_of, named
from course_lib.zero.flat_layout import FlatLayout

NUM_TOKENS = 3
TRANSPOSED, ODD = "transposed inputs", "zeros on rank 0, a nan on the last rank"
IDLE, TWO = "no tokens on rank 0", "2 layers at once"
# facets
OUTPUT, X_GRAD, SHARD_GRAD = "the output", "the gradient of x", "the gradient of the shard"
BETWEEN, LEFT = "bytes too many from forward to backward", "bytes too many after backward"
HELD = "bytes that the gradient of the shard keeps"

INPUT_ORDER = Cause(
    "The gradient for x has another shape than x: backward returns gradients in the order in which "
    "forward takes x, shard and layout."
)
NO_SHARD = Cause(
    "The gradient for `shard` has another shape than the shard: each rank keeps its part of the "
    "mean, and that is what reduce_scatter leaves."
)
BY_ROWS = Cause("The weight is [out, in]: x @ weight.T, which F.linear does.")
FORMULA = Cause("The output is F.linear(x, weight, bias), of what this call has gathered.")
KEEPS = Cause(
    "Never freed: what save_for_backward, an attribute of ctx or autograd itself holds lives until "
    "backward. Keep x and the shard, and gather again in backward."
)
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
BUDGET = Cause(
    "Forward makes one all_gather, that of whole(); backward another one, and one reduce_scatter "
    "of the flat gradient. (An all_reduce would give every rank all of it.)"
)
WHO_HOLDS = Cause("Who holds a whole tensor after backward: an attribute, a list, a view of it?")
VIEW = Cause(
    "The gradient of the shard is a view, and keeps the whole flat gradient that it was cut from."
)
IN_CTX = Cause(
    "Several uses and layers are alive at once: what backward of one needs is its own. Keep it in "
    "ctx, not in the class and not in a global variable."
)
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


class Layer:
    """A rank's shard of a layer and its layout; tokens `x` for it, and the gradient from above."""

    def __init__(
        self, rank: int, num_in: int, num_out: int, dtype: torch.dtype, odd: str = "", seed: int = 0
    ) -> None:
        p = dist.get_world_size()
        self.layout = FlatLayout(((num_out, num_in), (num_out,)), p)
        whole = self.layout.flatten([_numbers(seed, *shape) for shape in self.layout.shapes])
        self.shard = nn.Parameter(whole[self.layout.shard_slice(rank)].to(dtype, copy=True))
        count = 0 if odd == IDLE and rank == 0 else NUM_TOKENS
        self.x, self.above = (
            _odd(_numbers(seed + 100 + rank, count, width).to(dtype), odd, rank, p)
            for width in (num_in, num_out)
        )
        self.x.requires_grad_()
        self.out_bytes = count * num_out * dtype.itemsize


def _numbers(seed: int, *shape: int) -> Tensor:
    """Return numbers between 1 and 2, so that no sum cancels and rounding stays small."""
    return 1 + torch.rand(shape, generator=torch.Generator().manual_seed(seed)).double()


def _odd(tokens: Tensor, odd: str, rank: int, p: int) -> Tensor:
    if odd == ODD and rank == p - 1:
        tokens[-1, 0] = math.nan
    elif odd == ODD and rank == 0:
        tokens.zero_()
    return tokens.t().contiguous().t() if odd == TRANSPOSED else tokens


def use_layer(
    rank: int,
    answer: Any,
    num_in: int = 5,
    times: int = 1,
    dtype: torch.dtype = torch.float64,
    odd: str = "",
    other_in: int = 0,
) -> dict[str, Any]:
    """Use a layer, also with another one beside it; at last without autograd, its shard changed."""
    apply = getattr(answer, "apply", answer)
    label = f"{num_in} to 5 numbers in {named(dtype)}, used {'twice' if times == 2 else 'once'}"
    label, layers = f"{label}, {odd}" if odd else label, dict[str, Layer]()
    layers[label] = Layer(rank, num_in, 5, dtype, odd)
    if other_in:
        label = "the 2nd of two layers"
        layers[label] = Layer(rank, other_in, other_in, dtype, seed=1000)
    known = [x.data for one in layers.values() for x in (one.x, one.shard, one.above)]  # no grads
    with MemoryWatch() as watch:
        outs = [_forward(watch, apply, *one, times) for one in layers.items()]
        enough = times * sum(layer.out_bytes for layer in layers.values())
        watch.seen[f"{label}, forward"][BETWEEN] = watch.bytes_too_many(enough, known)
        for one, out in zip(layers.items(), outs, strict=True):
            _backward(watch, out, *one)
        del out
        outs.clear()
        watch.seen[f"{label}, backward"][LEFT] = watch.left_bytes(known)
        for name, layer in layers.items():
            watch.seen[f"{name}, backward"][HELD] = _held_bytes(apply, layer)
            with torch.no_grad():
                apply(layer.x, layer.shard, layer.layout)
                layer.shard.mul_(2)
                _forward(watch, apply, f"{name}, without autograd", layer)
    return watch.seen


def _forward(watch: Watch, apply: Any, name: str, layer: Layer, times: int = 1) -> Any:
    """Return the output of a layer that is used `times` times; show it."""
    out = layer.x
    with watch.step(f"{name}, forward", x=layer.x, shard=layer.shard) as step:
        for _ in range(times):
            out = apply(out, layer.shard, layer.layout)
    step.show(**{OUTPUT: out, CALLS: calls_of(step)})
    return out


def _backward(watch: Watch, out: Any, name: str, layer: Layer) -> None:
    """Run backward from an output, and show the gradients."""
    given = {"x": layer.x, "shard": layer.shard, "the gradient from above": layer.above}
    with watch.step(f"{name}, backward", **given) as step:
        _run_backward(out, layer)
    step.show(**{X_GRAD: layer.x.grad, SHARD_GRAD: layer.shard.grad, CALLS: calls_of(step)})
    layer.x.grad = layer.shard.grad = None


def _run_backward(out: Any, layer: Layer) -> None:
    if isinstance(out, Tensor) and out.requires_grad:
        out.backward(layer.above)


def _held_bytes(apply: Any, layer: Layer) -> int:
    """Return the bytes that the shard's gradient keeps, not watched: a watched tensor is shared."""
    _run_backward(apply(layer.x, layer.shard, layer.layout), layer)
    grad, layer.x.grad, layer.shard.grad = layer.shard.grad, None, None
    return held_bytes(grad)


def _runs(p: int) -> list[dict[str, Any]]:
    """Return the uses on p ranks, plain ones first; three ranks are enough for the odd ones."""
    plain: list[dict[str, Any]] = [{}, {"times": 2}, {"num_in": 2, "dtype": torch.bfloat16}]
    odd: list[dict[str, Any]] = [{"num_in": 2, "odd": one} for one in (TRANSPOSED, ODD, IDLE)]
    return [*plain, *([{"other_in": 5}, {"other_in": 3}, *odd] if p == 3 else [])]


GATHERS, RETURNS = "weight, bias = whole(shard, layout)", "return grad @ weight, "
COMPUTES, MEAN = "F.linear(x, weight, bias)", "mean / dist.get_world_size()"
SAVES, SAVED = "ctx.save_for_backward(x, shard)", "x, shard = ctx.saved_tensors"
FORWARD = f"{SAVES}\n        ctx.layout = layout\n        {GATHERS}"
KEEPING = f"{GATHERS}\n        ctx.layout = layout\n        ctx.save_for_backward(x, shard, weight)"
AGAIN = f"{SAVED}\n        weight, _ = whole(shard, ctx.layout)"
FLATTENS = "ctx.layout.flatten([grad.T @ x, grad.sum(0)])"
SENDS, MINE = (
    "dist.reduce_scatter_single(mean, flat)",
    "flat[ctx.layout.shard_slice(dist.get_rank())]",
)

LINEAR = Exercise(
    key="zero-4",
    title="gather, use, free",
    check=ByExample(
        observe_on_rank=use_layer,
        runs=_runs,
        facets=(
            *(UNWAITED, OVERWRITTEN, OUTPUT, CHANGED, X_GRAD, SHARD_GRAD, CALLS),
            *(BETWEEN, LEFT, HELD),
        ),
        looks=(
            *(("mismatch", EVERY_RANK), ("hang", EVERY_RANK), (OUTPUT, FORMULA), (CALLS, BUDGET)),
            *((X_GRAD, TOKENS), (SHARD_GRAD, SHARD_GRADIENT)),
            *((BETWEEN, KEEPS), (LEFT, WHO_HOLDS), (HELD, VIEW)),
        ),
        success="As one process (used twice, transposed, without tokens); no whole weights stay.",
    ),
    wrong=(
        Edit(FORWARD, KEEPING, KEEPS, also=((AGAIN, "x, shard, weight = ctx.saved_tensors"),)),
        Edit("ShardedLinear.apply(x, shard, layout)", "F.linear(x, *whole(shard, layout))", KEEPS),
        Edit(MEAN, "mean", SUMMED),
        Edit(MEAN, f"{MEAN} ** 2", AVERAGED_TWICE),
        Edit(f"grad @ weight, {MEAN}", f"{MEAN}, grad @ weight", INPUT_ORDER),
        Edit(SENDS, f"mean = {MINE}.clone()", OWN),
        Edit(SENDS, f"dist.all_reduce(flat)\nmean = {MINE}.clone()", BUDGET),
        Edit(SENDS, "dist.all_reduce(flat)\nmean = flat", NO_SHARD),
        Edit("(mean, flat)", "(mean, flat, async_op=True)", NOT_WAITED),
        Edit("grad.sum(0)", "grad.mean(0)", SHARD_GRADIENT),
        Edit(COMPUTES, "x @ weight + bias", BY_ROWS),
        Edit(MEAN, "None", NO_GRADIENT),
        Edit(f"{RETURNS}{MEAN}", f"shard.grad = {MEAN}\n{RETURNS}None", LOST),
        Edit(SENDS, f"{SENDS}\nctx.layout.__dict__['flat'] = flat", WHO_HOLDS),
        Edit(
            SAVES,
            "ShardedLinear.kept = x, shard",
            IN_CTX,
            also=((SAVED, "x, shard = ShardedLinear.kept"),),
        ),
        Edit("grad.sum(0)", "grad.view(-1).view(grad.shape).sum(0)", STRIDES),
        Edit(FLATTENS, f"{FLATTENS} / len(grad)\nflat *= len(grad)", NO_TOKENS),
        Edit(SENDS, f"if grad.any():\n    {SENDS}\nelse:\n    mean.zero_()", EVERY_RANK),
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
