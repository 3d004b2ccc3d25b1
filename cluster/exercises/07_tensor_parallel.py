r"""Lesson 07 outside of the notebook: how long do the ranks of a split model talk in a step?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    cluster/exercises/07_tensor_parallel.py

A GPT is split over all ranks, without and with sequence parallelism, for batches of several sizes;
they take turns. Predict first: what part of a step is talking, and what does a larger batch do to
it? Run it on 2 and 4 cards of a node, then over two nodes. Each rank leaves its run record in
runs/07_tensor_parallel, or where `--record-to` says.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_lib.core import COMMUNICATION_KINDS, CourseError, ModelSpec
from course_lib.core.presets import find_model
from course_lib.cost.tensor_traffic import sent_bytes, tensor_traffic
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.ranks import launch, record, span
from course_lib.ranks.world import rank_device
from course_lib.tensor_parallel import finish_gradients, parallel_token_loss, parallelize

MIB = 2**20


@dataclass(frozen=True)
class Found:
    """Medians of one kind of step, on one rank."""

    step_s: float
    talk_s: float
    num_bytes: float


def split_model(spec: ModelSpec, mesh: DeviceMesh, sequence_parallel: bool) -> GPT:
    """The same model on all ranks, each with its part."""
    torch.manual_seed(0)
    return parallelize(GPT(spec).to(rank_device()), mesh, sequence_parallel)


def step(model: GPT, batch: tuple[Tensor, Tensor], name: str) -> tuple[float, float]:
    """Seconds of forward and backward, and of the collectives in it; all ranks begin together."""
    model.zero_grad()
    dist.barrier()
    start_s = time.perf_counter()
    with record() as log, span("compute", name):
        parallel_token_loss(model(batch[0]), batch[1]).backward()
        finish_gradients(model)
        if batch[0].is_cuda:
            torch.cuda.synchronize()
    end_s = time.perf_counter()
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    return end_s - start_s, sum(event.duration_s for event in calls)


def sweep(rank: int, args: argparse.Namespace) -> dict[str, Found]:
    """The median step for each batch, without and with sequence parallelism."""
    spec, p = find_model(args.model), dist.get_world_size()
    mesh = init_device_mesh(rank_device().type, (p,), mesh_dim_names=("tp",))
    seq = min(args.seq, spec.max_seq)
    found = {}
    for sequence_parallel in (False, True):
        model = split_model(spec, mesh, sequence_parallel)
        for batch in args.batches:
            name = f"batch {batch}" + ", sequence parallel" * sequence_parallel
            tokens = token_batch(0, batch=batch, seq=seq, vocab=spec.vocab)
            inputs, targets = (part.to(rank_device()) for part in next_tokens(tokens))
            turns = [step(model, (inputs, targets), name) for _ in range(args.turns + 1)][1:]
            calls = tensor_traffic(spec, batch, seq, 4, sequence_parallel=sequence_parallel)
            found[name] = Found(*map(median, zip(*turns, strict=True)), sent_bytes(calls, p))
    if rank == 0:
        print_table(found, p)
    return found


def print_table(found: dict[str, Found], p: int) -> None:
    """One line a kind of step. (A GPU only queues its collectives: there, the step is what counts.)

    Waiting for a rank that comes late is part of talking.
    """
    print(f"a model on {p} rank{'s' * (p > 1)}; forward and backward, medians", flush=True)
    for name, one in found.items():
        share = f" {100 * one.talk_s / one.step_s:3.0f} % of it talking," if p > 1 else ""
        share *= rank_device().type == "cpu"
        sent = f"{one.num_bytes / MIB:8.2f} MiB sent by a rank"
        print(f"{name:>28}: {one.step_s * 1e3:8.1f} ms a step,{share} {sent}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="sequences")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each kind")
    parser.add_argument("--record-to", default="runs/07_tensor_parallel", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if min(*arguments.batches, arguments.seq, arguments.turns) < 1:
        parser.error("need --batches, --seq and --turns above 0")
    launch(sweep, arguments, record_to=arguments.record_to)
