"""How fast the pool of ranks starts, answers, restarts and notices a hang: medians, printed.

python -m tests.benchmarks.bench_ranks
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks

COLD_START = """
import time
start_s = time.perf_counter()
from course_lib.ranks import Ranks
imported_s = time.perf_counter()
ranks = Ranks({world_size})
ranks.run(lambda rank: None)
print(imported_s - start_s, time.perf_counter() - imported_s)
"""


def sum_of_ones(rank: int) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("forgot")
    dist.all_reduce(torch.ones(1))


def dies(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def circle(rank: int) -> None:
    dist.send(torch.ones(1), (rank + 1) % 4)
    dist.recv(torch.ones(1), (rank - 1) % 4)


def only_rank_0(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def mismatch(rank: int) -> None:
    dist.all_reduce(torch.ones(1 + rank % 2))


def returns_early(rank: int) -> None:
    if rank != 3:
        dist.barrier()


def ddp_uneven(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(2 + (rank == 0)):
        model(torch.ones(1, 2)).sum().backward()


def seconds(job: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    job()
    return time.perf_counter() - start_s


def median_ms(job: Callable[[], object], repeats: int) -> float:
    return statistics.median(seconds(job) for _ in range(repeats)) * 1e3


def cold_starts(world_size: int) -> tuple[float, float]:
    runs = []
    for _ in range(3):
        command = [sys.executable, "-c", COLD_START.format(world_size=world_size)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        runs.append(tuple(map(float, out.split())))
    imports, starts = zip(*runs, strict=True)
    return statistics.median(imports), statistics.median(starts)


def report_s(ranks: Ranks, fn: Callable[[int], None]) -> float:
    def fail() -> None:
        try:
            ranks.run(fn)
        except RankError:
            return
        raise SystemExit(f"{fn.__name__}: no failure was reported")

    return seconds(fail)


def main() -> None:
    for world_size in (2, 4, 8):
        imported_s, started_s = cold_starts(world_size)
        print(f"cold start, {world_size} ranks    {started_s:6.2f} s  (import: {imported_s:.2f} s)")
    with Ranks(4) as ranks:
        ranks.run(sum_of_ones)
        print(f"warm call, 4 ranks      {median_ms(lambda: ranks.run(int), 50):6.1f} ms")
        print(f"warm call + all_reduce  {median_ms(lambda: ranks.run(sum_of_ones), 50):6.1f} ms")
        print(f"restart + all_reduce    {median_ms(lambda: restart(ranks), 5):6.1f} ms")
        private = ranks.run(lambda rank: psutil.Process().memory_full_info().uss)
        print(f"private memory a rank   {max(private) / 2**20:6.1f} MiB")
        for fn in (raises, dies, circle, only_rank_0, mismatch, returns_early, ddp_uneven):
            print(f"report: {fn.__name__:15s} {report_s(ranks, fn):6.2f} s")


def restart(ranks: Ranks) -> None:
    ranks.restart()
    ranks.run(sum_of_ones)


if __name__ == "__main__":
    main()
