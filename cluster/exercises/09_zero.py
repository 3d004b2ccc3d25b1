r"""Lesson 09 outside of the notebook: what each stage of ZeRO keeps, sends and takes.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/09_zero.py

A GPT is trained under stages 1, 2 and 3, each step with one or more micro-batches: by the course's
engines, by PyTorch, and by DeepSpeed where it is installed; they take turns. PyTorch's stage 1 is
its ZeroRedundancyOptimizer behind DDP; closest to stages 2 and 3 is fully_shard, which keeps what
forward has gathered (2), or frees it (3). Predict first: which stage communicates most, and what do
more micro-batches change? Run it on 2 and 4 GPUs of a node, then on two nodes. Each rank writes its
run record to runs/09_zero, or where `--record-to` says.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from course_lib.core import COMMUNICATION_KINDS, CourseError, find_model
from course_lib.core.units import format_bytes
from course_lib.cost.traffic import sent_bytes
from course_lib.frameworks import Engine, alive_bytes, deepspeed_engine, fully_sharded, missing
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.models.gpt import Block
from course_lib.ranks import launch, record, span
from course_lib.ranks.timing import communication_s, largest_difference
from course_lib.ranks.world import rank_device
from course_lib.zero import ZeRO1, ZeRO2, ZeRO3

STAGES = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
OURS, THEIRS, DEEPSPEED = "ours", "PyTorch's", "DeepSpeed's"
Parts = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Found:
    """One step on one rank: seconds, seconds of communication, bytes sent."""

    step_s: float
    communication_s: float
    num_bytes: float


def ours(model: GPT, stage: int, offload: bool) -> Engine:
    """Return our engine of a stage."""
    zero = STAGES[stage](model, torch.optim.AdamW, lr=1e-4, offload=offload)
    return handle(OURS, zero, zero, lambda: zero.full_state_dict()["model"])


def pytorchs(model: GPT, stage: int) -> Engine:
    """Return what PyTorch has of a stage."""
    if stage > 1:
        return fully_sharded(model, ADAMW, unit=Block, reshard_after_forward=stage == 3)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    return handle(
        THEIRS, DistributedDataParallel(model), optimizer, lambda: dict(model.named_parameters())
    )


def handle(
    name: str, model: Any, optimizer: Any, weights: Callable[[], dict[str, Tensor]]
) -> Engine:
    """Return an engine for a model and its optimizer, whose update clears the gradients."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Engine(name=name, model=model, backward=Tensor.backward, update=update, weights=weights)


def makers(stage: int, count: int, offload: bool) -> dict[str, Callable[[GPT], Engine]]:
    """Return the engines of a stage that are available here, by name."""
    found: dict[str, Callable[[GPT], Engine]] = {OURS: partial(ours, stage=stage, offload=offload)}
    if not offload:
        found[THEIRS] = partial(pytorchs, stage=stage)
    if not missing("deepspeed"):
        options = {"stage": stage, "offload": offload, "num_micro_batches": count}
        found[DEEPSPEED] = partial(deepspeed_engine, make_optimizer=ADAMW, **options)
    return found


def passes(engine: Engine, parts: Parts, counts_itself: bool) -> None:
    """Run forward and backward of all micro-batches, and an update; DeepSpeed counts itself."""
    for number, (inputs, targets) in enumerate(parts, start=1):
        is_last, model = number == len(parts), engine.model
        behind_ddp = isinstance(model, DistributedDataParallel)
        with model.no_sync() if behind_ddp and not is_last else nullcontext():
            loss = token_loss(model(inputs), targets)
            engine.backward(loss if counts_itself else loss / len(parts))
        if is_last or counts_itself:
            engine.update()


def step(engine: Engine, parts: Parts, name: str) -> Found:
    """Take one step of some micro-batches; all ranks begin together."""
    dist.barrier()
    start_s = time.perf_counter()
    with record() as log, span("compute", name):
        passes(engine, parts, name.endswith(DEEPSPEED))
        if parts[0][0].is_cuda:
            torch.cuda.synchronize()
    step_s = time.perf_counter() - start_s
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    return Found(step_s, communication_s(calls), sent_bytes(calls, dist.get_world_size()))


def parts_of(rank: int, count: int, args: argparse.Namespace) -> Parts:
    """Return the micro-batches of a rank, from a seed."""
    spec = find_model(args.model)
    seq = min(args.seq, spec.max_seq)
    tokens = token_batch(rank, batch=args.batch * count, seq=seq, vocab=spec.vocab)
    pair = (part.to(rank_device()).chunk(count) for part in next_tokens(tokens))
    return list(zip(*pair, strict=True))


def sweep(rank: int, args: argparse.Namespace) -> dict[str, Found]:
    """Return the fastest step of each stage, number of micro-batches and engine."""
    p, found, apart = dist.get_world_size(), dict[str, Found](), list[float]()
    if rank == 0:
        print(
            f"{args.model} on {p} rank{'s' * (p > 1)}, fp32, AdamW; fastest of its turns",
            flush=True,
        )
    for stage, count in product(args.stages, args.micro_batches):
        kind = f"stage {stage}, {count} micro-batch{'es' * (count > 1)}"
        parts, engines, kept = parts_of(rank, count, args), dict[str, Engine](), dict[str, int]()
        for who, make in makers(stage, count, args.offload).items():
            before, name = alive_bytes(), f"{kind}, {who}"
            torch.manual_seed(0)
            engines[name] = make(GPT(find_model(args.model)).to(rank_device()))
            step(engines[name], parts, name)
            kept[name] = alive_bytes() - before
        turns = [
            {name: step(engines[name], parts, name) for name in engines} for _ in range(args.turns)
        ]
        for name in engines:
            found[name] = min((turn[name] for turn in turns), key=lambda one: one.step_s)
            tell(name, found[name], kept[name])
        apart += differences([engine.weights() for engine in engines.values()])
    if rank == 0 and apart:
        print(f"largest difference of their parameters: {max(apart):.1e}", flush=True)
    if rank == 0 and (sentence := missing("deepspeed")):
        print(f"{DEEPSPEED}: {sentence}", flush=True)
    return found


def differences(weights: list[dict[str, Tensor]]) -> list[float]:
    """Return the largest difference of each engine's weights from the first one's."""
    ours, *others = ({name: x.to(rank_device()) for name, x in one.items()} for one in weights)
    return [largest_difference((ours[name] for name in one), one.values()) for one in others]


def tell(name: str, one: Found, kept_bytes: int) -> None:
    """Print one line per kind of step. (A GPU only queues its collectives: there, the step counts.)

    Waiting for a late rank is part of the communication.
    """
    if dist.get_rank() == 0:
        share = f" {100 * one.communication_s / one.step_s:3.0f} % communicating,"
        share *= dist.get_world_size() > 1 and rank_device().type == "cpu"
        told = f"{format_bytes(one.num_bytes)} sent, {format_bytes(kept_bytes)} kept between steps"
        print(f"{name:>37}: {one.step_s * 1e3:8.1f} ms per step,{share} {told}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=STAGES)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="in a step")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each kind, after a first")
    parser.add_argument("--offload", action="store_true", help="state on the host; not PyTorch's")
    parser.add_argument("--record-to", default="runs/09_zero", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if min(*arguments.micro_batches, arguments.batch, arguments.seq, arguments.turns) < 1:
        parser.error("need --micro-batches, --batch, --seq and --turns above 0")
    launch(sweep, arguments, record_to=arguments.record_to)
