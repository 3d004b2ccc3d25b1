"""Clip the norm of a gradient that is spread over the axes of a mesh.

Each number of the whole gradient counts once: shards of a matrix are added over tp, layers over pp.
What tp replicates, or some of its ranks share, counts on one of them, and a tied parameter on the
first stage that holds it. Along dp all ranks have the same gradient, which has been averaged.
Notebook 11_mesh.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mesh.rank_mesh import RankMesh
from course_lib.pipeline.stage import Stage
from course_lib.tensor_parallel.state import counted_once

EPS = 1e-6  # as in nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm_across(module: nn.Module, mesh: RankMesh, max_norm: float) -> Tensor:
    """Scale this rank's gradients so that the norm of the whole one is at most max_norm.

    module   this rank's part of the model, with gradients that are averaged over dp, and finished
             (`finish_gradients`)

    Returns the norm before, in float64, the same on all ranks.

    Cost:    one all_reduce of one number along tp, and one along pp
    """
    grads = {name: param.grad for name, param in module.named_parameters()}
    squares = torch.zeros((), dtype=torch.float64, device=_device(module))
    for name in counted_here(module, mesh):
        if (grad := grads[name]) is not None:
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2
    for axis in ("tp", "pp"):
        if mesh.size(axis) > 1:
            dist.all_reduce(squares, group=mesh.group(axis))
    norm = squares.sqrt()
    factor = (max_norm / (norm + EPS)).clamp(max=1.0)
    for grad in grads.values():
        if grad is not None:
            grad.mul_(factor.to(grad.dtype))
    return norm


def counted_here(module: nn.Module, mesh: RankMesh) -> list[str]:
    """Return the names of the parameters whose squares this rank adds to the norm."""
    split = counted_once(module, mesh.index("tp"))
    tied = module.tied if isinstance(module, Stage) else []
    elsewhere = {one.param for one in tied if one.stages[0] != mesh.index("pp")}
    return [
        name
        for name, param in module.named_parameters()
        if param not in elsewhere and (name in split or mesh.index("tp") == 0)
    ]


def _device(module: nn.Module) -> torch.device | None:
    param = next(module.parameters(), None)
    return None if param is None else param.device
