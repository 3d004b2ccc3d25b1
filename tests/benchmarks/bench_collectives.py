"""How fast the hand-written ring is: `python -m tests.benchmarks.bench_collectives`.

Ours and gloo's own all_reduce take turns in one run on the same ranks, so that whatever else the
machine does falls on both. A turn is a few calls in a row, and takes as long as its slowest rank.
The ratio is the median over the turns of gloo's time by ours, which is our bandwidth by gloo's.

The first table is for bare processes, as under torchrun; the second one for the ranks of a
notebook, where every message is announced and recorded, and a ring has more of them than gloo's one
call. Medians of a busy machine say little: the last column is the ratio of minima.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from course_lib.collectives import ring_all_reduce
from course_lib.collectives.group import exchange, member_of
from course_lib.core import Link
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.bandwidth import bus_bandwidth, fit_link
from tests.benchmarks.worlds import bare_processes, recorded_ranks

MIB = 2**20
SIZES = [num * MIB for num in (1, 4, 16, 64)]
CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "ours": ring_all_reduce,
    "gloo": dist.all_reduce,
}
Turns = dict[str, list[float]]


def turns(rank: int, num_turns: int) -> list[Turns]:
    """Measure seconds per call of the slowest rank, for every size, call and turn."""
    return [_turns_of_size(size, num_turns) for size in SIZES]


def _turns_of_size(num_bytes: int, num_turns: int) -> Turns:
    tensor = torch.zeros(num_bytes // 4)  # zeros stay zeros, however often they are summed
    num_calls = max(1, 16 * MIB // num_bytes)
    seconds: Turns = {name: [] for name in CALLS}
    for turn in range(num_turns + 1):
        for name, call in CALLS.items():
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(num_calls):
                call(tensor)
            slowest = torch.tensor((time.perf_counter() - start_s) / num_calls)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:  # the first turn touches fresh memory
                seconds[name].append(slowest.item())
    return seconds


def swaps(rank: int, sizes: Sequence[int], num_turns: int) -> list[tuple[int, float]]:
    """Time exchanges between ranks 0 and 1, both ways at once as on a ring: (bytes, seconds)."""
    samples = []
    member = member_of(None, "swaps")
    for size in sizes:
        mine, theirs = torch.zeros(2, size, dtype=torch.uint8)
        for turn in range(num_turns + 4):
            start_s = time.perf_counter()
            exchange(member, mine, 1 - rank, theirs, 1 - rank)
            if turn >= 4:
                samples.append((size, time.perf_counter() - start_s))
    return samples


def fit_of_this_machine(num_turns: int) -> Link:
    """Fit latency and bandwidth of an exchange between two ranks of a notebook."""
    from course_lib.ranks import Ranks

    with Ranks(2) as ranks:
        samples = ranks.run(swaps, [2**k for k in range(10, 25, 2)], num_turns)[0]
    return fit_link(*zip(*samples, strict=True), name="latency, bandwidth")


def print_rows(world_size: int, found: list[Turns]) -> None:
    """Print one line per size."""
    for size, seconds in zip(SIZES, found, strict=True):
        ours, gloo = median(seconds["ours"]), median(seconds["gloo"])
        ratio = median(g / o for o, g in zip(seconds["ours"], seconds["gloo"], strict=True))
        best = min(seconds["gloo"]) / min(seconds["ours"])
        bus = bus_bandwidth("all_reduce", size, ours, world_size) / 1e9
        print(
            f"{world_size:5} {format_bytes(size):>8} {format_seconds(ours):>9} "
            f"{format_seconds(gloo):>9} {ratio:7.2f} {bus:10.2f} {best:8.2f}"
        )


def main() -> None:
    """Print both tables, and this machine's latency and bandwidth."""
    parser = argparse.ArgumentParser(description="The hand-written ring against gloo's all_reduce.")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    for title, measure in (("bare", bare_processes), ("recorded", recorded_ranks)):
        print(
            f"{title} ranks, 1 call\nranks     size      ours      gloo   ratio   bus GB/s   minima"
        )
        for world_size in args.ranks:
            print_rows(world_size, measure(turns, world_size, args.turns))
    print("one exchange between 2 ranks:", fit_of_this_machine(args.turns))


if __name__ == "__main__":
    main()
