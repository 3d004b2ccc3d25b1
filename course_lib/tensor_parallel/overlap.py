"""Column-parallel matrices whose input gradient is summed while the weight gradients are computed.

Backward of `y = x @ w.T` has two halves: the input's gradient, which the ranks have to sum before
the layers in front can go on, and the weight's gradient, which nobody waits for. So the all_reduce
can be started between the two and runs while the second half is computed. With sequence parallelism
only this rank's tokens are saved, and the others are gathered again while the first half is
computed. The sums are those of the plain version, in the same order, so the results are equal to
the last bit. Notebook 07_tensor_parallel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from course_lib.collectives.group import Group
from course_lib.ranks import span
from course_lib.tensor_parallel.regions import SEQUENCE, all_gather

WeightAndBias = tuple[Tensor, Tensor | None]  # weight and bias


def overlapped_columns(
    x: Tensor,
    matrices: Sequence[WeightAndBias],
    group: Group = None,
    *,
    sequence_parallel: bool = False,
) -> tuple[Tensor, ...]:
    """Return F.linear(x, weight, bias) for each matrix; they share the boundary in front of them.

    Backward starts to gather the tokens (sequence parallel), computes the gradient of x, starts its
    sum over the ranks, computes the gradients of the weights and biases, and waits. On a GPU this
    needs CUDA_DEVICE_MAX_CONNECTIONS=1, so that the calls are scheduled first.

    Shapes:  [batch, seq, in] -> [batch, seq, out/tp] each; sequence parallel: from
             [batch, seq/tp, in]
    Cost:    one all_reduce backward; sequence parallel: one all_gather forward, one all_gather and
             one reduce_scatter backward
    Saves:   x, this rank's tokens of it if sequence parallel, and the weights
    Source:  Korthikanti et al. 2022, section 4.2.2; NVIDIA Megatron-LM,
             megatron/core/tensor_parallel/layers.py,
             LinearWithGradAccumulationAndAsyncCommunication
    """
    weights, biases = zip(*matrices, strict=True)
    return _OverlappedColumns.apply(x, group, sequence_parallel, *weights, *biases)


class _OverlappedColumns(torch.autograd.Function):
    """Several matrices of one input, and the boundary in front of them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sequence_parallel: bool, *params: Any
    ) -> tuple[Tensor, ...]:
        whole = all_gather(x, SEQUENCE, group) if sequence_parallel else x  # [batch, seq, in]
        half = len(params) // 2
        weights, biases = params[:half], params[half:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]  # [batch * seq, out/tp]
        gather, x_grad, work = None, None, None
        if ctx.sequence_parallel and any(ctx.needs_input_grad[3 : 3 + len(weights)]):
            x, gather = _start_gather(x, ctx.group)
        if ctx.needs_input_grad[0]:
            with span("backward_input"):
                total = _input_grad(rows, weights).view(*grads[0].shape[:-1], -1)
            x_grad, work = _start_sum(total, ctx.group, ctx.sequence_parallel)
        if gather is not None:
            gather.wait()
            x = torch.cat(x.chunk(dist.get_world_size(ctx.group)), SEQUENCE)  # [batch, seq, in]
        with span("backward_weight"):
            needed, inputs = iter(ctx.needs_input_grad[3:]), x.reshape(-1, x.shape[-1])
            weight_grads = [row.t() @ inputs if next(needed) else None for row in rows]
            bias_grads = [row.sum(0) if next(needed) else None for row in rows]
        if work is not None:
            work.wait()
        return x_grad, None, None, *weight_grads, *bias_grads


def _input_grad(rows: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum the matrices' gradients of x, the last matrix first, as autograd does."""
    *others, last = (row @ weight for row, weight in zip(rows, weights, strict=True))
    for other in reversed(others):
        last += other
    return last


def _start_gather(shard: Tensor, group: Group) -> tuple[Tensor, dist.Work | None]:
    """Start to gather all tokens; return where they will be, rank after rank: [p * batch, ...]."""
    p = dist.get_world_size(group)
    shards = shard.new_empty(p * len(shard), *shard.shape[1:])
    own = shard.contiguous()
    return shards, dist.all_gather_single(shards, own, group=group, async_op=True)


def _start_sum(
    total: Tensor, group: Group, sequence_parallel: bool
) -> tuple[Tensor, dist.Work | None]:
    """Start the sum over the ranks, of all tokens or of this rank's; return where it will be."""
    if not sequence_parallel:
        return total, dist.all_reduce(total, group=group, async_op=True)
    parts = total.chunk(dist.get_world_size(group), SEQUENCE)
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    return out, dist.reduce_scatter_single(out, torch.cat(parts), group=group, async_op=True)
