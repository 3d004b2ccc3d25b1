r"""Lesson 16 outside of the notebook: what does an unbalanced router cost on your cluster?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    cluster/exercises/16_experts.py

All ranks share the experts of one layer. Its forward and backward pass run with a router that is
balanced and with ones that prefer the first experts; they take turns. Predict first: how many times
as long does the layer take if the fullest rank has twice the mean? Run it on one node, then on two.
Each rank writes its run record to runs/16_experts, or where `--record-to` says.
"""

import argparse
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib.core import CourseError
from course_lib.core.units import format_bytes
from course_lib.expert_parallel.cost import RoutedSizes, exchange_bytes, load_imbalance
from course_lib.expert_parallel.lab import divided_layer, skewed_choices
from course_lib.expert_parallel.simulation import count_experts
from course_lib.ranks import launch, span
from course_lib.ranks.world import rank_device

Found = dict[float, float]


def sizes_of(args: argparse.Namespace) -> RoutedSizes:
    """Return the sizes of the layer. Raises: CourseError for those that do not fit together"""
    numbers = {"hidden": args.hidden, "experts": args.experts, "active": args.active}
    return RoutedSizes(tokens=args.tokens, number_bytes=4, **numbers)


def step(layer: torch.nn.Module, sizes: RoutedSizes, words: str) -> float:
    """Return the seconds of forward and backward on this rank."""
    tokens = torch.randn(sizes.tokens, sizes.hidden, device=rank_device(), requires_grad=True)
    dist.barrier()
    start_s = time.perf_counter()
    with span("compute", words):
        layer(tokens).sum().backward()
        if tokens.is_cuda:
            torch.cuda.synchronize()
    return time.perf_counter() - start_s


def sweep(rank: int, args: argparse.Namespace) -> Found:
    """Return the fastest step of each skew, in seconds; the slowest rank counts."""
    sizes, p, seconds = sizes_of(args), dist.get_world_size(), dict[float, list[float]]()
    layers, loads = {}, {}
    for skew in args.skews:
        of_all = skewed_choices(sizes.tokens * p, sizes.experts, sizes.active, skew)
        own = of_all.chunk(p)[rank].to(rank_device())
        layers[skew] = divided_layer(sizes, own).to(rank_device())
        loads[skew] = load_imbalance(count_experts(of_all.numpy(), sizes.experts), p)
        seconds[skew] = []
    for _ in range(args.turns + 1):
        for skew, layer in layers.items():
            slowest = torch.tensor(step(layer, sizes, f"skew {skew:g}"), device=rank_device())
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[skew].append(slowest.item())
    found = {skew: min(times[1:]) for skew, times in seconds.items()}
    if rank == 0:
        sent = format_bytes(sum(exchange_bytes(sizes, p)))
        print(f"{sizes.tokens} tokens on each of {p} ranks; {sent} sent by a rank if balanced")
        for skew, step_s in found.items():
            words = f"fullest rank / mean {loads[skew]:.2f}"
            print(f"skew {skew:g}, {words}: {step_s * 1e3:8.1f} ms", flush=True)
    return found


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; end with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--hidden", type=int, default=256, help="values of a token")
    parser.add_argument("--experts", type=int, default=16, help="of the layer, on all ranks")
    parser.add_argument("--active", type=int, default=2, help="experts of a token")
    parser.add_argument("--skews", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="0: none")
    parser.add_argument("--turns", type=int, default=5, help="of each router, after a warm-up")
    parser.add_argument("--record-to", default="runs/16_experts", metavar="FOLDER")
    arguments = parser.parse_args(words)
    try:
        sizes_of(arguments)
    except CourseError as problem:
        parser.error(str(problem))
    if arguments.turns < 1:
        parser.error("need --turns above 0")
    return arguments


if __name__ == "__main__":
    arguments = read_arguments()
    launch(sweep, arguments, record_to=arguments.record_to)
