"""Ranks on the GPU: one with NCCL, and two that share the GPU over gloo (or have one each).

`COURSE_SHARE_GPU=1`, which allows sharing, is part of every proof's environment.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from course_lib.context_parallel import ring_attention, shard
from course_lib.core import ModelSpec
from course_lib.core.presets import find_model
from course_lib.ranks import Ranks
from course_lib.ranks.world import rank_device
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train
from tests.gpu.findings import Finding, equals

SPEC = ModelSpec(hidden=64, num_layers=4, num_heads=4, ffn_hidden=256, vocab=128, max_seq=32)
RUN = TrainConfig(model=SPEC, steps=3, global_batch=8, seq=32, dtype="float64", every=0, lr=0.01)
# Of the frameworks only Megatron-Core is here: Lightning, Accelerate and DeepSpeed want GPU number
# LOCAL_RANK for each rank, so two ranks cannot share a GPU under them.
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in ("naive-dp", "ddp", "torch-ddp", "fsdp", "torch-fsdp")},
    **{f"zero{stage}": {"strategy": f"zero{stage}"} for stage in (1, 2, 3)},
    "zero3-offload": {"strategy": "zero3-offload"},
    "tp=2": {"tp": 2},
    "tp=2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp=2, 1f1b": {"pp": 2},
    "pp=2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "cp=2, ring": {"strategy": "fsdp", "cp": 2},
    "cp=2, Ulysses": {"strategy": "ddp", "cp": 2, "cp_form": "ulysses"},
    "megatron tp=2": {"strategy": "megatron", "tp": 2},
}
ROUNDING = 1e-9  # relative, of float64, where sums run in another order


def losses_of(rank: int, config: TrainConfig) -> tuple[list[float], int]:
    """Train on a rank; return the losses, and the bytes of GPU memory that it took at the peak."""
    on_gpu = torch.cuda.is_available()
    gc.collect()  # what an earlier run has left does not count
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    record = train(rank, config)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return [step["loss"] for step in record.steps], peak - before


def backend_of(rank: int) -> str:
    """Return the name of the backend that serves the tensors on this rank's device."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD._get_backend(rank_device()).name())


def expected_backend(p: int, rehearsal: bool) -> str:
    """Return NCCL where each of p ranks has its own GPU, else gloo."""
    return "nccl" if not rehearsal and p <= torch.cuda.device_count() else "gloo"


def prove_shared_gpu(rehearsal: bool) -> Iterator[Finding]:
    """Train in each of WAYS on two ranks, which share the GPU, and compare with one process."""
    with Ranks(1) as alone:
        results = alone.run(losses_of, RUN)
        yield from _places("one process", alone, results, rehearsal)
    wanted = results[0][0]
    with Ranks(2) as pair:
        for name, how in list(WAYS.items())[:: 6 if rehearsal else 1]:
            results = pair.run(losses_of, replace(RUN, **how))
            yield Finding(what=f"{name}: relative difference of the losses",
                          measured=_difference(results[0][0], wanted), high=ROUNDING)  # fmt: skip
            yield from _places(name, pair, results, rehearsal)


