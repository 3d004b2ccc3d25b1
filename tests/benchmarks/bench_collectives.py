"""How fast the hand-written ring is: `python -m tests.benchmarks.bench_collectives`.

Ours and gloo's own all_reduce take turns of a few calls each. A ratio is gloo's time divided by
ours, which is our bandwidth by gloo's. On recorded ranks a ring has more messages than gloo's one
call. Medians of a busy machine say little: the last column is the ratio of minima.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from course_lib.collectives import ring_all_reduce
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.bandwidth import bus_bandwidth
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


def rows(world_size: int, found: list[Times]) -> Iterator[list[Any]]:
    """Yield a row for each size."""
    for size, times in zip(SIZES, found, strict=True):
        both = [format_seconds(median_s(times, name)) for name in ("ours", "gloo")]
        best = min(times["gloo"])[0] / min(times["ours"])[0]
        bus = bus_bandwidth("all_reduce", size, median_s(times, "ours"), world_size) / 1e9
        yield [f"{world_size} ranks", format_bytes(size), *both, ratio(times, "gloo", "ours"),
               bus, best]  # fmt: skip


def main() -> None:
    """Print both tables."""
    args = options(__doc__, turns=11)
    heads = ("", "size", "ours", "gloo", "ratio", "bus GB/s", "minima")
    for title, measure in WORLDS.items():
        found = (row for p in args.ranks for row in rows(p, measure(turns, p, args.turns)))
        print_table(f"{title} ranks, 1 call", heads, found)


if __name__ == "__main__":
    main()
