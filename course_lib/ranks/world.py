"""Joining a world: torch.distributed's process groups, each behind a `TracedGroup`."""

import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from course_lib.ranks.process_group import TracedGroup
from course_lib.ranks.tracer import CallTracer

BACKEND = "course"
NEVER = timedelta(days=365)  # hangs are found on the call board, not by a timeout of gloo
GroupBackend = dist.ProcessGroup.BackendType


def join_world(tracer: CallTracer, init_method: str, rank: int, world_size: int) -> None:
    """Make this process rank `rank`; `tracer` traces all process groups, later ones too."""

    def create(options: Any, _: Any) -> TracedGroup:
        return _make_group(tracer, options)

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=devices)
    tracer.announce_new_groups()
    dist.init_process_group(
        BACKEND, init_method=init_method, rank=rank, world_size=world_size, timeout=NEVER
    )


def _make_group(tracer: CallTracer, options: Any) -> TracedGroup:
    rank, size, store = options.group_rank, options.group_size, options.store
    gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=NEVER)
    members = tuple(options.global_ranks_in_group) or tuple(range(size))
    inner = dist.ProcessGroup(store, rank, size)
    group = TracedGroup(inner, tracer, members, options.group_id)
    backends = {"cpu": (GroupBackend.GLOO, gloo)}
    if torch.cuda.is_available():
        backends["cuda"] = _gpu_backend(gloo, store, rank, size)
    for either in (inner, group):
        either._set_default_backend(GroupBackend.GLOO)
        for device, (kind, backend) in backends.items():
            either._register_backend(torch.device(device), kind, backend)
    return group


def _gpu_backend(gloo: Any, store: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Return NCCL for CUDA tensors where every rank has its own GPU, else gloo."""
    if not dist.is_nccl_available() or not one_gpu_each():
        return GroupBackend.GLOO, gloo
    return GroupBackend.NCCL, c10d.ProcessGroupNCCL(
        store, rank, size, c10d.ProcessGroupNCCL.Options()
    )


def backend_name() -> str:
    """Return what the tensors of this rank's device travel over: `NCCL` or `gloo`."""
    has_own = torch.cuda.is_available() and dist.is_nccl_available() and one_gpu_each()
    return "NCCL" if has_own else "gloo"


def one_gpu_each() -> bool:
    """Return whether every rank of this node has its own GPU."""
    num_ranks, num_seen = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    return 0 < num_ranks <= num_seen or _sees_only_its_own()


def _sees_only_its_own() -> bool:
    """Return whether Slurm shows each rank only its part of the node's GPUs.

    So it does with --gpus-per-task, where srun itself starts the ranks: each sees a device 0.
    """
    is_task = "TORCHELASTIC_RUN_ID" not in os.environ and all(
        os.environ.get(name) == os.environ.get(of_slurm, "")
        for name, of_slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"))
    )
    num_seen = torch.cuda.device_count()
    return is_task and 0 < num_seen * int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus_of_job()


def gpus_of_job() -> int:
    """Return how many GPUs of this node Slurm gave to the job; 0 without Slurm."""
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)


def is_dry() -> bool:
    """Return whether this rank is in a `dry_world`: no other is there, and tensors have no numbers.

    A dry run goes through the same lines as a run; what needs a number, or another rank, asks this.
    """
    return dist.is_initialized() and getattr(dist.group.WORLD, "is_dry", False)


def number_in(tensor: torch.Tensor) -> float:
    """Return the number in a tensor; nan in a dry world."""
    return math.nan if tensor.is_meta else float(tensor)


def rank_device() -> torch.device:
    """Return the device this rank computes on: its own GPU, or the CPU; meta in a dry world.

    With COURSE_SHARE_GPU=1 several ranks share a GPU, and communicate over gloo: a way to try all
    of the course on a machine with one, not a way to be fast.
    """
    if is_dry():
        return torch.device("meta")
    num_seen = torch.cuda.device_count()
    if one_gpu_each() or (os.environ.get("COURSE_SHARE_GPU") == "1" and num_seen):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % num_seen)
    return torch.device("cpu")


def why_cpu() -> str:
    """Return why the ranks of a node with GPUs compute on its CPU; empty where they do not."""
    num_seen, num_given = torch.cuda.device_count(), gpus_of_job()
    if rank_device().type == "cuda" or not (num_seen or num_given):
        return ""
    if not num_seen:
        why = f"Slurm gave this node {num_given} GPUs and PyTorch sees none"
        return f"launch: {why}, so its ranks compute on the CPU. Try course doctor on the node."
    num_ranks = os.environ["LOCAL_WORLD_SIZE"]
    return (
        f"launch: need a GPU for each rank; got {num_ranks} ranks on a node that see {num_seen}, "
        f"so they use the CPU. Try --gpus-per-node={num_ranks}, or COURSE_SHARE_GPU=1."
    )
