"""Lesson 08 outside of the notebook: how many micro-batches are best on this network?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/08_pipeline.py

A GPT is cut into one stage a rank, and takes a few steps for each schedule and number of
micro-batches of the same batch; they take turns. Predict first: is m = 4p faster than m = p here,
and does it hold more? Run it inside a node, then over two. Each rank leaves its run record in
runs/08_pipeline, or where `--record-to` says.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from course_lib.core import CourseError
from course_lib.core.presets import find_model
from course_lib.cost.actions import Schedule
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline import Pipeline, gpipe, naive, one_f_one_b, split_model, zero_bubble_h1
from course_lib.ranks import launch
from course_lib.ranks.world import rank_device
from course_lib.turns import in_turns

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zero_bubble_h1,
}


def sweep(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """The median step of each schedule and number of micro-batches, in seconds."""
    torch.manual_seed(0)
    p, device, spec = dist.get_world_size(), rank_device(), find_model(args.model)
    pipeline = Pipeline(split_model(GPT(spec), p, rank).to(device), token_loss)
    tokens = token_batch(0, batch=args.batch, seq=min(args.seq, spec.max_seq), vocab=spec.vocab)
    inputs, targets = (part.to(device) for part in next_tokens(tokens))
    held: dict[str, int] = {}
    steps = {}
    for name in args.schedules:
        for m in args.micro_batches or [m for m in (1, p, 4 * p) if args.batch % m == 0]:
            plan, parts = SCHEDULES[name](p, m), (inputs.chunk(m), targets.chunk(m))

            def step(key: str = f"{name}, m = {m}", plan: Any = plan, parts: Any = parts) -> None:
                pipeline.step(plan, *parts)
                held[key] = pipeline.peak_in_flight
                if device.type == "cuda":
                    torch.cuda.synchronize()

            steps[f"{name}, m = {m}"] = (pipeline.stage, step)
    seconds = in_turns(steps, args.turns)
    everybody: list[Any] = [None] * p
    dist.all_gather_object(everybody, (seconds, held))
    found = {name: median(one[name] for one, _ in everybody) for name in steps}
    if rank == 0:
        print(f"{spec.name} in {p} stages, a batch of {args.batch}", flush=True)
        for name, step_s in found.items():
            most = ", ".join(str(one[name]) for _, one in everybody)
            print(f"{name:>14}: {step_s * 1e3:8.1f} ms a step; held at most {most}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", type=int, nargs="*", help="else 1, p, 4p")
    parser.add_argument("--batch", type=int, default=16, help="sequences, cut into micro-batches")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each kind")
    parser.add_argument("--record-to", default="runs/08_pipeline", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    numbers = arguments.micro_batches or [1]
    if min(*numbers, arguments.seq, arguments.turns, arguments.batch) < 1:
        parser.error("need --micro-batches, --batch, --seq and --turns above 0")
    if any(arguments.batch % number for number in numbers):
        parser.error(f"--batch: need a multiple of {numbers}; got {arguments.batch}")
    launch(sweep, arguments, record_to=arguments.record_to)
