"""Tensor parallelism in this course and in Megatron-Core: the same model, batches, optimizer.

Notebook 07_tensor_parallel.
"""

from collections.abc import Iterable
from contextlib import closing
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from course_lib.core.specs import ModelSpec
from course_lib.models import GPT
from course_lib.ranks.timing import StepsTaken, timed_steps
from course_lib.ranks.world import rank_device
from course_lib.tensor_parallel.cross_entropy import parallel_token_loss
from course_lib.tensor_parallel.tensor_parallel import parallelize

SGD = partial(torch.optim.SGD, lr=0.1)


def run_tensor_parallel(
    rank: int, spec: ModelSpec, batches: Iterable[tuple[Tensor, Tensor]], is_ours: bool
) -> StepsTaken:
    """On a rank: take a step per batch, with every layer split over all ranks.

    Raises: CourseError where Megatron-Core is asked for and not installed
    """
    torch.manual_seed(0)
    model, p, device = GPT(spec), dist.get_world_size(), rank_device()
    if not is_ours:
        from course_lib.frameworks import MegatronEngine  # slow to import

        with closing(MegatronEngine(model, SGD, tp=p)) as engine:
            return timed_steps(engine.step, batches)
    mesh = init_device_mesh(device.type, (p,))
    parallelize(model.to(device), mesh)
    optimizer = SGD(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        logits = model(inputs.to(device))
        loss = parallel_token_loss(logits, targets.to(device), mesh.get_group())
        loss.backward()
        optimizer.step()
        return loss.item()

    return timed_steps(step, batches)
