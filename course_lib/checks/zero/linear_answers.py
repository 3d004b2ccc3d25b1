"""Exercise 4 of 09_zero: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course_lib.zero.flat_layout import FlatLayout


def whole(shard: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return the weight and the bias, gathered from all ranks' shards."""
    flat = shard.new_empty(layout.padded_numel)
    dist.all_gather_single(flat, shard.detach())
    return layout.views(flat)


def shard_of_mean(grads: list[Tensor], layout: FlatLayout) -> Tensor:
    shard = grads[0].new_empty(layout.shard_numel)
    dist.reduce_scatter_single(shard, layout.flatten(grads))
    return shard / dist.get_world_size()


def grads_of(grad: Tensor, x: Tensor) -> list[Tensor]:
    return [grad.T @ x, grad.sum(0)]


class ShardedLinear(torch.autograd.Function):
    """The right answer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.layout = layout
        weight, bias = whole(shard, layout)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        weight, _ = whole(shard, ctx.layout)
        return grad @ weight, shard_of_mean(grads_of(grad, x), ctx.layout), None


class SavesWeight(ShardedLinear):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
        weight, bias = whole(shard, layout)
        ctx.save_for_backward(x, weight)
        ctx.layout = layout
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, shard_of_mean(grads_of(grad, x), ctx.layout), None


class OnContext(ShardedLinear):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.layout = layout
        ctx.weight, bias = whole(shard, layout)
        return F.linear(x, ctx.weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return grad @ ctx.weight, shard_of_mean(grads_of(grad, x), ctx.layout), None


class OnLayout(ShardedLinear):
    """Gathers once, and keeps it for the next use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.layout = layout
        if "kept" not in layout.__dict__:
            layout.__dict__["kept"] = whole(shard, layout)
        weight, bias = layout.__dict__["kept"]
        return F.linear(x, weight, bias)


class NotGathered(ShardedLinear):
    """Backward works on what forward has freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
        weight, bias = whole(shard, layout)
        ctx.save_for_backward(x, weight)
        ctx.layout = layout
        out = F.linear(x, weight, bias)
        weight.untyped_storage().resize_(0)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if weight.untyped_storage().nbytes() == 0:
            raise RuntimeError("setStorage: the weight's storage of size 0 was freed in forward")
        return grad @ weight, shard_of_mean(grads_of(grad, x), ctx.layout), None


def in_backward(change: Callable[[Any, Tensor, Any], Any]) -> type[ShardedLinear]:
    """The right forward; what the right backward returns is changed."""

    class Changed(ShardedLinear):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return change(ctx, grad, ShardedLinear.backward(ctx, grad))

    return Changed


def by_autograd(x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
    """Leaves backward to autograd, which keeps the weight for it."""
    return F.linear(x, *whole(shard, layout))


def _summed_x(ctx: Any, grad: Tensor, right: Any) -> Any:
    dist.all_reduce(right[0])
    return right


class OwnGradient(ShardedLinear):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        weight, _ = whole(shard, ctx.layout)
        flat = ctx.layout.flatten(grads_of(grad, x))
        return grad @ weight, flat[ctx.layout.shard_slice(dist.get_rank())].clone(), None


class AllReduced(ShardedLinear):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        weight, _ = whole(shard, ctx.layout)
        flat = ctx.layout.flatten(grads_of(grad, x)) / dist.get_world_size()
        dist.all_reduce(flat)
        return grad @ weight, flat[ctx.layout.shard_slice(dist.get_rank())].clone(), None


class WholeGradient(ShardedLinear):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        weight, _ = whole(shard, ctx.layout)
        flat = ctx.layout.flatten(grads_of(grad, x)) / dist.get_world_size()
        dist.all_reduce(flat)
        return grad @ weight, flat, None


class BiasFirst(ShardedLinear):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        weight, _ = whole(shard, ctx.layout)
        layout = FlatLayout(ctx.layout.shapes[::-1], ctx.layout.group_size)
        return grad @ weight, shard_of_mean(grads_of(grad, x)[::-1], layout), None


class Transposed(ShardedLinear):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.layout = layout
        weight, bias = whole(shard, layout)
        return x @ weight + bias


class NoBias(ShardedLinear):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layout: FlatLayout) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.layout = layout
        return x @ whole(shard, layout)[0].T


class NoShardGradient(ShardedLinear):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, shard = ctx.saved_tensors
        return grad @ whole(shard, ctx.layout)[0], None, None


def mistakes(mistake: Any) -> tuple[Any, ...]:
    """Return all wrong answers, with words of the sentence that names them."""
    return (
        mistake("saves the weight", SavesWeight, says="Never freed"),
        mistake("weight on ctx", OnContext, says="Never freed"),
        mistake("kept for the next use", OnLayout, says="Never freed"),
        mistake("left to autograd", by_autograd, says="or autograd itself"),
        mistake("backward without the gather", NotGathered, says="your code raised"),
        mistake(
            "summed",
            in_backward(lambda ctx, grad, out: (out[0], out[1] * dist.get_world_size(), None)),
            says="Summed, not averaged",
        ),
        mistake(
            "averaged twice",
            in_backward(lambda ctx, grad, out: (out[0], out[1] / dist.get_world_size(), None)),
            says="Averaged twice",
        ),
        mistake("x summed over ranks", in_backward(_summed_x), says="tokens of its own"),
        mistake(
            "gradients in the wrong order",
            in_backward(lambda ctx, grad, out: (out[1], out[0], None)),
            says="another shape than x",
        ),
        mistake("own gradient", OwnGradient, says="Only this rank's own tokens"),
        mistake("all-reduced and cut", AllReduced, says="a reduce_scatter leaves a shard"),
        mistake("the whole gradient", WholeGradient, says="another shape than the shard"),
        mistake("bias first", BiasFirst, says="flat, in that order"),
        mistake("transposed", Transposed, says="The weight is [out, in]"),
        mistake("no bias", NoBias, says="The bias is missing"),
        mistake("no gradient of the shard", NoShardGradient, says="no gradient arrives"),
    )
