"""Validation: the mean loss of batches that the training never sees, over all ranks.

A text or dialogues keep their last tenth back; synthetic tokens come from batches that no training
reaches. Each evaluation reads the same batches, without dropout and without gradients.
"""

from typing import Any

import torch
import torch.distributed as dist

from course_lib.accumulation.accumulation import split_micro_batches
from course_lib.mesh.model_part import ModelPart
from course_lib.models.data import IGNORED
from course_lib.ranks.world import rank_device
from course_lib.train.config import TrainConfig
from course_lib.train.data import Examples
from course_lib.train.forward_backward import GradientPass
from course_lib.train.mesh import TrainMesh

BATCHES = 4  # of global_batch sequences
FIRST = 2**40  # the number of the first one


def validation_loss(
    examples: Examples,
    part: ModelPart[Any],
    losses: GradientPass,
    config: TrainConfig,
    mesh: TrainMesh,
) -> float:
    """Return the mean loss over all tokens that count, the same on every rank. All ranks call it.

    Cost:    the forward passes of a few steps, and one all_reduce of two numbers
    """
    total = torch.zeros(2, device=rank_device(), dtype=torch.float64)  # summed losses, tokens
    part.module.eval()
    for n in range(FIRST, FIRST + BATCHES):
        whole = examples.batch(n, batch=config.global_batch, seq=config.seq, seed=config.seed)
        own = tuple(mesh.part_of(tensor).to(rank_device()) for tensor in whole)
        micro_batches = split_micro_batches(own, config.num_micro_batches(mesh.size("dp")))
        counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
        found = losses(micro_batches, counts)
        if mesh.reports:
            total += torch.stack([found[0], found.new_tensor(sum(counts))])
    part.module.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
