"""What a checkpoint costs: `python -m tests.benchmarks.bench_checkpoint`.

The same FSDP model and AdamW on the same ranks, saved in turns: through rank 0 (it gathers the
whole state and writes one file), sharded in our format, with torch.distributed.checkpoint, and
asynchronously, where the time is how long the call keeps the caller. A turn takes as long as its
slowest rank; the median over the turns is shown, and the bytes on the disk. Then loading.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checkpoint import load, save, save_async
from course_lib.checkpoint.dcp import load_dcp, save_dcp
from course_lib.core.units import format_bytes, format_seconds
from course_lib.fsdp import FSDP
from course_lib.fsdp.state import full_optim_state
from course_lib.models import GPT
from tests.benchmarks.harness import (
    GPT_3M,
    gpt_loss,
    on_bare_ranks,
    options,
    print_table,
    timed,
    train_step,
)

Found = dict[str, dict[str, list[float]]]


def through_rank_0(model: Any, optimizer: Any, folder: Path) -> None:
    """Gather everything; rank 0 writes one file."""
    whole = {
        "model": model.full_state_dict(rank=0),
        "optimizer": full_optim_state(model.param_groups, optimizer),
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(whole, folder / "whole.pt")
    dist.barrier()


def ways_of(model: Any, optimizer: Any) -> dict[str, tuple[Callable[[Path], Any], Any]]:
    """Return each way to save, and to load; None where it is not measured."""
    state = {"model": model, "optimizer": optimizer}
    return {
        "through rank 0": (partial(through_rank_0, model, optimizer), None),
        "sharded": (partial(save, state, step=1), partial(load, state)),
        "PyTorch's DCP": (partial(save_dcp, state, step=1), partial(load_dcp, state)),
        "sharded, async": (partial(save_async, state, step=1), None),
    }


def measure(way: tuple[Callable[[Path], Any], Any], folder: Path) -> dict[str, float]:
    """Return times and sizes of one turn of a way."""
    save_it, load_it = way
    pending: list[Any] = []
    found = {"save_s": timed(lambda: pending.append(save_it(folder)))[0]}
    if hasattr(pending[0], "wait"):
        pending[0].wait()
        found["write_s"] = pending[0].write_s
    if load_it is not None:
        found["load_s"] = timed(partial(load_it, folder))[0]
    found["bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return found


def turns(rank: int, num_turns: int) -> Found:
    """Return times and sizes of each way."""
    torch.manual_seed(0)
    model = FSDP(GPT(GPT_3M))
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, partial(gpt_loss, model, 0, GPT_3M))
    tops: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(tops)
    ways = ways_of(model, optimizer)
    found: Found = {name: {} for name in ways}
    for turn in range(num_turns + 1):  # the first one warms up
        for name, way in ways.items():
            seen = measure(way, Path(tops[0], f"{turn} {name}"))
            for key, value in seen.items() if turn else ():
                found[name].setdefault(key, []).append(value)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(tops[0])
    return found


def rows(found: Found) -> Iterator[list[str]]:
    """Yield a row for each way."""
    for name, seen in found.items():
        times = [
            format_seconds(median(seen[key])) if key in seen else "-"
            for key in ("save_s", "load_s", "write_s")
        ]
        yield [name, *times, format_bytes(median(seen["bytes"]))]


def main() -> None:
    """Print a table for each number of ranks."""
    args = options(__doc__, turns=10, ranks=(4,))
    for p in args.ranks:
        heads = ("", "save", "load", "written by", "bytes")
        print_table(f"{p} bare ranks", heads, rows(on_bare_ranks(turns, p, args.turns)))


if __name__ == "__main__":
    main()
