"""The pictures of the deck 00_ranks: real ranks, drawn by the functions that the notebook calls."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_lib.core import Link
from course_lib.display import timeline, waiting
from course_lib.display.pictures import late_all_reduce, message_times, order_of_ranks
from course_lib.ranks import RankError, Ranks, span

WIRE = Link(name="slow wire", latency_s=0.02, bytes_per_s=50e6)


@dataclass(frozen=True)
class Shown:
    """A wait with its source line alone: a slide has no room for the name of the file."""

    rank: int
    kind: str
    waits_for: tuple[int, ...]
    where: str
    line: int = 0


def speak(rank):
    """Sleep 0.3 s on rank 0 and not at all on rank 3, then compute."""
    time.sleep(0.1 * (3 - rank))
    with span("compute", f"rank {rank}"):
        time.sleep(0.05)


def late_barrier(rank):
    """Compute for different times, then meet in a barrier."""
    with span("compute", "work"):
        time.sleep(0.05 + 0.05 * rank)
    dist.barrier()
    with span("compute", "next"):
        time.sleep(0.05)


def late_sum(rank):
    """Call all_reduce late, rank 3 last."""
    time.sleep(0.1 * rank)
    dist.all_reduce(torch.tensor([10.0**rank]))


def send_first(rank):
    """Send first, then receive: a circle in which every rank waits."""
    left, right = (rank - 1) % 4, (rank + 1) % 4
    x, received = torch.tensor([10.0**rank]), torch.empty(1)
    dist.send(x, right)
    dist.recv(received, left)


def only_rank_0(rank):
    """Call a collective on rank 0 alone."""
    loss = torch.tensor(10.0**rank)
    if rank == 0:
        dist.all_reduce(loss)


def send_one(rank, num_bytes):
    """Send one message from rank 0 to rank 1; return the seconds."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    start_s = time.perf_counter()
    if rank == 0:
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
    return time.perf_counter() - start_s


def waits_of(ranks, fn):
    """Return which rank waits for which when this function hangs."""
    try:
        ranks.run(fn)
    except RankError as hang:
        found = hang.waits
        return [Shown(w.rank, w.kind, w.waits_for, w.source.text) for w in found]
    raise AssertionError(f"{fn.__name__} did not hang")


def message():
    """Draw the times of messages on a slow link, by the formula and measured."""
    sizes_mb = [0, 1, 2, 3, 4]
    with Ranks(2, link=WIRE) as pair:
        times_s = [pair.run(send_one, mb * 1_000_000)[:1] for mb in sizes_mb]
    formula_s = [WIRE.time_s(mb * 1e6) for mb in sizes_mb]
    return message_times(WIRE, sizes_mb, formula_s, times_s)[0]


def pictures():
    """Return all pictures by the names that the deck uses."""
    with Ranks(4) as ranks:
        runs = {}
        for fn in (late_barrier, late_sum, speak):  # last, so that all ranks are awake
            ranks.run(fn)
            runs[fn] = ranks.events
        return {
            "speak": order_of_ranks(runs[speak])[0],
            "barrier": timeline(runs[late_barrier], "A rank that reaches the barrier early waits"),
            "late": late_all_reduce(runs[late_sum])[0],
            "circle": waiting(waits_of(ranks, send_first), 4),
            "alone": waiting(waits_of(ranks, only_rank_0), 4),
            "message": message(),
        }
