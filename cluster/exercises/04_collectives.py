r"""Lesson 04 outside of the notebook: how fast are collectives here, and what does the model say?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/04_collectives.py

First, messages from the first rank to the last and back, in several sizes, give alpha (latency) and
beta (bandwidth). From these the cost model predicts the built-in collectives and the ring of lesson
04, which are timed in turns. Predict first: is the bus bandwidth of an all-reduce that of the link?
Run it on 2 and 4 GPUs of a node, then on two nodes: which of alpha and beta changes? Each rank
writes its run record to runs/04_collectives, or to the folder that `--record-to` names.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import ring_all_reduce
from course_lib.core import CourseError, Link
from course_lib.core.units import format_bytes, format_rate, format_seconds
from course_lib.cost.bandwidth import bus_bandwidth, fit_link
from course_lib.cost.network import collective_s
from course_lib.ranks import launch, span
from course_lib.ranks.world import rank_device

Found = dict[str, dict[int, float]]  # name -> bytes -> seconds


def there_and_back(x: Tensor) -> None:
    """Send a message from the first rank to the last one, and one back; the others do nothing."""
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        dist.send(x, last)
        dist.recv(x, last)
    elif dist.get_rank() == last:
        dist.recv(x, 0)
        dist.send(x, 0)


def all_gather(x: Tensor) -> None:
    """Give every rank the shards of all ranks."""
    p, rank = dist.get_world_size(), dist.get_rank()
    dist.all_gather_single(x, x.chunk(p)[rank].clone())


def reduce_scatter(x: Tensor) -> None:
    """Sum over all ranks; each rank keeps one shard."""
    dist.reduce_scatter_single(torch.empty_like(x.chunk(dist.get_world_size())[0]), x)


BACK = "there and back"
CALLS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "all_reduce": ("all_reduce", dist.all_reduce),
    "all_reduce, our ring": ("all_reduce", ring_all_reduce),
    "all_gather": ("all_gather", all_gather),
    "reduce_scatter": ("reduce_scatter", reduce_scatter),
    "broadcast": ("broadcast", lambda x: dist.broadcast(x, 0)),
}


def seconds(name: str, call: Callable[[Tensor], object], num_bytes: int) -> float:
    """Return the seconds of one call on the slowest rank; all ranks begin together."""
    x = torch.ones(num_bytes // 4, device=rank_device())
    dist.barrier()
    start_s = time.perf_counter()
    with span("compute", name, num_bytes):
        call(x)
        if x.is_cuda:
            torch.cuda.synchronize()
    slowest = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64, device=x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def sweep(rank: int, args: argparse.Namespace) -> Found:
    """Return the median seconds of each call and size."""
    p = dist.get_world_size()
    calls = {BACK: there_and_back} if p > 1 else {}
    calls |= {name: call for name, (_, call) in CALLS.items()}
    sizes = [int(kib * 1024) // (4 * p) * 4 * p for kib in args.sizes]  # whole shards
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in sizes} for name in calls}
    for _ in range(args.turns + 1):
        for name, call in calls.items():
            for n in sizes:
                times[name][n].append(seconds(name, call, n))
    found = {name: {n: median(t[1:]) for n, t in by.items()} for name, by in times.items()}
    if p > 1:  # the fastest turn: the link's own time, whoever else uses the nodes
        found[BACK] = {n: min(t[1:]) for n, t in times[BACK].items()}
    if rank == 0:
        print_table(found, p)
    return found


def print_table(found: Found, p: int) -> None:
    """Print a line for each call and size: seconds measured and predicted, and bus bandwidth."""
    trips = found.pop(BACK, {})
    link = fitted(trips)
    if link:
        alpha, beta = format_seconds(link.latency_s), format_rate(link.bytes_per_s)
        print(f"{p} ranks; a message takes {alpha}, then {beta}", flush=True)
    for name, by_size in found.items():
        for n, time_s in by_size.items():
            print(line(name, n, time_s, p, link), flush=True)


def fitted(trips: dict[int, float]) -> Link | None:
    """Return the link that fits the messages there and back, if there is one."""
    if not trips:
        return None
    try:
        return fit_link(list(trips), [time_s / 2 for time_s in trips.values()])
    except CourseError as problem:
        print(problem, flush=True)
        return None


def line(name: str, n: int, time_s: float, p: int, link: Link | None) -> str:
    """Return a line: what a call took, and what the model predicts."""
    kind, _ = CALLS[name]
    told = f"{name:>21} {format_bytes(n):>9}: {format_seconds(time_s):>8}"
    if link is None:
        return told
    paper_s = collective_s(kind, n, p, link)
    rate = format_rate(bus_bandwidth(kind, n, time_s, p))
    return f"{told}, on paper {format_seconds(paper_s):>8}, bus bandwidth {rate}"


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"metavar": "KIB", "help": "two sizes or more", "default": [4, 64, 1024, 4096]}
    parser.add_argument("--sizes", type=float, nargs="+", **sizes)
    parser.add_argument("--turns", type=int, default=5, help="calls of each size")
    parser.add_argument("--record-to", default="runs/04_collectives", metavar="FOLDER")
    args = parser.parse_args()
    if len(set(args.sizes)) < 2 or min(args.sizes) < 1:
        parser.error("need two --sizes or more, of 1 KiB at least")
    if args.turns < 1:
        parser.error("need --turns above 0")
    return args


if __name__ == "__main__":
    asked = arguments()
    launch(sweep, asked, record_to=asked.record_to)
