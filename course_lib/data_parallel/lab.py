"""Measure how much threads and processes do at once: p equal pieces of work, in one step of time.

A thread shares its interpreter with the others, and that runs Python code of one thread at a time;
a rank is a process with an interpreter of its own. Notebook 05_data_parallel.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from course_lib.ranks import Ranks
from course_lib.ranks.progress import in_turns

Work = Callable[[], Any]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def at_once(
    works: Mapping[str, Work], pools: Mapping[int, Ranks], turns: int = 7
) -> dict[str, list[list[float]]]:
    """Time p pieces of each work at once, in p threads and on the p ranks of each pool.

    Return, for "<name>, threads" and "<name>, processes", the seconds of each turn for each p,
    divided by those of one piece alone in its fastest turn. The turns are interleaved.
    """
    found: dict[str, list[list[float]]] = {}
    for name, work in works.items():
        alone_s: list[float] = []
        threads_s: list[list[float]] = [[] for _ in pools]
        ranks_s: list[list[float]] = [[] for _ in pools]
        for place, (p, ranks) in in_turns(enumerate(pools.items()), turns):
            alone_s.append(_in_threads(work, 1))
            threads_s[place].append(_in_threads(work, p))
            starts_s, ends_s = zip(*ranks.run(_on_rank, work), strict=True)
            ranks_s[place].append(max(ends_s) - min(starts_s))
        for way, seconds in (("threads", threads_s), ("processes", ranks_s)):
            found[f"{name}, {way}"] = [[s / min(alone_s) for s in times] for times in seconds]
    return found


def _in_threads(work: Work, p: int) -> float:
    """Return the seconds until p threads, started beforehand, have each done the work."""
    with ThreadPoolExecutor(p) as threads:
        list(threads.map(lambda _: time.sleep(0.002), range(p)))  # now every thread exists
        start_s = time.perf_counter()
        list(threads.map(lambda _: work(), range(p)))
        return time.perf_counter() - start_s


def _on_rank(_rank: int, work: Work) -> tuple[float, float]:
    """On a rank: return when it began and ended the work, by the clock that all processes share.

    A rank that waits for a core begins late: only all ranks' times say how long all of them took.
    """
    work()  # the first call of a process may be slower
    dist.barrier()
    start_s = time.perf_counter()
    work()
    return start_s, time.perf_counter()
