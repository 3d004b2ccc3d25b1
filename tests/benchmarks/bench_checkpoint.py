"""What a checkpoint costs: `python -m tests.benchmarks.bench_checkpoint`.

The same FSDP model and AdamW on the same ranks, saved in turns: through rank 0 (it gathers the
whole state and writes one file), sharded in our format, with torch.distributed.checkpoint, and
asynchronously, where the time is how long the call keeps the caller. A turn takes as long as its
slowest rank; the median over the turns is shown, and the bytes on the disk. Then loading.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from course_lib.core import ModelSpec
from course_lib.core.units import format_bytes, format_seconds
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from tests.benchmarks.worlds import bare_processes

SPEC = ModelSpec(
    name="3M",
    hidden=192,
    num_layers=6,
    num_heads=6,
    ffn_hidden=768,
    vocab=1000,
    max_seq=128,
    tied=False,
)


def through_rank_0(model: Any, optimizer: Any, folder: Path) -> None:
    """Gather everything; rank 0 writes one file."""
    from course_lib.fsdp.state import full_optim_state

    whole = {
        "model": model.full_state_dict(rank=0),
        "optimizer": full_optim_state(model.param_groups, optimizer),
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(whole, folder / "whole.pt")
    dist.barrier()


def ways_of(model: Any, optimizer: Any) -> dict[str, tuple[Callable[[Path], Any], Any]]:
    """Each way to save, and to load; None where it is not measured."""
    from course_lib.checkpoint import load, save, save_async
    from course_lib.checkpoint.dcp import load_dcp, save_dcp

    state = {"model": model, "optimizer": optimizer}
    return {
        "through rank 0": (partial(through_rank_0, model, optimizer), None),
        "sharded": (lambda folder: save(state, folder, step=1), partial(load, state)),
        "PyTorch's DCP": (lambda folder: save_dcp(state, folder, step=1), partial(load_dcp, state)),
        "sharded, async": (lambda folder: save_async(state, folder, step=1), None),
    }


def slowest_s(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long the slowest rank took, and what the call gave."""
    dist.barrier()
    start_s = time.perf_counter()
    found = call()
    took = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item(), found


def turns(rank: int, num_turns: int) -> dict[str, dict[str, list[float]]]:
    """Times and sizes of each way."""
    from course_lib.fsdp import FSDP

    torch.manual_seed(0)
    model = FSDP(GPT(SPEC))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = next_tokens(token_batch(0, batch=2, seq=SPEC.max_seq, vocab=SPEC.vocab))
    token_loss(model(inputs), targets).backward()
    optimizer.step()
    tops: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(tops)
    ways = ways_of(model, optimizer)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for turn in range(num_turns + 1):  # the first one warms up
        for name, (save_it, load_it) in ways.items():
            folder = Path(tops[0], f"{turn} {name}")
            save_s, pending = slowest_s(partial(save_it, folder))
            seen = {"save_s": save_s}
            if hasattr(pending, "wait"):
                pending.wait()
                seen["write_s"] = pending.write_s
            if load_it is not None:
                seen["load_s"] = slowest_s(partial(load_it, folder))[0]
            seen["bytes"] = sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())
            for key, value in seen.items() if turn else ():
                found[name].setdefault(key, []).append(value)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(tops[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    print(f"{'':16} {'save':>10} {'load':>10} {'written by':>12} {'bytes':>12}")
    for name, seen in bare_processes(turns, options.ranks, options.turns).items():
        shown = [format_seconds(median(seen[key])) if key in seen else "-" for key in
                 ("save_s", "load_s", "write_s")]  # fmt: skip
        save_s, load_s, write_s = shown
        size = format_bytes(median(seen["bytes"]))
        print(f"{name:16} {save_s:>10} {load_s:>10} {write_s:>12} {size:>12}")


if __name__ == "__main__":
    main()
