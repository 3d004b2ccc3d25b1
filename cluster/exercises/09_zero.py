r"""Lesson 09 outside of the notebook: what does each stage of ZeRO hold, and what does it cost?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/09_zero.py

A GPT is trained under stages 1, 2 and 3; they take turns, and each step has several micro-batches.
Predict first: which stage talks most, and what do more micro-batches do to it? Run it on 2 and 4
cards of a node, then over two nodes. Each rank leaves its run record in runs/09_zero, or where
`--record-to` says.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core import COMMUNICATION_KINDS, CourseError
from course_lib.core.presets import find_model
from course_lib.core.units import format_bytes
from course_lib.cost.bandwidth import bus_factor
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, record, span
from course_lib.ranks.world import rank_device
from course_lib.zero import ZeRO1, ZeRO2, ZeRO3
from course_lib.zero_lab import owned_bytes

STAGES = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}


@dataclass(frozen=True)
class Found:
    """A kind of step on one rank: medians, and what is owned when it has ended."""

    step_s: float
    talk_s: float
    num_bytes: float
    owned_bytes: float


def step(engine: ZeRO1, parts: list[tuple[Tensor, Tensor]], name: str) -> Found:
    """One step of some micro-batches; all ranks begin together."""
    engine.zero_grad()
    dist.barrier()
    start_s = time.perf_counter()
    with record() as log, span("compute", name):
        for inputs, targets in parts:
            (token_loss(engine(inputs), targets) / len(parts)).backward()
        engine.step()
        if parts[0][0].is_cuda:
            torch.cuda.synchronize()
    step_s = time.perf_counter() - start_s
    p = dist.get_world_size()
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    sent = sum(event.num_bytes * bus_factor(event.kind, p) for event in calls)
    talk_s = sum(event.duration_s for event in calls)
    return Found(step_s, talk_s, sent, sum(owned_bytes(engine).values()))


def sweep(rank: int, args: argparse.Namespace) -> dict[str, Found]:
    """The median step of each stage, for each number of micro-batches."""
    spec, found = find_model(args.model), dict[str, Found]()
    seq = min(args.seq, spec.max_seq)
    for stage in args.stages:
        torch.manual_seed(0)
        model = GPT(spec).to(rank_device())
        engine = STAGES[stage](model, torch.optim.AdamW, lr=1e-4, offload=args.offload)
        for count in args.micro_batches:
            tokens = token_batch(rank, batch=args.batch * count, seq=seq, vocab=spec.vocab)
            pair = (part.to(rank_device()).chunk(count) for part in next_tokens(tokens))
            parts = list(zip(*pair, strict=True))
            name = f"stage {stage}, {count} micro-batch{'es' * (count > 1)}"
            turns = [step(engine, parts, name) for _ in range(args.turns + 1)][1:]
            rows = ((one.step_s, one.talk_s, one.num_bytes, one.owned_bytes) for one in turns)
            found[name] = Found(*map(median, zip(*rows, strict=True)))
    if rank == 0:
        print_table(found, args.model)
    return found


def print_table(found: dict[str, Found], model: str) -> None:
    """One line a kind of step. (A GPU only queues its collectives: there, the step is what counts.)

    Waiting for a rank that comes late is part of talking.
    """
    p = dist.get_world_size()
    print(f"{model} on {p} rank{'s' * (p > 1)}, fp32, AdamW; medians", flush=True)
    for name, one in found.items():
        share = f" {100 * one.talk_s / one.step_s:3.0f} % of it talking," if p > 1 else ""
        share *= rank_device().type == "cpu"
        bytes_told = f"{format_bytes(one.num_bytes)} sent, {format_bytes(one.owned_bytes)} owned"
        print(f"{name:>25}: {one.step_s * 1e3:8.1f} ms a step,{share} {bytes_told}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=STAGES)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="in a step")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each kind")
    parser.add_argument("--offload", action="store_true", help="optimizer's state on the host")
    parser.add_argument("--record-to", default="runs/09_zero", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if min(*arguments.micro_batches, arguments.batch, arguments.seq, arguments.turns) < 1:
        parser.error("need --micro-batches, --batch, --seq and --turns above 0")
    launch(sweep, arguments, record_to=arguments.record_to)
