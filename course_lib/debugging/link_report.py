"""The bandwidth of collectives, from nccl-tests' output or measured on ranks of this machine.

Both use nccl-tests' convention: the bus bandwidth of a collective is comparable with that of the
link, whatever the number of ranks.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.files import read_text
from course_lib.core.units import format_bytes, format_rate, format_seconds
from course_lib.cost.bandwidth import bus_bandwidth, fit_link
from course_lib.ranks import Ranks
from course_lib.ranks.world import rank_device

SIZES = tuple(2**n for n in range(12, 25, 2))  # bytes
TURNS = 5
MESSAGES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # of a ring, times p - 1
LOW = 0.5  # of the link: less has a cause that can be found
ROWS = 10


@dataclass(frozen=True)
class LinkTimes:
    """Times of one collective by size.

    num_wrong   values that came out wrong, as nccl-tests counts them
    """

    kind: str
    ranks: int
    times_s: Mapping[int, float]
    source: str
    num_wrong: int = 0

    def bus_bandwidths(self) -> dict[int, float]:
        """Return bytes/s by size in bytes (nccl-tests' busbw)."""
        times = self.times_s.items()
        return {size: bus_bandwidth(self.kind, size, s, self.ranks) for size, s in times}

    def lines(self, link_bytes_per_s: float | None = None) -> Iterator[str]:
        """Yield the table, what a ring fits to it, and how it compares with the link."""
        rates = self.bus_bandwidths()
        best = max(rates, key=lambda size: rates[size])
        half = min(size for size in rates if rates[size] >= rates[best] / 2)
        yield f"{self.kind} of {self.ranks} ranks ({self.source})"
        yield f"{'size':>12}{'time':>12}{'busbw':>12}"
        every = -(-len(rates) // ROWS)
        for size in list(reversed(rates))[::every][::-1]:
            cells = (
                format_bytes(size),
                format_seconds(self.times_s[size]),
                format_rate(rates[size]),
            )
            yield "".join(f"{cell:>12}" for cell in cells)
        yield (
            f"Largest bus bandwidth: {format_rate(rates[best])} at {format_bytes(best)}; "
            f"half of it from {format_bytes(half)} on."
        )
        if messages := MESSAGES.get(self.kind, 0) * (self.ranks - 1):
            parts = [size / self.ranks for size in self.times_s]
            with suppress(CourseError):  # times that do not grow with the size fit no link
                link = fit_link(parts, [seconds / messages for seconds in self.times_s.values()])
                rate = format_rate(link.bytes_per_s)
                yield f"Fitted to a ring's messages: {format_seconds(link.latency_s)} and {rate}."
        if self.num_wrong:
            yield f"{self.num_wrong} values are wrong: a link or a GPU spoils data."
        if link_bytes_per_s:
            yield from _beside(rates[best], link_bytes_per_s)


def _beside(rate: float, link_bytes_per_s: float) -> Iterator[str]:
    share = rate / link_bytes_per_s
    yield f"That is {100 * share:.0f} % of a link of {format_rate(link_bytes_per_s)}."
    if share < LOW:
        yield (
            "Less than half of the link: see NCCL_DEBUG=INFO for the network that NCCL has chosen "
            "(NCCL_SOCKET_IFNAME, NCCL_IB_HCA), and nvidia-smi topo -m for GPUs that are joined by "
            "PCIe or through the CPU."
        )


def read_nccl_tests(path: Path) -> LinkTimes:
    """Return the out-of-place times of what a program of nccl-tests has printed.

    Raises: CourseError for another text
    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md
    """
    text = read_text(path, "the output of nccl-tests", hint="Try all_reduce_perf -b 8 -e 8G -f 2.")
    ranks = len(set(re.findall(r"^#\s+Rank\s+(\d+)\s", text, re.MULTILINE)))
    found = re.finditer(
        r"^ *(?P<size>\d+) +\d+ +\w+ +(?P<redop>\w+) +(?P<root>-?\d+) +(?P<us>[\d.]+) +"
        r"(?P<algbw>[\d.]+) +(?P<busbw>[\d.]+) +(?P<wrong>\d+|N/A)",
        text,
        re.MULTILINE,
    )
    rows = [row for row in found if int(row["size"]) and float(row["us"])]
    if len(rows) < 2 or ranks < 2:
        raise CourseError(
            f"{path}: need what a program of nccl-tests prints, with two sizes or more and a line "
            f"for each of two ranks or more; got {len(rows)} sizes and {ranks} ranks. Try "
            "all_reduce_perf -b 8 -e 8G -f 2 > links.txt."
        )
    times_s = {int(row["size"]): float(row["us"]) / 1e6 for row in rows}
    wrong = sum(int(row["wrong"]) for row in rows if row["wrong"] != "N/A")
    return LinkTimes(_kind(rows, text, ranks), ranks, times_s, "nccl-tests, out of place", wrong)


def _kind(rows: Sequence[re.Match[str]], text: str, ranks: int) -> str:
    """Return the collective: newer programs name it, else its columns tell."""
    if named := re.search(r"Collective test starting: (\w+)_perf", text):
        return {"alltoall": "all_to_all", "sendrecv": "send"}.get(named[1], named[1])
    last = rows[-1]
    sums, has_root = last["redop"] != "none", int(last["root"]) >= 0
    if has_root:
        return "reduce" if sums else "broadcast"
    is_twice = float(last["busbw"]) > 1.5 * (ranks - 1) / ranks * float(last["algbw"])
    return "all_reduce" if is_twice else "reduce_scatter" if sums else "all_gather"


def measure_all_reduce(ranks: int) -> LinkTimes:
    """Return the times of all-reduces between that many ranks of this machine; takes seconds.

    Raises: CourseError for fewer than two ranks
    """
    if ranks < 2:
        raise CourseError(f"--ranks: need two or more, which have a link; got {ranks}.")
    with Ranks(ranks, cluster="laptop") as world:
        by_rank = world.run(_times, SIZES, TURNS)
    times_s = {size: max(own[size] for own in by_rank) for size in SIZES}
    return LinkTimes("all_reduce", ranks, times_s, "measured here")


def _times(rank: int, sizes: Sequence[int], turns: int) -> dict[int, float]:
    """Return the median seconds of an all-reduce by size, after a warm-up."""
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(turns + 1):
        for size in sizes:
            tensor = torch.ones(size // 4, device=rank_device())
            dist.barrier()
            start_s = time.perf_counter()
            dist.all_reduce(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            found[size].append(time.perf_counter() - start_s)
    return {size: median(times[1:]) for size, times in found.items()}
