"""Dispatch and combine: copies of tokens go to the ranks of their experts, and results come back.

Rank r of p holds the experts from r * num_experts/p on. A copy of a token is sent for each of its
experts, and how many go where follows from the tokens: so the ranks exchange these counts first,
and wait for them on the host, since the sizes of an uneven all-to-all have to be known. Backward
needs no counts: the gradient of dispatch travels as combine does, and the other way round. Notebook
16_experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError, MeshError, ShapeError
from course_lib.models.moe import Routing, expert_order
from course_lib.ranks.world import is_dry


@dataclass(frozen=True)
class Exchange:
    """Which copies of tokens go where, in numbers that both directions use.

    tokens     [sent]: the token of each copy, in the order of the experts
    slots      [sent]: its place in routing.weights, flattened
    sent       copies to each rank of the group
    received   copies from each rank of the group
    by_expert  [received]: those that arrive, which come rank by rank, in the order of the experts
    """

    group: Group
    tokens: Tensor
    slots: Tensor
    sent: list[int]
    received: list[int]
    by_expert: Tensor

    def to_experts(self, copies: Tensor) -> Tensor:
        """Exchange [sent, hidden] -> [received, hidden], the first local expert's copies first."""
        return _exchange(copies, self.sent, self.received, self.group)[self.by_expert]

    def to_tokens(self, outputs: Tensor) -> Tensor:
        """Exchange [received, hidden] -> [sent, hidden]: undo `to_experts`."""
        by_rank = torch.empty_like(outputs)
        by_rank[self.by_expert] = outputs
        return _exchange(by_rank, self.received, self.sent, self.group)


@dataclass(frozen=True)
class Dispatched:
    """What `dispatch` has brought to this rank's experts, and what `combine` needs.

    inputs   [received, hidden]: copies of all ranks' tokens, those of the first local expert first
    counts   [num_experts/p] int64: how many each local expert has
    weights  [tokens, top_k], of this rank's tokens
    """

    inputs: Tensor
    counts: Tensor
    weights: Tensor
    plan: Exchange


def dispatch(tokens: Tensor, routing: Routing, num_experts: int, group: Group = None) -> Dispatched:
    """Send a copy of each token to the ranks that hold its experts; -1 is sent nowhere.

    group   of the p ranks that share the experts; None: all ranks

    Shapes:  tokens [tokens, hidden] -> inputs [received, hidden]; both differ by rank
    Cost:    one all_to_all of num_experts counts, one of the copies: about
             tokens * top_k * hidden * (p-1)/p numbers sent per rank; as many in backward
    Adjoint: an all_to_all with the sizes swapped, then a sum over the copies of a token
    Raises:  MeshError unless p divides num_experts; ShapeError for another number of tokens;
             CourseError for an expert that there is not; all before anything is sent
    Source:  Lepikhin et al. 2020 (GShard), section 3.2; uneven: Gale et al. 2022 (MegaBlocks)
    """
    _check(tokens, routing, num_experts, group)
    slots, counts = expert_order(routing.experts, num_experts)
    slots = slots.to(tokens.device)
    plan, held = _exchange_counts(slots, counts, routing.experts.shape[1], group)
    return Dispatched(_Dispatch.apply(tokens, plan), held, routing.weights, plan)


def combine(outputs: Tensor, dispatched: Dispatched) -> Tensor:
    """Send the experts' outputs back, and add up each token's, times their weights.

    Shapes:  [received, hidden] -> [tokens, hidden], in the dtype of outputs * weights
    Cost:    one all_to_all: about tokens * top_k * hidden * (p-1)/p numbers; as many in backward
    Adjoint: of outputs, that of `dispatch`'s forward, times the weights
    Raises:  ShapeError for another number of rows than dispatched.inputs has
    """
    if outputs.shape != dispatched.inputs.shape:
        raise ShapeError(
            f"rank {dist.get_rank()}, combine: need an output for every input, of shape "
            f"{list(dispatched.inputs.shape)}; got {list(outputs.shape)}."
        )
    return _Combine.apply(outputs, dispatched.weights, dispatched.plan)


