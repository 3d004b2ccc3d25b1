"""Finish a gradient that is spread over the axes of a mesh, and clip its norm.

Each number of the whole gradient counts once: shards of a matrix are added over tp, layers over pp.
What tp replicates, or some of its ranks share, counts on one of them, and a tied parameter on the
first stage that holds it. Along dp and cp all ranks have the same gradient, which has been
averaged; or ZeRO and FSDP have left each a shard of it, and these are added, too. Notebook 11_mesh.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import group_of, member_of, sources_of
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.pipeline.stage import Stage, sum_copies
from course_lib.tensor_parallel.state import HeldGrad, counted_once, finish_gradients
from course_lib.zero.clip import clip_shards


def held_grads(module: nn.Module) -> list[HeldGrad]:
    """Return the gradients of a module's parameters, or of the shards that stand in their place."""
    found = ((param, param.grad) for param in module.parameters())
    return [HeldGrad(param, grad) for param, grad in found if grad is not None]


@torch.no_grad()
def finish_over_axes(
    module: nn.Module, mesh: RankMesh, held: Sequence[HeldGrad], *, sums_tied: bool
) -> None:
    """After the reduction over dp: add what other stages and tp ranks have of the same gradients.

    held        the gradients that this rank has, whole or in shards
    sums_tied   also those of tied parameters; False: the pipeline has done that
    """
    if sums_tied and isinstance(module, Stage):
        grads = {one.param: one.grad for one in held}
        for tied in module.tied:
            grad = grads.get(tied.param)
            if grad is not None and grad.numel():  # a rank may own no row of it
                grad.copy_(sum_copies(grad, tied.stages, member_of(mesh.group("pp"), "Pipeline")))
    if mesh.size("tp") > 1:
        finish_gradients(module, held)


@torch.no_grad()
def clip_grad_norm_across(
    module: nn.Module,
    mesh: RankMesh,
    max_norm: float,
    held: Sequence[HeldGrad] | None = None,
    *,
    scaled: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale this rank's gradients so that the norm of the whole one is at most max_norm.

    module   this rank's part of the model, with gradients that are averaged over copies, finished
             (`finish_gradients`)
    held     the gradients where they are sharded over copies; None: those of the parameters
    scaled   the tensors to scale, where they hold more than these; default: these

    Returns the norm before, in float64, the same on all ranks.

    Cost:    one all_reduce of one number along tp and along pp; over copies, where it is sharded
             or there are experts, which fewer ranks hold
    """
    grads, counted = held_grads(module) if held is None else held, counted_here(module, mesh)
    experts = {one.param for one in grads if held is None and sources_of(one.param)}
    if experts:
        counted -= {one for one in counted if not _counts(one, mesh)}
    squared = [one.grad for one in grads if one.param in counted]
    groups = [mesh.group(axis) for axis in ("tp", "pp") if mesh.size(axis) > 1]
    if held is not None or experts:
        groups.append(mesh.copies)
    param = next(module.parameters(), None)
    return clip_shards(
        squared,
        max_norm,
        groups,
        None if param is None else param.device,
        scaled=[one.grad for one in grads] if scaled is None else scaled,
    )


def _counts(param: nn.Parameter, mesh: RankMesh) -> bool:
    """Whether this rank is the first of those that hold a parameter: fewer hold an expert."""
    return dist.get_rank(group_of(param, mesh.copies)) == 0


def counted_here(module: nn.Module, mesh: RankMesh) -> set[nn.Parameter]:
    """Return the parameters whose squares this rank adds to the norm."""
    split = counted_once(module, mesh.index("tp"))
    tied = module.tied if isinstance(module, Stage) else []
    elsewhere = {one.param for one in tied if one.stages[0] != mesh.index("pp")}
    return {
        param
        for name, param in module.named_parameters()
        if param not in elsewhere and (name in split or mesh.index("tp") == 0)
    }
