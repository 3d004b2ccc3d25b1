"""Measure the link between ranks of this machine, once per study.

A reduce-scatter and an all-gather of the same numbers, as ZeRO and FSDP call them, are the
2 (p - 1) messages of a ring all-reduce. Lessons 04_collectives, 13_scaling_study.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.files import read_json
from course_lib.core.links import Link
from course_lib.core.plain_values import build
from course_lib.cost.bandwidth import fit_link
from course_lib.ranks import RankError, Ranks
from course_lib.ranks.world import rank_device

FILE = "links.json"
SIZES = (2**14, 2**18, 2**20, 2**22)  # bytes
TURNS = 7


def on_ranks(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on that many ranks, started for this call only; return the results by rank.

    Raises: RankError; KeyboardInterrupt on Ctrl-C, when the ranks have ended
    """
    try:
        with Ranks(ranks, cluster="laptop") as world:
            return world.run(fn, *args)
    except RankError as problem:
        if problem.kind == "stopped":
            raise KeyboardInterrupt from problem
        raise


def measure_link(ranks: int) -> Link:
    """Return the measured link between that many ranks of this machine; takes some seconds.

    Raises: CourseError for times that do not grow with the size
    """
    return link_of(ranks, on_ranks(ranks, round_trips)[0])


def link_of(ranks: int, by_size: Mapping[int, float]) -> Link:
    """Fit a link to what `round_trips` measured among that many ranks."""
    messages = 2 * (ranks - 1)
    sizes, times_s = by_size.keys(), by_size.values()
    return fit_link([n / ranks for n in sizes], [t / messages for t in times_s], "measured here")


def round_trips(rank: int) -> dict[int, float]:
    """Return the median seconds of both collectives on the slowest rank, after a warm-up round."""
    times: dict[int, list[float]] = {n: [] for n in SIZES}
    for _ in range(TURNS + 1):
        for n in SIZES:
            times[n].append(_seconds(n))
    return {n: median(found[1:]) for n, found in times.items()}


def _seconds(num_bytes: int) -> float:
    whole = torch.ones(num_bytes // 4, device=rank_device())
    shard = torch.empty_like(whole.chunk(dist.get_world_size())[0])
    dist.barrier()
    start_s = time.perf_counter()
    dist.reduce_scatter_single(shard, whole)
    dist.all_gather_single(whole, shard)
    if whole.is_cuda:
        torch.cuda.synchronize()
    slowest = torch.tensor(time.perf_counter() - start_s, device=whole.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def note_link(folder: Path, ranks: int) -> None:
    """Measure the link between so many ranks, unless the study's folder has it, and keep it."""
    links = read_links(folder)
    if ranks == 1 or ranks in links:
        return
    links[ranks] = measure_link(ranks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(plain_links(links), indent=1), encoding="utf-8")


def read_links(folder: Path) -> dict[int, Link]:
    """Return the links measured for the study in this folder, by the number of ranks."""
    path = folder / FILE
    if not os.path.lexists(path):
        return {}
    hint = "Try to delete it: the next run measures again."
    return links_of(read_json(path, "measured links", hint=hint), str(path))


def plain_links(links: Mapping[int, Link]) -> dict[str, list[float]]:
    """Return latency and bytes per second of each link, for JSON."""
    return {str(p): [link.latency_s, link.bytes_per_s] for p, link in links.items()}


def links_of(plain: Any, where: str) -> dict[int, Link]:
    """Return the links that `plain_links` converted.

    Raises: CourseError, which begins with `where`, for values that are no links
    """
    found = build(dict[str, list[float]], plain, where)
    for p, numbers in found.items():
        if not re.fullmatch(r"[1-9][0-9]{0,8}", p) or len(numbers) != 2:
            raise CourseError(
                f"{where}: need latency and bytes per second by the number of ranks; got "
                f"{len(numbers)} numbers for {p[:20]!r}. Try to delete it and to measure again."
            )
    return {
        int(p): Link(latency_s=alpha, bytes_per_s=beta, name="measured")
        for p, (alpha, beta) in found.items()
    }
