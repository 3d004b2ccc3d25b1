"""What the benchmarks share: ranks that measure, contestants that take turns, tables, options.

Contestants take turns in one run on the same ranks, so that whatever else the machine does falls on
all of them. A turn takes as long as its slowest rank. A ratio is the median over the turns of one's
time divided by the other's; on a busy machine the ratio of processor time, by rank 0 in all its
threads, says more. "bare" ranks are plain processes, as under torchrun; on "recorded" ones, those
of a notebook, every call is announced and recorded.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from course_lib.core import ModelSpec
from course_lib.core.units import format_seconds
from course_lib.models import next_tokens, token_batch, token_loss

Times = dict[str, list[tuple[float, float]]]  # of each turn: seconds, processor seconds
Turns = Callable[[int, int], Any]  # a function of the rank and the number of turns
WARM_UP = 2  # the first turns touch fresh memory, rebuild buckets, learn an order, agree on shapes
COMPARED = ("ours", "torch", "ratio", "cpu ratio")
_GPT = {"num_heads": 8, "max_seq": 128, "tied": False}
GPT_3M = ModelSpec(
    name="3M", hidden=192, num_layers=6, ffn_hidden=768, vocab=1000, **_GPT | {"num_heads": 6}
)
GPT_10M = ModelSpec(name="10M", hidden=320, num_layers=4, ffn_hidden=1536, vocab=8000, **_GPT)


def gpt_loss(model: Any, rank: int, spec: ModelSpec = GPT_10M) -> torch.Tensor:
    """Return the loss of this rank's batch."""
    tokens, targets = next_tokens(token_batch(rank, batch=2, seq=64, vocab=spec.vocab))
    return token_loss(model(tokens), targets)


def train_step(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> None:
    """Take one training step; where backward leaves communication under way, finish it."""
    optimizer.zero_grad()
    loss().backward()
    if hasattr(model, "finish"):
        model.finish()
    optimizer.step()


def slowest(value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def timed(call: Callable[[], Any], num_calls: int = 1) -> tuple[float, float]:
    """Return the seconds of a call by the slowest rank, and this rank's processor time."""
    dist.barrier()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        call()
    cpu_s = time.process_time() - cpu_s
    return slowest((time.perf_counter() - start_s) / num_calls), cpu_s / num_calls


def take_turns(calls: Mapping[str, Callable[[], Any]], num_turns: int, num_calls: int = 1) -> Times:
    """Time every contestant in every turn, after some turns to warm up."""
    times: Times = {name: [] for name in calls}
    for turn in range(WARM_UP + num_turns):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            found = timed(calls[name], num_calls)
            if turn >= WARM_UP:
                times[name].append(found)
    return times


def median_s(times: Times, name: str) -> float:
    """Return the median seconds of a turn."""
    return median(wall_s for wall_s, _ in times[name])


def ratio(times: Times, one: str, other: str, clock: int = 0) -> float:
    """Return the median over the turns of one's time by the other's; clock 1: processor time."""
    return median(a[clock] / b[clock] for a, b in zip(times[one], times[other], strict=True))


def compared(times: Times, ours: str = "ours", torchs: str = "torch") -> list[Any]:
    """Return the cells of `COMPARED`."""
    both = [format_seconds(median_s(times, name)) for name in (ours, torchs)]
    return [*both, ratio(times, ours, torchs), ratio(times, ours, torchs, clock=1)]


def on_bare_ranks(turns: Turns, world_size: int, num_turns: int) -> Any:
    """Return what `turns(rank, num_turns)` gives on rank 0 of plain processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _bare, (turns, world_size, folder, num_turns), nprocs=world_size, start_method="spawn"
        )
        return json.loads(Path(folder, "found.json").read_text())


def on_recorded_ranks(turns: Turns, world_size: int, num_turns: int) -> Any:
    """Return the same on the ranks of a notebook."""
    from course_lib.ranks import Ranks  # not above: spawned processes import this file again

    with Ranks(world_size) as ranks:
        return ranks.run(turns, num_turns)[0]


WORLDS = {"bare": on_bare_ranks, "recorded": on_recorded_ranks}


def _bare(rank: int, turns: Turns, world_size: int, folder: str, num_turns: int) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank}
    places |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(place) for name, place in places.items()}  # as torchrun does
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    found = turns(rank, num_turns)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def print_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print each row as soon as it is there; a column is as wide as its head, 10 at least."""
    print(title)
    for row in chain([heads], rows):
        texts = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        widths = [max(len(head), 10) for head in heads[1:]]
        cells = [f"{text:>{width}}" for text, width in zip(texts[1:], widths, strict=True)]
        print(f"{texts[0]:16}", *cells, flush=True)
    print()


def options(text: str | None, turns: int = 9, ranks: Sequence[int] = (2, 4)) -> argparse.Namespace:
    """Return --turns and --ranks of the command line; `text` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=(text or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(ranks))
    return parser.parse_args()
