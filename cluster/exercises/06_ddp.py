"""Lesson 06 outside of the notebook: how large a bucket is best on this network?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/06_ddp.py

A GPT takes a few steps for each bucket size, and once without overlap; sizes take turns, so that
whatever else the network does falls on all. Predict first: which size, and by how much? Each rank
leaves its run record in runs/06_ddp, or where `--record-to` says.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.core.presets import find_model
from course_lib.ddp import DDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, span
from course_lib.ranks.world import rank_device

MIB = 2**20


def options_of(sizes_mib: list[float]) -> dict[str, dict[str, Any]]:
    """What is compared, by name: each bucket size, one bucket for all, and no overlap."""
    runs: dict[str, dict[str, Any]] = {
        f"{size:g} MiB": {"bucket_bytes": size * MIB} for size in sizes_mib
    }
    runs["one bucket"] = {"bucket_bytes": float("inf")}
    middle = sizes_mib[len(sizes_mib) // 2] * MIB if sizes_mib else MIB
    runs["no overlap"] = {"bucket_bytes": middle, "overlap": False}
    return runs


def step_s(model: DDP, batch: tuple[torch.Tensor, torch.Tensor], name: str) -> float:
    """Seconds of forward, backward and finish; all ranks begin together."""
    model.zero_grad()
    dist.barrier()
    start_s = time.perf_counter()
    with span("compute", name):
        token_loss(model(batch[0]), batch[1]).backward()
        model.finish()
        if batch[0].is_cuda:
            torch.cuda.synchronize()
    return time.perf_counter() - start_s


def sweep(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """The median step of each bucket size, in seconds."""
    device, spec = rank_device(), find_model(args.model)
    runs = options_of(args.sizes)
    models = {name: DDP(GPT(spec).to(device), **options) for name, options in runs.items()}
    tokens = token_batch(rank, batch=args.batch, seq=min(args.seq, spec.max_seq), vocab=spec.vocab)
    inputs, targets = (part.to(device) for part in next_tokens(tokens))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.turns + 1):
        for name, model in models.items():
            seconds[name].append(step_s(model, (inputs, targets), name))
    found = {name: median(times[1:]) for name, times in seconds.items()}
    if rank == 0:
        print_table(found, models, next(iter(models.values())))
    return found


def print_table(found: dict[str, float], models: dict[str, DDP], first: nn.Module) -> None:
    """One line a bucket size."""
    num_bytes = sum(param.nbytes for param in first.parameters())
    print(f"{dist.get_world_size()} ranks, gradients of {num_bytes / MIB:.1f} MiB", flush=True)
    for name, seconds in found.items():
        buckets = len(models[name].buckets)
        print(f"{name:>12}: {buckets:3} messages, {seconds * 1e3:8.1f} ms a step", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--batch", type=int, default=1, help="sequences on each rank")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each bucket size")
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.25, 1, 4], metavar="MIB")
    parser.add_argument("--record-to", default="runs/06_ddp", metavar="FOLDER")
    arguments = parser.parse_args()
    launch(sweep, arguments, record_to=arguments.record_to)
