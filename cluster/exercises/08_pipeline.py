"""Lesson 08 outside of the notebook: how many micro-batches are best on this network?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/08_pipeline.py

A GPT is split over the ranks, as each schedule needs it, and takes a few steps with each schedule
and number of micro-batches of the same batch, with the course's engine and with PyTorch's where it
has the schedule; they take turns. Predict first: is m = 4p faster than m = p here, and does it hold
more? Run it inside a node, then on two nodes. Each rank writes its run record to
runs/08_pipeline, or where `--record-to` says.
"""

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from course_lib.core import CourseError, find_model
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline import (
    Pipeline,
    Schedule,
    ScheduleError,
    dual_pipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    split_model,
    zero_bubble_h1,
    zero_bubble_v,
)
from course_lib.pipeline.actions import placement_of
from course_lib.ranks import launch
from course_lib.ranks.timing import largest_difference, time_interleaved
from course_lib.ranks.world import rank_device

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": partial(interleaved, num_model_chunks=2),
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dual_pipe_v,
}
SINGLE: dict[str, Callable[..., Any]] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
}
THEIRS = SINGLE | {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,
    "zb-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Stages:
    """This rank's stage twice, with equal weights: one for PyTorch; and the batch."""

    ours: Pipeline
    theirs: nn.ModuleList
    placement: Sequence[int]
    batch: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, rank: int, args: argparse.Namespace, placement: Sequence[int]) -> "Stages":
        """Build both from a seed; untied, as PyTorch does not sum the gradients of tied weights."""
        torch.manual_seed(0)
        spec, device, p = replace(find_model(args.model), tied=False), rank_device(), max(placement)
        stage = split_model(GPT(spec), p + 1, rank, placement=placement).to(device)
        seq = min(args.seq, spec.max_seq)
        tokens = token_batch(0, batch=args.batch, seq=seq, vocab=spec.vocab)
        inputs, targets = (part.to(device) for part in next_tokens(tokens))
        batch = (inputs, targets)
        return cls(Pipeline(stage, token_loss), deepcopy(stage.chunks), placement, batch)

    def our_step(self, plan: Schedule, m: int) -> Callable[[], int]:
        """Return a step of the course's engine; it returns the most micro-batches held.

        Of a micro-batch that is held in one of two model chunks, each counts.
        """
        inputs, targets = (part.chunk(m) for part in self.batch)

        def step() -> int:
            self.ours.step(plan, inputs, targets)
            finish_queue()
            return self.ours.peak_in_flight

        return step

    def their_step(self, name: str, m: int) -> Callable[[], None]:
        """Return a step of PyTorch's schedule of that name."""
        inputs, targets = self.batch
        stages = [
            pipelining.PipelineStage(chunk, depth, len(self.placement), rank_device())
            for chunk, depth in zip(self.theirs, self.ours.stage.depths, strict=True)
        ]
        schedule = THEIRS[name](stages[0] if name in SINGLE else stages, m, loss_fn=token_loss)
        first = [inputs] if dist.get_rank() == 0 else []

        def step() -> None:
            schedule.step(*first, target=targets)
            finish_queue()

        return step


def finish_queue() -> None:
    """Wait for the GPU, which only queues its work."""
    if rank_device().type == "cuda":
        torch.cuda.synchronize()


def sweep(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the fastest step of each schedule and number of micro-batches, in seconds."""
    p, by_placement = dist.get_world_size(), dict[tuple[int, ...], Stages]()
    numbers = args.micro_batches or [m for m in (1, p, 4 * p) if args.batch % m == 0]
    steps: dict[str, tuple[nn.Module, Callable[[], Any]]] = {}
    held, apart = dict[str, int](), list[float]()
    for name, m in product(args.schedules, numbers):
        try:
            plan = SCHEDULES[name](p, m)
        except ScheduleError:  # not every schedule takes any number of micro-batches
            continue
        placement = tuple(placement_of(plan))
        if placement not in by_placement:
            by_placement[placement] = Stages.of(rank, args, placement)
        stages = by_placement[placement]
        kind, ours = f"{name}, m = {m}", stages.our_step(plan, m)
        steps[kind] = stages.ours.stage, ours
        held[kind] = ours()
        if name == "gpipe" or (name in THEIRS and m >= p):  # its 1F1B needs one for each stage
            theirs = stages.their_step(name, m)
            steps[f"{kind}, PyTorch's"] = stages.theirs, theirs
            theirs()
            apart.append(grads_apart(stages))
        stages.ours.stage.zero_grad()
        stages.theirs.zero_grad()
    found = time_interleaved(steps, args.turns, min)
    everybody: list[Any] = [None] * p
    dist.all_gather_object(everybody, held)
    if rank == 0:
        print_table(found, everybody, args)
    if rank == 0 and apart:  # PyTorch has some of these schedules
        print(f"largest difference of their gradients: {max(apart):.1e}", flush=True)
    return found


def grads_apart(stages: Stages) -> float:
    """Return the largest difference between the gradients, on any stage."""
    both = (stages.ours.stage, stages.theirs)
    return largest_difference(*([param.grad for param in one.parameters()] for one in both))


def print_table(
    found: dict[str, float], everybody: list[dict[str, int]], args: argparse.Namespace
) -> None:
    """Print a line per kind of step; PyTorch does not report what it held."""
    p = len(everybody)
    print(f"{args.model} in {p} stage{'s' * (p > 1)}, a batch of {args.batch}", flush=True)
    for name, step_s in found.items():
        told = f"{name:>29}: {step_s * 1e3:8.1f} ms a step"
        if name in everybody[0]:
            told += "; held at most " + ", ".join(str(held[name]) for held in everybody)
        print(told, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", type=int, nargs="*", help="default: 1, p, 4p")
    parser.add_argument("--batch", type=int, default=16, help="sequences, split into micro-batches")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each kind, after a warm-up")
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
