"""Three axes in this course and in Megatron-Core: the same model, batches and optimizer.

Notebook 11_mesh.
"""

from contextlib import closing
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core.errors import MeshError
from course_lib.mesh.cost import SUPPORTED, MeshStep
from course_lib.mesh.mesh import Mesh
from course_lib.models import GPT
from course_lib.ranks.timing import StepsTaken, timed_steps
from course_lib.train.mesh_lab import DTYPES, batch_of, take_step, trainer_of

SGD = partial(torch.optim.SGD, lr=0.1)


def run_mesh(rank: int, step: MeshStep, num_steps: int, is_ours: bool) -> StepsTaken:
    """On a rank: take steps on the step's mesh; ours with 1F1B, as Megatron-Core.

    The loss is that of the whole batch; in Megatron-Core that of the replica, nan where a stage
    does not know it. The numbers have the step's `number_bytes` in both.

    Raises: CourseError where Megatron-Core is asked for and not installed; MeshError where it
            would number the ranks in another order than the mesh
    """
    batches = [batch_of(step, number) for number in range(num_steps)]
    run = _our_steps if is_ours else _megatron_steps
    return run(rank, step, batches)


def _our_steps(rank: int, step: MeshStep, batches: list[tuple[Tensor, Tensor]]) -> StepsTaken:
    trainer = trainer_of(rank, step)  # its batches are these
    found = timed_steps(lambda *_: take_step(trainer), batches)
    for axis in trainer.mesh.mesh.sizes:
        dist.destroy_process_group(trainer.mesh.group(axis))
    return found


def _megatron_steps(rank: int, step: MeshStep, batches: list[tuple[Tensor, Tensor]]) -> StepsTaken:
    from course_lib.frameworks import MegatronEngine  # slow to import

    _check_mesh(step.mesh)
    torch.manual_seed(0)
    model = GPT(step.spec).to(DTYPES[step.number_bytes])
    dp, tp, pp = (step.mesh.size(axis) for axis in ("dp", "tp", "pp"))
    mine = step.mesh.coordinates(rank).get("dp", 0)
    with closing(MegatronEngine(model, SGD, tp=tp, pp=pp)) as engine:

        def megatron_step(inputs: Tensor, targets: Tensor) -> float:
            parts = inputs.chunk(dp)[mine], targets.chunk(dp)[mine]
            return engine.step(*parts, step.num_micro_batches)

        return timed_steps(megatron_step, batches)


def _check_mesh(mesh: Mesh) -> None:
    """Check that Megatron-Core forms the groups of this mesh: an axis of size 1 may be anywhere.

    Raises: MeshError where it does not, or the world has another number of ranks
    """
    if mesh.world_size != dist.get_world_size():
        raise MeshError(
            f"run_mesh: need a mesh of the world's {dist.get_world_size()} ranks; got {mesh}. "
            f"Try Ranks({mesh.world_size})."
        )
    sizes = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    if [*sizes] != (order := [axis for axis in SUPPORTED if axis in sizes]):
        wanted = ", ".join(f"{axis}={sizes[axis]}" for axis in order)
        raise MeshError(
            f"run_mesh: need the axes in Megatron-Core's order, {', '.join(SUPPORTED)} from "
            f"outermost to innermost; got {mesh}. Try Mesh({wanted})."
        )
