"""Expert tensor parallelism: every rank of a group holds a part of each expert.

All ranks then compute all tokens of the group: an all_gather brings them, and a reduce_scatter adds
up the parts of the results and takes each rank's back, whatever top_k is. Notebook 16_experts.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group, GroupMember
from course_lib.core.errors import CourseError, ShapeError
from course_lib.models.mlp import MLP
from course_lib.models.moe import Routing
from course_lib.tensor_parallel.regions import all_gather, boundary


def gather_tokens(tokens: Tensor, routing: Routing, tp: GroupMember) -> tuple[Tensor, Routing]:
    """Gather the tokens of all ranks, and the experts and weights of their routing.

    Shapes:  [tokens, hidden] -> [p * tokens, hidden]; experts and weights alike
    Cost:    one all_gather of tokens, one each of the experts and weights
    Adjoint: a reduce_scatter each
    Raises:  ShapeError where ranks have other numbers of tokens
    """
    sizes = torch.tensor([len(tokens), -len(tokens)], device=tokens.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group=tp.group)
    if int(sizes.sum()):
        raise ShapeError(
            f"rank {tp.global_rank(tp.rank)}, expert_tp: need as many tokens on each rank of the "
            f"group; got {len(tokens)}, others up to {int(sizes[0])}."
        )
    gather = partial(all_gather, dim=0, group=tp.group)
    back = partial(_reduce_scatter, group=tp.group)
    experts = gather(routing.experts)
    weights = boundary(routing.weights, gather, back)
    return boundary(tokens, gather, back), routing._replace(experts=experts, weights=weights)


def sum_tokens(y: Tensor, tp: GroupMember) -> Tensor:
    """Add the parts of all ranks, and keep this rank's tokens.

    Shapes:  [p * tokens, hidden] -> [tokens, hidden]
    Cost:    one reduce_scatter
    Adjoint: an all_gather
    """
    back = partial(all_gather, dim=0, group=tp.group)
    return boundary(y, partial(_reduce_scatter, group=tp.group), back)


@torch.no_grad()
def split_experts(experts: nn.ModuleList, tp: GroupMember) -> None:
    """Keep this rank's part of each expert: columns of the first matrices, rows of the last.

    Raises:  CourseError for experts whose last matrix has a bias: it would be added p times
    """
    for module in experts.modules():
        if not isinstance(module, MLP):
            continue
        if module.out.bias is not None:
            raise CourseError("expert_tp: need experts without biases; got some with.")
        for linear, dim in ((module.up, 0), (module.gate, 0), (module.out, 1)):
            if linear is not None:
                part = linear.weight.chunk(tp.size, dim)[tp.rank].clone()
                linear.weight = nn.Parameter(part, linear.weight.requires_grad)


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(out, x.contiguous(), group=group)
    return out
