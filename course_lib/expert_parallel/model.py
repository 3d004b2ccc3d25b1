"""Expert parallelism for a model: `parallelize_experts` keeps this rank's experts of every layer.

An expert computes tokens of all ranks of the group, so its gradient is the sum over their losses.
All others' are divided by the number of ranks that average them, so an expert's has to be divided
by the same number, although fewer ranks hold it. Here that is done inside the layer: around the
experts the gradient is divided by the ranks of the group, and whoever averages the rest, over the
ranks that hold the same experts, needs to know nothing. Notebook 16_experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib.collectives.group import Group, GroupMember, average_over, member_of
from course_lib.core.errors import CourseError, MeshError
from course_lib.data_parallel.composition import EXPERT_PARALLEL, mark_split
from course_lib.expert_parallel.exchange import combine, dispatch
from course_lib.expert_parallel.expert_tensor import gather_tokens, split_experts, sum_tokens
from course_lib.expert_parallel.groups import ExpertGroups
from course_lib.models.moe import MoE, Routing


class ParallelMoE(MoE):
    """A layer of experts that are divided over a group: tokens travel to them, and back.

    ep         this rank in the group that shares the experts
    expert_tp  this rank in the group that splits each of them; None: they are whole
    """

    ep: GroupMember
    expert_tp: GroupMember | None

    def run_experts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, wherever they are.

        Shapes:  [tokens, hidden] and Routing -> [tokens, hidden], this rank's
        """
        given, tp = tokens, self.expert_tp
        if tp is not None:
            tokens, routing = gather_tokens(tokens, routing, tp)
        there = dispatch(tokens, routing, routing.scores.shape[1], self.ep.group)
        sources = float(self.ep.size * (1 if tp is None else tp.size))
        outputs = self.experts(_scale_grad(there.inputs, sources), there.counts)
        y = combine(_scale_grad(outputs, 1 / sources), there).to(given.dtype)
        return y if tp is None else sum_tokens(y, tp)


def parallelize_experts(
    model: nn.Module, group: Group | ExpertGroups = None, *, expert_tp: Group = None
) -> nn.Module:
    """Divide the experts of every MoE layer over a group, in place; each rank keeps its own.

    groups = expert_groups(mesh, ep=2)
    model = DDP(parallelize_experts(model, groups), group=mesh.copies)

    Rank r of p keeps the experts from r * count/p on, under their old names. Each rank gives its
    own tokens; the gradients of its experts are those of the mean over ranks of the ranks' losses,
    once they are averaged over `expert_dp`: DDP, ZeRO and FSDP do so, and average, or shard, all
    others over their own group.

    group      that shares the experts, or `ExpertGroups`; None: all ranks, and experts have no copy
    expert_tp  a group of ranks that split each expert, too: columns of its first matrices, rows of
               the last. Tokens are gathered over it, and results scattered: each rank gives as
               many. `parallelize` of lesson 07 splits experts whose ranks give the same tokens

    Cost:    here nothing; in every layer `dispatch` and `combine`, and with expert_tp an all_gather
             of tokens and a reduce_scatter of results
    Raises:  CourseError for a model without experts, or one whose experts are divided already;
             MeshError unless the ranks divide the experts
    Source:  Lepikhin et al. 2020 (GShard), section 3; Rajbhandari et al. 2022 (DeepSpeed-MoE)
    """
    shared, same = group if isinstance(group, ExpertGroups) else (group, None)
    ep = member_of(shared, "parallelize_experts")
    tp = None if expert_tp is None else member_of(expert_tp, "parallelize_experts")
    layers = _layers_of(model)
    for layer in layers:
        _check_divides(layer, ep, tp)
    for layer in layers:
        kept = len(layer.experts) // ep.size
        for name in list(layer.experts._modules):
            if int(name) // kept != ep.rank:
                del layer.experts._modules[name]
        if tp is not None:
            split_experts(layer.experts, tp)
        layer.__class__ = ParallelMoE  # as `fully_shard` does: hooks and names stay
        vars(layer).update(ep=ep, expert_tp=tp)
        sources = ep.ranks if tp is None else (*ep.ranks, *tp.ranks)
        for param in layer.experts.parameters():
            mark_split(param, EXPERT_PARALLEL, sources)
            if same is not None:
                average_over(param, same, ep.size * (1 if tp is None else tp.size))
    return model


def _layers_of(model: nn.Module) -> list[MoE]:
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers or any(isinstance(layer, ParallelMoE) for layer in layers):
        got = "experts that are divided already" if layers else "none"
        raise CourseError(
            f"parallelize_experts: need a model with layers of experts; got {got}. "
            "Try GPT(MODELS['moe-tiny'])."
        )
    return layers


def _check_divides(layer: MoE, ep: GroupMember, tp: GroupMember | None) -> None:
    where = f"rank {ep.global_rank(ep.rank)}, parallelize_experts"
    if len(layer.experts) % ep.size:
        raise MeshError(
            f"{where}: need experts divisible by the ranks that share them; got "
            f"{len(layer.experts)} and {ep.size}. Try fewer ranks."
        )
    width = layer.router.experts.ffn_hidden
    if tp is not None and width % tp.size:
        raise MeshError(
            f"{where}: need experts.ffn_hidden divisible by the ranks of expert_tp; got {width} "
            f"and {tp.size}. Try fewer ranks."
        )


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


def _scale_grad(x: Tensor, factor: float) -> Tensor:
    """Return x, whose gradient is multiplied by a factor in backward."""
    return _ScaleGrad.apply(x, factor)
