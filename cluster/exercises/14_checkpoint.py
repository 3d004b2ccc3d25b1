"""Lesson 14 outside of the notebook: measure what a checkpoint costs on your machines.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/14_checkpoint.py

All ranks save the state of one FSDP training: at once, asynchronously, and with PyTorch's DCP; then
they load it. Predict first: how long does a save take on your storage, and which share can be
hidden? `--mtbf-hours` is how often your jobs fail (of all ranks together): the best interval
follows. `--folder` has to be on storage that all nodes see. Each rank writes its run record to
runs/14_checkpoint, or where `--record-to` says.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checkpoint import PendingSave, load, save, save_async
from course_lib.checkpoint.cost import HOUR_S, best_interval_daly, expected_overhead
from course_lib.checkpoint.dcp import save_dcp
from course_lib.core import CourseError
from course_lib.core.presets import find_model
from course_lib.core.units import format_bytes, format_seconds
from course_lib.fsdp import FSDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, span
from course_lib.ranks.world import rank_device


def trained(rank: int, name: str) -> dict[str, Any]:
    """Return the state of a training after one step, so that the optimizer has its numbers."""
    torch.manual_seed(0)
    spec = find_model(name)
    model = FSDP(GPT(spec).to(rank_device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = next_tokens(token_batch(rank, batch=1, seq=16, vocab=spec.vocab))
    token_loss(model(inputs.to(rank_device())), targets.to(rank_device())).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def measure(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds for which each way to save stops the training, and those of a load."""
    state, folder = trained(rank, args.model), Path(args.folder)
    ways: dict[str, Callable[..., Any]] = {
        "save": save,
        "save_async": save_async,
        "PyTorch's DCP": save_dcp,
    }
    found: dict[str, float] = {}
    write_s = 0.0
    for name, way in ways.items():
        seconds = []
        for step in range(args.turns):
            dist.barrier()
            start_s = time.perf_counter()
            with span("compute", name):
                done = way(state, str(folder / name), step=step, keep=1)
            seconds.append(time.perf_counter() - start_s)
            if isinstance(done, PendingSave):
                done.wait()
                write_s = done.write_s
        found[name] = min(seconds)
    dist.barrier()
    start_s = time.perf_counter()
    saved = load(state, str(folder / "save"))
    found["load"] = time.perf_counter() - start_s
    if rank == 0:
        print_table(found, saved.num_bytes, write_s, args)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return found


def print_table(
    found: dict[str, float], num_bytes: int, write_s: float, args: argparse.Namespace
) -> None:
    """Print one line per way, and the best interval."""
    p = dist.get_world_size()
    print(f"{args.model} on {p} rank{'s' * (p > 1)}: {format_bytes(num_bytes)}", flush=True)
    for name, seconds in found.items():
        more = f", then writes for {write_s * 1e3:.0f} ms" if name == "save_async" else ""
        print(f"{name:>15}: {seconds * 1e3:8.1f} ms{more}", flush=True)
    mtbf_s = args.mtbf_hours * HOUR_S
    for name in ("save", "save_async"):
        best_s = best_interval_daly(found[name], mtbf_s)
        overhead = 100 * expected_overhead(best_s, found[name], mtbf_s, args.restart_s)
        words = f"every {format_seconds(best_s)}, overhead {overhead:.2f} %"
        print(f"best interval with {name}: {words}", flush=True)


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; end with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small", help="small, gpt2 ...")
    parser.add_argument("--folder", default="runs/14_checkpoint/saved", help="on shared storage")
    parser.add_argument("--turns", type=int, default=3, help="saves of each way")
    parser.add_argument("--mtbf-hours", type=float, default=24.0, help="between two failures")
    parser.add_argument("--restart-s", type=float, default=300.0, help="from failure to training")
    parser.add_argument("--record-to", default="runs/14_checkpoint", metavar="FOLDER")
    arguments = parser.parse_args(words)
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if arguments.turns < 1 or arguments.mtbf_hours <= 0 or arguments.restart_s < 0:
        parser.error("need --turns and --mtbf-hours above 0, and --restart-s not below 0")
    return arguments


if __name__ == "__main__":
    arguments = read_arguments()
    launch(measure, arguments, record_to=arguments.record_to)
