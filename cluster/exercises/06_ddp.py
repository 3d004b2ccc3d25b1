"""Lesson 06 outside of the notebook: how large a bucket is best on this network?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/06_ddp.py

A GPT takes a few steps for each bucket size, without overlap, and with PyTorch's own DDP. The
steps are interleaved, so that other traffic affects all of them alike. Predict first: which size is
best, and how much faster is it? Each rank writes its run record to runs/06_ddp, or where
`--record-to` says.
"""

import argparse
import time
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.core import CourseError, find_model
from course_lib.ddp import DDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, record, span
from course_lib.ranks.timing import largest_difference
from course_lib.ranks.world import rank_device

MIB = 2**20
THEIRS = "PyTorch"


def options_of(sizes_mib: list[float]) -> dict[str, dict[str, Any]]:
    """Return the options of each run by name: each size, one bucket for all, and no overlap."""
    runs: dict[str, dict[str, Any]] = {
        f"{size:g} MiB": {"bucket_bytes": size * MIB} for size in sizes_mib
    }
    runs["one bucket"] = {"bucket_bytes": float("inf")}
    middle = sizes_mib[len(sizes_mib) // 2] * MIB if sizes_mib else MIB
    runs["no overlap"] = {"bucket_bytes": middle, "overlap": False}
    return runs


def step(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], name: str
) -> tuple[float, int]:
    """Return the seconds and the messages of forward and backward; all ranks begin together."""
    model.zero_grad()
    dist.barrier()
    start_s = time.perf_counter()
    with record() as log, span("compute", name):
        token_loss(model(batch[0]), batch[1]).backward()
        if isinstance(model, DDP):
            model.finish()  # PyTorch's waits at the end of backward
        if batch[0].is_cuda:
            torch.cuda.synchronize()
    seconds = time.perf_counter() - start_s
    return seconds, sum(event.kind == "all_reduce" for event in log.events)


def sweep(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of the fastest step for each bucket size; rank 0 prints them."""
    device, spec = rank_device(), find_model(args.model)
    torch.manual_seed(rank)  # the first rank's weights win
    whole = GPT(spec).to(device)
    models: dict[str, nn.Module] = {
        name: DDP(deepcopy(whole), **options) for name, options in options_of(args.sizes).items()
    }
    models[THEIRS] = DistributedDataParallel(whole)
    tokens = token_batch(rank, batch=args.batch, seq=min(args.seq, spec.max_seq), vocab=spec.vocab)
    inputs, targets = (part.to(device) for part in next_tokens(tokens))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    messages: dict[str, int] = {}
    for _ in range(args.turns + 1):
        for name, model in models.items():
            step_s, messages[name] = step(model, (inputs, targets), name)
            seconds[name].append(step_s)
    found = {name: min(times[1:]) for name, times in seconds.items()}
    apart = max(grads_apart(model, models[THEIRS]) for model in models.values())
    if rank == 0:
        num_mib = sum(param.nbytes for param in models[THEIRS].parameters()) / MIB
        p = dist.get_world_size()
        print(f"{p} ranks, gradients of {num_mib:.1f} MiB; the fastest step of each", flush=True)
        for name, step_s in found.items():
            words = f"{messages[name]:3} messages, {step_s * 1e3:8.1f} ms per step"
            print(f"{name:>12}: {words}", flush=True)
        print(f"largest difference of their gradients: {apart:.1e}", flush=True)
    return found


def grads_apart(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the largest difference between the last gradients of two models."""
    return largest_difference(*([param.grad for param in x.parameters()] for x in (ours, theirs)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument(
        "--sizes", type=float, nargs="*", default=[0.25, 1, 4], metavar="MIB", help="bucket sizes"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences on each rank")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each kind")
    parser.add_argument("--record-to", default="runs/06_ddp", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    numbers = (arguments.batch, arguments.seq, arguments.turns, *arguments.sizes)
    if min(*numbers) <= 0:
        parser.error("need --sizes, --batch, --seq and --turns above 0")
    launch(sweep, arguments, record_to=arguments.record_to)
