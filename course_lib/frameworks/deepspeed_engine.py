"""DeepSpeed's ZeRO on the ranks of the course: on CPUs, without a compiler, without MPI.

When it is first used, DeepSpeed would compile three operators: communication in shared memory, and
two optimizers. Its configuration can do without them. Notebook 09_zero.
"""

import logging
import os
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.errors import CourseError
from course_lib.frameworks.engine import Engine, MakeOptimizer, in_world, must_be, needed
from course_lib.ranks.world import rank_device

STAGES = (0, 1, 2, 3)
AS_IN_THE_PAPER = {
    "use_multi_rank_bucket_allreduce": False,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}
TAG = "state"  # DeepSpeed's name for a folder in the folder
BUCKET = 5_000_000  # elements; DeepSpeed's own 500 million would reserve 2 GB on every rank


def deepspeed_config(
    stage: int,
    *,
    offload: bool = False,
    num_micro_batches: int = 1,
    micro_batch: int = 1,
    clip_norm: float = 0.0,
    **zero: Any,
) -> dict[str, Any]:
    """Return a configuration with which DeepSpeed computes the same as PyTorch's own optimizer.

    offload   optimizer state and optimizer step on the CPU (stages 1 to 3)
    zero      more settings of "zero_optimization": reduce_bucket_size, overlap_comm, ...

    clip_norm upper limit for the norm of the gradient; 0: none (elsewhere the default is 1)

    Each of PyTorch's optimizers is accepted, also with offload.

    Raises: CourseError for a stage that does not exist
    """
    if stage not in STAGES or (offload and stage == 0):
        least = 1 if offload else 0
        raise CourseError(
            f"deepspeed_config: need a stage from {least} to 3"
            f"{' to offload' * offload}; got {stage}."
        )
    target = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": clip_norm,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, **target, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def deepspeed_engine(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    stage: int,
    offload: bool = False,
    clip_norm: float = 0.0,
    **zero: Any,
) -> Engine:
    """Return the model under DeepSpeed's ZeRO at a stage, on all ranks of the running world.

    engine = deepspeed_engine(model, partial(torch.optim.SGD, lr=0.1), stage=2)

    make_optimizer   parameters -> optimizer; any of PyTorch's
    zero             num_micro_batches: calls of `step` for one update, with the mean of their
                     gradients; and more settings of `deepspeed_config`

    DeepSpeed is made for models of billions of parameters. By default, stage 3 keeps a small model
    gathered after its first use, and stages 1 and 2 send each gradient to all ranks instead of to
    its owner. With **AS_IN_THE_PAPER, only owners receive gradients, and parameters are freed
    after each use.

    Cost:    per step, in units of the bytes of all parameters: all_reduce 1 (in the paper reduce)
             and all_gather 1 at stages 1 and 2; reduce_scatter 1 and all_gather 1 (in the paper 2,
             and more for a matrix that is used twice) at stage 3. Gradients are sent in float32
    Raises:  CourseError where DeepSpeed is not installed, or runs otherwise than configured;
             MeshError outside of a world
    """
    where = "deepspeed_engine"
    deepspeed = quiet_deepspeed(where)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config=deepspeed_config(stage, offload=offload, clip_norm=clip_norm, **zero),
    )
    check_deepspeed(where, engine, stage, offload, clip_norm)
    return Engine(
        name=f"DeepSpeed ZeRO-{stage}" + " + offload" * offload,
        model=engine,
        backward=engine.backward,
        update=engine.step,  # with zero_grad, where a whole batch is done
        weights=partial(gathered_weights, engine.module),
        optimizer=engine.optimizer,
        save=partial(engine.save_checkpoint, tag=TAG),
        load=partial(_load, engine),
    )


def _load(engine: Any, folder: str) -> None:
    path, _ = engine.load_checkpoint(folder, tag=TAG)  # without one it only warns
    must_be("deepspeed_engine", "a checkpoint in the folder", True, path is not None)


def quiet_deepspeed(where: str) -> Any:
    """Import DeepSpeed, without its compiler and without its warnings.

    Raises: MeshError outside of a world; CourseError where it is not installed
    """
    in_world(where)
    on_cpu, logger = choose_device(), logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = needed("deepspeed", where)
    logger.setLevel(logging.ERROR)  # importing it has changed that
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", FutureWarning)
    if on_cpu:
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # it serves inference
    return deepspeed


def choose_device() -> bool:
    """Return whether this rank computes on the CPU; if so, set that as DeepSpeed's accelerator.

    Call it before the import of Accelerate, too: it imports DeepSpeed where it is installed.
    """
    on_cpu = rank_device().type == "cpu"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return on_cpu


def check_deepspeed(
    where: str, engine: Any, stage: int, offload: bool = False, clip_norm: float = 0.0
) -> None:
    """Check that an engine shards at that stage over all ranks, and clips at that norm.

    Raises: CourseError where it does not
    """
    must_be(where, "the stage", stage, engine.zero_optimization_stage())
    must_be(where, "offload", offload, bool(engine.zero_offload_optimizer()))
    must_be(where, "the number of ranks", dist.get_world_size(), engine.dp_world_size)
    must_be(where, "clipping", clip_norm, engine.gradient_clipping())


def gathered_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the whole weights on every rank; at stage 3 they are gathered first."""
    zero = needed("deepspeed", "gathered_weights").zero
    params: Iterable[nn.Parameter] = list(module.parameters())
    with zero.GatheredParameters(params):
        return {name: param.detach().clone() for name, param in module.named_parameters()}
