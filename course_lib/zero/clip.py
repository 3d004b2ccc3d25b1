"""Clip the norm of a gradient that is sharded over ranks, for ZeRO and FSDP alike.

Every rank sums the squares of its shards in float64, one all_reduce adds up the ranks' sums, and
all scale by the same factor. Notebook 09_zero.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import Group


@torch.no_grad()
def clip_shards(
    shards: Sequence[Tensor],
    max_norm: float,
    group: Group | Sequence[Group],
    device: torch.device | None = None,
    *,
    scaled: Sequence[Tensor] | None = None,
) -> Tensor:
    """Scale gradients so that their norm over all ranks' shards is at most max_norm; return it.

    shards   this rank's shards of the gradients, maybe none
    group    along which the squares are added; or several, one after another
    device   where the group communicates
    scaled   the tensors to scale, where they hold more than the shards; default: the shards

    Cost:    one all_reduce of one number for each group
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for shard in shards:
        real = torch.view_as_real(shard) if shard.is_complex() else shard
        squares += torch.linalg.vector_norm(real, dtype=torch.float64) ** 2
    for one in group if isinstance(group, list | tuple) else [group]:
        dist.all_reduce(squares, group=one)
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as nn.utils.clip_grad_norm_
    for grad in shards if scaled is None else scaled:
        grad.mul_(factor.to(grad.dtype))
    return norm
