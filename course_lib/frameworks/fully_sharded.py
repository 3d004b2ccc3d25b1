"""PyTorch's own FSDP on the ranks of the course: `fully_shard` on every block, then on the rest.

Notebook 10_fsdp.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from course_lib.core.errors import CourseError
from course_lib.frameworks.engine import Engine, MakeOptimizer, in_world, stepping
from course_lib.ranks.world import rank_device


def fully_sharded(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    unit: type[nn.Module],
    reshard_after_forward: bool = True,
) -> Engine:
    """Return the model under `fully_shard`, on all ranks of the running world.

    unit   modules of this type are gathered one by one; the rest is a unit of its own

    Raises: CourseError where no module is of that type, or a parameter is not sharded;
            MeshError outside of a world
    """
    in_world("fully_sharded")
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    for module in (*units_of("fully_sharded", model, unit), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    check_sharded("fully_sharded", model)
    optimizer = make_optimizer(model.parameters())

    return Engine(
        name="PyTorch fully_shard",
        model=model,
        backward=Tensor.backward,
        update=stepping(optimizer),
        weights=partial(whole_weights, model),
    )


def units_of(where: str, model: nn.Module, unit: type[nn.Module]) -> list[nn.Module]:
    """Return the modules of a type, each a unit. Raises: CourseError where there is none"""
    units = [module for module in model.modules() if isinstance(module, unit)]
    if not units:
        raise CourseError(
            f"{where}: need a model with modules of type {unit.__name__}; there is none in "
            f"{type(model).__name__}."
        )
    return units


def check_sharded(where: str, model: nn.Module) -> None:
    """Check that each parameter is sharded over all ranks.

    Raises: CourseError where one is not
    """
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor) or param.device_mesh.size() != dist.get_world_size():
            raise CourseError(
                f"{where}: need every parameter in shards over {dist.get_world_size()} ranks; got "
                f"{type(param).__name__} for {name}. What runs is not what was asked for."
            )


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the whole weights on every rank, gathered one by one."""
    return {
        name: param.full_tensor().detach().clone()
        for name, param in model.named_parameters()
        if isinstance(param, DTensor)
    }
