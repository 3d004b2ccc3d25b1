r"""Lesson 07 outside of the notebook: which part of a split model's step is communication?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    cluster/exercises/07_tensor_parallel.py

A GPT is split over all ranks, without and with sequence parallelism, for batches of several sizes,
by the course and by PyTorch; they take turns. Predict first: which part of a step is communication,
and what does a larger batch change? Run it on 2 and 4 GPUs of a node, then on two nodes. Each rank
writes its run record to runs/07_tensor_parallel, or where `--record-to` says.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from course_lib.core import COMMUNICATION_KINDS, CourseError, ModelSpec, find_model
from course_lib.cost.traffic import sent_bytes
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, record, span
from course_lib.ranks.timing import communication_s, largest_difference
from course_lib.ranks.world import rank_device
from course_lib.tensor_parallel import (
    finish_gradients,
    gather_tensors,
    parallel_token_loss,
    parallelize,
)

MIB = 2**20
Backward = Callable[[GPT, Tensor, Tensor], None]


@dataclass(frozen=True)
class Found:
    """Measurements of one step on one rank."""

    step_s: float
    exposed_s: float
    num_bytes: float


def seeded(spec: ModelSpec) -> GPT:
    """Return the same model on all ranks."""
    torch.manual_seed(0)
    return GPT(spec).to(rank_device())


def torch_plan(spec: ModelSpec, sequence_parallel: bool) -> dict[str, parallel.ParallelStyle]:
    """Return PyTorch's plan by layer; q, k and v share one boundary, and so do up and gate."""
    stream = Shard(1) if sequence_parallel else Replicate()
    rows = parallel.RowwiseParallel
    styles: dict[str, parallel.ParallelStyle] = {
        "embedding": rows(input_layouts=Replicate(), output_layouts=stream),
        "head": parallel.ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    for part, names in {"attention": "qkv", "mlp": ["up", *["gate"] * spec.gated]}.items():
        path = f"blocks.*.{part}"
        styles |= {f"{path}.{name}": parallel.ColwiseParallel() for name in names}
        styles[f"{path}.out"] = rows(output_layouts=stream)
        styles[path] = parallel.PrepareModuleInput(
            input_layouts=(stream,), desired_input_layouts=(Replicate(),)
        )
        if sequence_parallel:
            styles |= {f"{path}_norm": parallel.SequenceParallel()}
    if sequence_parallel:
        styles["norm"] = parallel.SequenceParallel()
    if sequence_parallel and spec.positions == "learned":
        styles["positions"] = parallel.PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(0)
        )
    return styles


def our_backward(model: GPT, inputs: Tensor, targets: Tensor) -> None:
    """Run forward and backward; then every gradient is whole, or this rank's shard."""
    parallel_token_loss(model(inputs), targets).backward()
    finish_gradients(model)


def their_backward(model: GPT, inputs: Tensor, targets: Tensor) -> None:
    """Do the same with PyTorch, and reduce the norms' gradients, which it leaves partial."""
    with parallel.loss_parallel():
        token_loss(model(inputs), targets).backward()
    for param in model.parameters():
        if isinstance(param.grad, DTensor) and param.grad.placements[0].is_partial():
            param.grad = param.grad.redistribute(placements=[Replicate()])


def models(spec: ModelSpec, mesh: DeviceMesh, sequence_parallel: bool) -> tuple[GPT, GPT]:
    """Return the same model twice, split by the course and by PyTorch."""
    theirs = seeded(spec)
    parallel.parallelize_module(theirs, mesh, torch_plan(spec, sequence_parallel))
    return parallelize(seeded(spec), mesh, sequence_parallel), theirs


def step(model: GPT, backward: Backward, batch: tuple[Tensor, Tensor], name: str) -> Found:
    """Run one step and measure its communication; all ranks begin together."""
    model.zero_grad()
    dist.barrier()
    start_s = time.perf_counter()
    with record() as log, span("compute", name):
        backward(model, *batch)
        if batch[0].is_cuda:
            torch.cuda.synchronize()
    step_s = time.perf_counter() - start_s
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    return Found(step_s, communication_s(calls), sent_bytes(calls, dist.get_world_size()))


def apart(ours: GPT, theirs: GPT) -> float:
    """Return the largest difference between the whole gradients."""
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    whole = gather_tensors(ours, {name: param.grad for name, param in ours.named_parameters()})
    return largest_difference(
        (whole[name] for name in grads),
        (grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads.values()),
    )


def sweep(rank: int, args: argparse.Namespace) -> dict[str, Found]:
    """Return the fastest step for each batch, without and with sequence parallelism."""
    spec = replace(find_model(args.model), tied=False)  # PyTorch's plan splits no tied matrix
    p, seq = dist.get_world_size(), min(args.seq, spec.max_seq)
    mesh = init_device_mesh(rank_device().type, (p,), mesh_dim_names=("tp",))
    found, differences = dict[str, Found](), list[float]()
    for sequence_parallel in (False, True):
        ours, theirs = models(spec, mesh, sequence_parallel)
        ways = {"ours": (ours, our_backward), "PyTorch's": (theirs, their_backward)}
        for batch in args.batches:
            tokens = token_batch(0, batch=batch, seq=seq, vocab=spec.vocab)
            inputs, targets = (part.to(rank_device()) for part in next_tokens(tokens))
            turns: dict[str, list[Found]] = {}
            for who in [*ways] * (args.turns + 1):
                name = f"batch {batch}" + ", sequence parallel" * sequence_parallel + f", {who}"
                turns.setdefault(name, []).append(step(*ways[who], (inputs, targets), name))
            for name, steps in turns.items():
                found[name] = min(steps[1:], key=lambda one: one.step_s)
            differences.append(apart(ours, theirs))
    if rank == 0:
        print_table(found, p)
        print(f"largest difference of their gradients: {max(differences):.1e}", flush=True)
    return found


def print_table(found: dict[str, Found], p: int) -> None:
    """Print a line per kind of step. (A GPU only queues its collectives; there, look at the step.)

    Waiting for a rank that is late counts as communication.
    """
    print(f"a model on {p} rank{'s' * (p > 1)}; forward and backward, fastest turn", flush=True)
    for name, one in found.items():
        share = f" {100 * one.exposed_s / one.step_s:3.0f} % communication," if p > 1 else ""
        share *= rank_device().type == "cpu"
        sent = f"{one.num_bytes / MIB:8.2f} MiB sent by a rank"
        print(f"{name:>39}: {one.step_s * 1e3:8.1f} ms a step,{share} {sent}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="sequences")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each kind, after a warm-up")
    parser.add_argument("--record-to", default="runs/07_tensor_parallel", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if min(*arguments.batches, arguments.seq, arguments.turns) < 1:
        parser.error("need --batches, --seq and --turns above 0")
    launch(sweep, arguments, record_to=arguments.record_to)
