"""How fast the hand-written ring is: `python -m tests.benchmarks.bench_collectives`.

Ours and gloo's own all_reduce take turns of a few calls each. A ratio is gloo's time divided by
ours, which is our bandwidth by gloo's. On recorded ranks a ring has more messages than gloo's one
call. Medians of a busy machine say little: the last column is the ratio of minima.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from course_lib.collectives import ring_all_reduce
from course_lib.collectives.group import exchange, member_of
from course_lib.core import Link
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.bandwidth import bus_bandwidth, fit_link
from tests.benchmarks.harness import (
    WORLDS,
    Times,
    median_s,
    options,
    print_table,
    ratio,
    take_turns,
)

MIB = 2**20
SIZES = [num * MIB for num in (1, 4, 16, 64)]


def turns(rank: int, num_turns: int) -> list[Times]:
    """Measure seconds per call, for every size, call and turn."""
    return [_turns_of_size(size, num_turns) for size in SIZES]


def _turns_of_size(num_bytes: int, num_turns: int) -> Times:
    tensor = torch.zeros(num_bytes // 4)  # zeros stay zeros, however often they are summed
    calls = {"ours": partial(ring_all_reduce, tensor), "gloo": partial(dist.all_reduce, tensor)}
    return take_turns(calls, num_turns, num_calls=max(1, 16 * MIB // num_bytes))


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


def rows(world_size: int, found: list[Times]) -> Iterator[list[Any]]:
    """Yield a row for each size."""
    for size, times in zip(SIZES, found, strict=True):
        both = [format_seconds(median_s(times, name)) for name in ("ours", "gloo")]
        best = min(times["gloo"])[0] / min(times["ours"])[0]
        bus = bus_bandwidth("all_reduce", size, median_s(times, "ours"), world_size) / 1e9
        yield [f"{world_size} ranks", format_bytes(size), *both, ratio(times, "gloo", "ours"),
               bus, best]  # fmt: skip


def main() -> None:
    """Print both tables, and this machine's latency and bandwidth."""
    args = options(__doc__, turns=11)
    heads = ("", "size", "ours", "gloo", "ratio", "bus GB/s", "minima")
    for title, measure in WORLDS.items():
        found = (row for p in args.ranks for row in rows(p, measure(turns, p, args.turns)))
        print_table(f"{title} ranks, 1 call", heads, found)
    print("one exchange between 2 ranks:", fit_of_this_machine(args.turns))


if __name__ == "__main__":
    main()
