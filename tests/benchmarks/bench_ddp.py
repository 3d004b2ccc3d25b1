"""How fast our DDP is: `python -m tests.benchmarks.bench_ddp`.

Ours and torch's DDP take turns in one run on the same ranks, so that whatever else the machine does
falls on both. A turn is one training step, and takes as long as its slowest rank. The ratio is the
median over the turns of our time by torch's; on a busy machine the one of processor time, by rank 0
in all its threads, says more. The first table is for bare processes, as under
torchrun; the second one for the ranks of a notebook, where every message is recorded.

Then bucket sizes on an emulated wire that takes about half as long as computing: predicted from
what one rank computes alone, and measured. Once with layers that only take their time, and once
with the GPT, whose ranks share the processors with the wire.
"""

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.core import Link, ModelSpec
from course_lib.core.units import format_bytes, format_seconds
from course_lib.ddp import DDP
from course_lib.ddp.cost import best_bucket_bytes, step_s
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from tests.benchmarks.worlds import bare_processes, recorded_ranks

SPEC = ModelSpec(
    name="10M",
    hidden=320,
    num_layers=4,
    num_heads=8,
    ffn_hidden=1536,
    vocab=8000,
    max_seq=128,
    tied=False,
)
Turns = dict[str, list[float]]


def turns(rank: int, num_turns: int) -> Turns:
    """Seconds a step for ours and torch's, by the slowest rank, and this rank's processor time."""
    models = {"ours": DDP(GPT(SPEC)), "torch": nn.parallel.DistributedDataParallel(GPT(SPEC))}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=1e-3) for name, m in models.items()}
    seconds: Turns = {key: [] for name in models for key in (name, f"{name} cpu")}
    for turn in range(num_turns + 2):
        for name in list(models)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start_s, cpu_s = time.perf_counter(), time.process_time()
            one_step(rank, models[name], optimizers[name])
            cpu_s = time.process_time() - cpu_s
            slowest = torch.tensor(time.perf_counter() - start_s)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 2:  # the first turns touch fresh memory, and torch rebuilds its buckets
                seconds[name].append(slowest.item())
                seconds[f"{name} cpu"].append(cpu_s)
    return seconds


def one_step(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One training step."""
    optimizer.zero_grad()
    gpt_loss(model, rank).backward()
    if isinstance(model, DDP):
        model.finish()
    optimizer.step()


def gpt_loss(model: nn.Module, rank: int) -> torch.Tensor:
    """The loss of this rank's batch."""
    tokens, targets = next_tokens(token_batch(rank, batch=2, seq=64, vocab=SPEC.vocab))
    return token_loss(model(tokens), targets)


def gpt() -> nn.Module:
    """The model of all tables."""
    return GPT(SPEC)


def print_row(world_size: int, seconds: Turns) -> None:
    """One line: medians, and the median of the ratios."""
    ours, theirs = median(seconds["ours"]), median(seconds["torch"])
    ratios = [
        median(o / t for o, t in zip(seconds[f"ours{of}"], seconds[f"torch{of}"], strict=True))
        for of in ("", " cpu")
    ]
    print(
        f"{world_size:5} {format_seconds(ours):>9} {format_seconds(theirs):>9} "
        f"{ratios[0]:7.3f} {ratios[1]:10.3f}"
    )


def print_sweep(title: str, build: Any, loss_of: Any, num_turns: int) -> None:
    """Predicted and measured steps of two ranks for some bucket sizes, with overlap and without."""
    from course_lib.ddp.lab import measure_cost, measure_steps
    from course_lib.ranks import Ranks

    with Ranks(2) as ranks:
        cost = measure_cost(ranks, build, loss_of, num_turns)
    total = sum(cost.grad_bytes)
    link = Link(
        name="wire", latency_s=0.01 * cost.compute_s, bytes_per_s=total / (0.4 * cost.compute_s)
    )
    sizes = {best_bucket_bytes(cost, 2, link), max(cost.grad_bytes) // 4, total}
    runs = {
        (size, overlap): {"bucket_bytes": size, "overlap": overlap}
        for size in sorted(sizes)
        for overlap in (True, False)
    }
    with Ranks(2, link=link) as ranks:
        steps = measure_steps(ranks, build, loss_of, runs, num_turns)
        after = measure_cost(ranks, build, loss_of, num_turns)
    ready_s = tuple((a + b) / 2 for a, b in zip(cost.ready_s, after.ready_s, strict=True))
    forward_s = (cost.forward_s + after.forward_s) / 2  # the machine may have got slower meanwhile
    cost = replace(cost, forward_s=forward_s, ready_s=ready_s)
    print(f"{title}: computes {format_seconds(cost.compute_s)}; emulated {link}")
    print("  bucket  overlap  predicted  measured   ratio")
    for (size, overlap), step in steps.items():
        predicted_s = step_s(cost, size, 2, link, overlap=overlap)
        print(
            f"{format_bytes(size):>8} {overlap!s:>8} {format_seconds(predicted_s):>10} "
            f"{format_seconds(step.step_s):>9} {step.step_s / predicted_s:7.2f}"
        )


def main() -> None:
    """Print all tables."""
    from course_lib.models.emulated import emulated_loss, emulated_model

    parser = argparse.ArgumentParser(description="Our DDP against torch's, and overlap.")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    for title, measure in (("bare", bare_processes), ("recorded", recorded_ranks)):
        print(
            f"{title} ranks, GPT {SPEC.name}, 1 step\nranks      ours     torch   ratio  cpu ratio"
        )
        for world_size in args.ranks:
            print_row(world_size, measure(turns, world_size, args.turns))
    few = max(1, args.turns // 3)
    print_sweep("layers that sleep", emulated_model, emulated_loss, few)
    print_sweep(f"GPT {SPEC.name}", gpt, gpt_loss, few)


if __name__ == "__main__":
    main()
