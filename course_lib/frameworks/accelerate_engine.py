"""Accelerate on the ranks of the course: its DDP, its DeepSpeed plugin, its FSDP plugin.

On CPUs Accelerate silently leaves plugins out and trains with plain DDP, so each of these functions
checks what really runs. Notebook 10_fsdp.
"""

import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from course_lib.frameworks.deepspeed_engine import (
    check_deepspeed,
    choose_device,
    deepspeed_config,
    gathered_weights,
    quiet_deepspeed,
)
from course_lib.frameworks.engine import (
    Engine,
    MakeOptimizer,
    copied_weights,
    in_world,
    must_be,
    needed,
    stepping,
)
from course_lib.frameworks.fully_sharded import check_sharded, whole_weights
from course_lib.ranks.world import rank_device


def accelerate_ddp(model: nn.Module, make_optimizer: MakeOptimizer) -> Engine:
    """Return the model under Accelerate without plugins: PyTorch's DDP.

    Raises: CourseError where Accelerate is not installed, or runs something else
    """
    where = "accelerate_ddp"
    accelerate = _fresh(where)
    accelerator = accelerate.Accelerator(cpu=rank_device().type == "cpu")
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    _check(where, accelerator, "MULTI_CPU" if rank_device().type == "cpu" else "MULTI_GPU")
    must_be(where, "the model's type", "DistributedDataParallel", type(wrapped).__name__)
    return _engine(
        "Accelerate DDP", accelerator, wrapped, optimizer, partial(copied_weights, model)
    )


def accelerate_deepspeed(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    stage: int,
    clip_norm: float = 0.0,
    **zero: Any,
) -> Engine:
    """Return the model under Accelerate's DeepSpeed plugin.

    The plugin takes effect only where Accelerate is *not* set to use the CPU; the process group
    uses gloo.

    Raises: CourseError where a package is not installed, or something else runs
    """
    where = "accelerate_deepspeed"
    accelerate = _fresh(where)
    quiet_deepspeed(where)
    needed("transformers", where)
    plugin = accelerate.DeepSpeedPlugin(
        hf_ds_config=deepspeed_config(stage, clip_norm=clip_norm, **zero)
    )
    gloo = accelerate.InitProcessGroupKwargs(backend="gloo")
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    _check(where, accelerator, "DEEPSPEED")
    check_deepspeed(where, wrapped, stage, clip_norm=clip_norm)
    weights = partial(gathered_weights, wrapped.module)
    name = f"Accelerate, DeepSpeed ZeRO-{stage}"
    engine = _engine(name, accelerator, wrapped, optimizer, weights)
    return replace(engine, clip=None)


def accelerate_fsdp(
    model: nn.Module, make_optimizer: MakeOptimizer, *, unit: type[nn.Module]
) -> Engine:
    """Return the model under Accelerate's FSDP plugin, version 2, which calls `fully_shard`.

    unit   modules of this type are gathered one by one; the rest is a unit of its own

    Accelerate supports the plugin on accelerators only. On CPUs the distributed
    type is set to an accelerator's that its FSDP treats like a CPU: for comparisons only.

    Raises: CourseError where Accelerate is not installed, or something else runs
    """
    where = "accelerate_fsdp"
    accelerate = _fresh(where)
    if rank_device().type == "cpu":
        accelerate.PartialState(cpu=True)
        kind = accelerate.DistributedType.MULTI_XPU
        accelerate.PartialState._shared_state["distributed_type"] = kind
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[unit.__name__],
    )
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    _check(where, accelerator, "FSDP")
    check_sharded(where, wrapped)
    return _engine(
        "Accelerate FSDP", accelerator, wrapped, optimizer, partial(whole_weights, wrapped)
    )


def _fresh(where: str) -> Any:
    """Import Accelerate, and reset the shared state that an earlier engine has left."""
    in_world(where)
    choose_device()
    accelerate = needed("accelerate", where)
    logging.getLogger("accelerate").setLevel(
        logging.ERROR
    )  # it warns of tied weights that it saves
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    return accelerate


def _check(where: str, accelerator: Any, kind: str) -> None:
    must_be(where, "the number of ranks", dist.get_world_size(), accelerator.num_processes)
    must_be(where, "the distributed type", kind, accelerator.distributed_type.name)


def _engine(name: str, accelerator: Any, model: Any, optimizer: Any, weights: Any) -> Engine:
    return Engine(
        name=name,
        model=model,
        backward=accelerator.backward,
        update=stepping(optimizer),
        weights=weights,
        optimizer=optimizer,
        clip=partial(accelerator.clip_grad_norm_, [*model.parameters()]),
        save=accelerator.save_state,
        load=accelerator.load_state,
    )