def _difference(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference; nan where there is one among the losses."""
    pairs = zip(found, wanted, strict=True)
    return torch.tensor([abs(a - b) / abs(b) for a, b in pairs], dtype=torch.float64).max().item()


def _places(
    name: str, ranks: Ranks, results: list[tuple[list[float], int]], rehearsal: bool
) -> Iterator[Finding]:
    """Yield for each rank whether it trained on the GPU, and the backend of its group."""
    backends = ranks.run(backend_of)
    for rank, ((_, num_bytes), backend) in enumerate(zip(results, backends, strict=True)):
        bounds = {"high": 0} if rehearsal else {"low": 1}
        yield Finding(what=f"{name}: GPU memory that training took on rank {rank}",
                      measured=num_bytes, unit="bytes", **bounds)  # fmt: skip
        expected = expected_backend(ranks.world_size, rehearsal)
        yield equals(f"{name}: the backend on rank {rank}", backend, expected)


def every_collective(rank: int) -> tuple[dict[str, float], str, str]:
    """Call each collective; return its largest error, and the device and backend it ran on."""
    p, device = dist.get_world_size(), rank_device()
    mine = torch.arange(4.0, device=device) + rank
    errors: dict[str, float] = {}

    def compare(name: str, found: torch.Tensor, right: torch.Tensor) -> None:
        errors[name] = (found.cpu() - right).abs().max().item()

    total = mine.clone()
    dist.all_reduce(total)
    whole = torch.stack([torch.arange(4.0) + other for other in range(p)])
    compare("all_reduce", total, whole.sum(0))
    gathered = torch.empty(4 * p, device=device)
    dist.all_gather_single(gathered, mine)
    compare("all_gather", gathered.view(p, 4), whole)
    part = torch.empty(4, device=device)
    dist.reduce_scatter_single(part, gathered)
    compare("reduce_scatter", part, p * whole[rank])
    received = mine.clone()
    dist.broadcast(received, src=0)
    compare("broadcast", received, whole[0])
    swapped = torch.empty(p, device=device)
    dist.all_to_all_single(swapped, torch.full((p,), float(rank), device=device))
    compare("all_to_all", swapped, torch.arange(float(p)))
    if p > 1:
        incoming = torch.empty(4, device=device)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % p),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % p),
            ]
        )
        for work in works:
            work.wait()
        compare("send and recv", incoming, whole[(rank - 1) % p])
    dist.barrier()
    return errors, total.device.type, backend_of(rank)


def prove_collectives(rehearsal: bool) -> Iterator[Finding]:
    """Call every collective: on one rank with NCCL, on two that share the GPU over gloo."""
    for p in (1, 2):
        with Ranks(p) as ranks:
            results = ranks.run(every_collective)
        for rank, (errors, device, backend) in enumerate(results):
            where = f"on rank {rank} of {p}"
            yield equals(f"the device {where}", device, "cpu" if rehearsal else "cuda")
            yield equals(f"the backend {where}", backend, expected_backend(p, rehearsal))
            for name, error in errors.items():
                yield Finding(what=f"{name} {where}: largest error", measured=error, high=0.0)


def prove_bf16(rehearsal: bool) -> Iterator[Finding]:
    """Train with FSDP in fp32 and with bf16 computation: the losses agree to bf16's precision."""
    config = replace(RUN, model=find_model("tiny"), steps=5, dtype="float32", strategy="fsdp")
    with Ranks(2) as pair:
        wanted = pair.run(losses_of, config)[0][0]
        results = pair.run(losses_of, replace(config, compute_dtype="bfloat16"))
        yield from _places("FSDP in bf16", pair, results, rehearsal)
    difference = _difference(results[0][0], wanted)
    yield Finding(what="FSDP in bf16: relative difference of the losses to fp32",
                  measured=difference, high=2**-7)  # fmt: skip
    yield Finding(what="FSDP in bf16: the same, too large for fp32", measured=difference,
                  low=2**-23)  # fmt: skip


def torch_context_parallel(rank: int) -> tuple[float, float]:
    """Return how far attention in PyTorch's `context_parallel`, and in our ring, is from one GPU's.

    Its default balances a causal mask by a zigzag, as ours is told to.
    """
    torch.manual_seed(0)
    p, device = dist.get_world_size(), rank_device()
    whole = [torch.randn(1, 4, 512, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    alone = F.scaled_dot_product_attention(*whole, is_causal=True)
    wanted = shard(alone, rank, p, "zigzag", dim=2)
    q, k, v = (shard(x, rank, p, "zigzag", dim=2) for x in whole)
    ours = ring_attention(q, k, v, layout="zigzag")
    mesh = init_device_mesh(device.type, (p,))
    with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]):
        theirs = F.scaled_dot_product_attention(*whole, is_causal=True)
    errors = [(found - wanted).abs().max().item() for found in (theirs, ours)]
    return errors[0], errors[1]


def prove_context_parallel(rehearsal: bool) -> Iterator[Finding]:
    """Compare PyTorch's context parallelism, which needs a kernel of a GPU, with attention alone.

    On two GPUs if they are there; on one, where nothing is sent, else.
    """
    with Ranks(min(2, torch.cuda.device_count())) as ranks:
        for rank, (theirs, ours) in enumerate(ranks.run(torch_context_parallel)):
            of = f"attention on rank {rank} of {ranks.world_size}, largest error in bf16"
            yield Finding(what=f"context_parallel of PyTorch: {of}", measured=theirs, high=2**-4)
            yield Finding(what=f"ring_attention: {of}", measured=ours, high=2**-4)