class _Dispatch(torch.autograd.Function):
    """From this rank's tokens to the inputs of this rank's experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: Exchange) -> Tensor:
        ctx.plan, ctx.num_tokens = plan, len(tokens)
        return plan.to_experts(tokens[plan.tokens])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        copies = ctx.plan.to_tokens(grad)
        return _sum_copies(copies, ctx.plan, ctx.num_tokens), None


class _Combine(torch.autograd.Function):
    """From the outputs of this rank's experts to the weighted sums of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, plan: Exchange) -> Tensor:
        copies = plan.to_tokens(outputs)  # [sent, hidden]
        ctx.plan = plan
        ctx.save_for_backward(copies, weights)
        return _sum_copies(copies * weights.flatten()[plan.slots, None], plan, len(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (copies, weights), plan = ctx.saved_tensors, ctx.plan
        grads = grad[plan.tokens]  # [sent, hidden]
        of_weights = torch.zeros_like(weights).flatten()
        of_weights[plan.slots] = (grads * copies).sum(-1).to(weights.dtype)
        of_copies = grads * weights.flatten()[plan.slots, None]
        return plan.to_experts(of_copies.to(copies.dtype)), of_weights.view_as(weights), None


def _sum_copies(copies: Tensor, plan: Exchange, num_tokens: int) -> Tensor:
    whole = copies.new_zeros(num_tokens, copies.shape[1])
    return whole.index_add_(0, plan.tokens, copies)


def _exchange_counts(
    slots: Tensor, counts: Tensor, top_k: int, group: Group
) -> tuple[Exchange, Tensor]:
    """Tell every rank how many copies come from each; return the plan, and what each expert gets.

    Shapes:  slots [sent], counts [num_experts]
    """
    p = dist.get_world_size(group)
    arriving = torch.empty_like(counts)  # [p * num_experts/p]: from each rank, for each own expert
    dist.all_to_all_single(arriving, counts, group=group)
    if is_dry():  # the others send what this rank does
        arriving = counts.view(p, -1)[dist.get_rank(group)].repeat(p)
    by_rank = arriving.view(p, -1)
    sizes = torch.stack([counts.view(p, -1).sum(1), by_rank.sum(1)]).tolist()  # one wait
    expert = torch.arange(by_rank.shape[1], device=counts.device).repeat(p)
    by_expert = expert.repeat_interleave(arriving).argsort(stable=True).to(slots.device)
    sent, received = sizes
    return Exchange(group, slots // top_k, slots, sent, received, by_expert), by_rank.sum(0)


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Send the first sent[0] rows to rank 0 of the group, the next sent[1] to rank 1, ..."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def _check(tokens: Tensor, routing: Routing, num_experts: int, group: Group) -> None:
    member = member_of(group, "dispatch")
    where = f"rank {member.global_rank(member.rank)}, dispatch"
    if num_experts % member.size:
        raise MeshError(
            f"{where}: need num_experts divisible by the ranks of the group; got {num_experts} and "
            f"{member.size}. Try fewer ranks."
        )
    if tokens.dim() != 2 or routing.experts.shape[:1] != tokens.shape[:1]:
        raise ShapeError(
            f"{where}: need tokens [tokens, hidden] and routing.experts [tokens, top_k]; got "
            f"{list(tokens.shape)} and {list(routing.experts.shape)}. Try x.flatten(0, -2)."
        )
    if routing.experts.shape != routing.weights.shape:
        raise ShapeError(
            f"{where}: need a weight for every chosen expert; got {list(routing.weights.shape)} "
            f"weights for {list(routing.experts.shape)}."
        )
    experts = routing.experts
    if experts.numel() and not -1 <= int(experts.min()) <= int(experts.max()) < num_experts:
        raise CourseError(
            f"{where}: need experts from 0 to {num_experts - 1}, or -1 for a dropped one; got "
            f"{int(experts.min())} to {int(experts.max())}."
        )
