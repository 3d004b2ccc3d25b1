"""Lightning Fabric on the ranks of the course: DDP, FSDP2, and FSDP2 with tensor parallelism.

Fabric uses the existing process group and starts no processes. Its `FSDPStrategy`, FSDP's
first version, refuses CPUs; `ModelParallelStrategy` applies `fully_shard` and runs on both.
"""

import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from course_lib.frameworks.engine import (
    Engine,
    MakeOptimizer,
    copied_weights,
    in_world,
    must_be,
    needed,
    stepping,
)
from course_lib.frameworks.fully_sharded import check_sharded, units_of, whole_weights
from course_lib.ranks.world import rank_device

FILE = "state.ckpt"  # or, of shards, a folder


def lightning_ddp(model: nn.Module, make_optimizer: MakeOptimizer) -> Engine:
    """Return the model under Fabric's `DDPStrategy`, which is PyTorch's DDP.

    Raises: CourseError where Lightning is not installed, or runs something else;
            MeshError outside of a world
    """
    where = "lightning_ddp"
    strategies = _strategies(where)
    fabric = _fabric(where, strategies.DDPStrategy)
    wrapped, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
    inside = type(wrapped._forward_module).__name__
    must_be(where, "the model's type", "DistributedDataParallel", inside)
    return _engine("Lightning DDP", fabric, wrapped, optimizer, partial(copied_weights, model))


def lightning_fsdp(
    model: nn.Module, make_optimizer: MakeOptimizer, *, unit: type[nn.Module]
) -> Engine:
    """Return the model under Fabric's `ModelParallelStrategy`, which calls `fully_shard`.

    unit   modules of this type are gathered one by one; the rest is a unit of its own

    Raises: CourseError where Lightning is not installed, no module is of that type, or a parameter
            is not sharded; MeshError outside of a world
    """
    where = "lightning_fsdp"
    strategies = _strategies(where)
    units = units_of(where, model, unit)

    def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
        for part in (*units, module):
            fully_shard(part, mesh=mesh["data_parallel"])
        return module

    strategy = partial(
        strategies.ModelParallelStrategy,
        parallelize_fn=parallelize,
        data_parallel_size=dist.get_world_size(),
        tensor_parallel_size=1,
    )
    fabric = _fabric(where, strategy)
    wrapped = fabric.setup_module(model)  # parameters change, so the optimizer comes later
    check_sharded(where, model)
    optimizer = fabric.setup_optimizers(make_optimizer(wrapped.parameters()))
    return _engine("Lightning FSDP2", fabric, wrapped, optimizer, partial(whole_weights, model))


def _strategies(where: str) -> Any:
    """Import Lightning's strategies without their warnings. Raises: CourseError, MeshError"""
    in_world(where)
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        needed("lightning_fabric", where)
        import lightning_fabric.strategies as strategies
    return strategies


def _fabric(where: str, strategy: Callable[..., Any]) -> Any:
    """Return Fabric with a strategy, on the running ranks: it reads torchrun's variables."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    here, everywhere = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
    fabric = Fabric(
        accelerator="cpu" if rank_device().type == "cpu" else "cuda",
        devices=here,
        num_nodes=everywhere // here,
        strategy=strategy(process_group_backend=dist.get_backend()),
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    must_be(where, "the number of ranks", everywhere, fabric.world_size)
    return fabric


def _engine(name: str, fabric: Any, model: Any, optimizer: Any, weights: Any) -> Engine:
    def save(folder: str) -> None:
        fabric.save(f"{folder}/{FILE}", {"model": model, "optimizer": optimizer})

    def load(folder: str) -> None:
        fabric.load(f"{folder}/{FILE}", {"model": model, "optimizer": optimizer})

    def clip(max_norm: float) -> Any:
        how = {"max_norm": max_norm, "error_if_nonfinite": False}
        return fabric.clip_gradients(model, optimizer, **how)

    return Engine(
        name=name,
        model=model,
        backward=fabric.backward,
        update=stepping(optimizer),
        weights=weights,
        optimizer=optimizer,
        clip=clip,
        save=save,
        load=load,
    )
