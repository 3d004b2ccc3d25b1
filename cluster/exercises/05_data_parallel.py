r"""Lesson 05 outside of the notebook: a GPT trained by naive data parallelism, or by local SGD.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 \
    cluster/exercises/05_data_parallel.py

Ours and PyTorch's own take turns. Every rank has a batch of its own, so the work grows with the
number of ranks (weak scaling): run it on 1, 2 and 4 ranks, predict the time of a step each time,
and see how long the all-reduces take. `--every 8` averages the parameters every 8 steps (local SGD)
instead of the gradients in each. Each rank writes its run record to runs/05_data_parallel, or where
`--record-to` says.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import count
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from course_lib.core import CourseError, find_model
from course_lib.data_parallel import LocalSGD, NaiveDDP, broadcast_state, fingerprint
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, span
from course_lib.ranks.timing import largest_difference, time_interleaved
from course_lib.ranks.world import rank_device

OURS, THEIRS = "ours", "PyTorch's"


def nothing() -> None:
    """Do nothing: the part of a step that a method leaves out."""


class Way:
    """One method: a replica of the GPT, and what the method does after backward and after step."""

    def __init__(self, rank: int, args: argparse.Namespace, kind: str) -> None:
        torch.manual_seed(rank)  # the first rank's weights win
        self.module = GPT(find_model(args.model)).to(rank_device())
        self.model, self.after_backward, self.after_step = wrapped(self.module, args.every, kind)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.batches, self.losses = batches(rank, args), list[Tensor]()

    def step(self) -> None:
        """Take one step on this rank's own next batch; gradients are cleared before."""
        inputs, targets = next(self.batches)
        with span("forward", "F"):
            loss = token_loss(self.model(inputs), targets)
        with span("backward", "B"):
            loss.backward()
        self.after_backward()
        with span("optimizer", "U"):
            self.optimizer.step()
        self.after_step()
        if inputs.is_cuda:
            torch.cuda.synchronize()
        self.losses.append(loss.detach())


def wrapped(
    module: nn.Module, every: int, kind: str
) -> tuple[nn.Module, Callable[[], object], Callable[[], object]]:
    """Return the model to be called, and what follows backward and the optimizer's step."""
    if kind == OURS and every:
        local = LocalSGD(module, every)
        return local, nothing, local.step_done
    if kind == OURS:
        naive = NaiveDDP(module)
        return naive, naive.finish, nothing
    if every:
        broadcast_state(module)
        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        return module, nothing, lambda: averager.average_parameters(module.parameters())
    return DistributedDataParallel(module), nothing, nothing


def batches(rank: int, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets of a rank, the same for every method."""
    spec = find_model(args.model)
    sizes = {"batch": args.batch, "seq": min(args.seq, spec.max_seq), "vocab": spec.vocab}
    for n in count():
        inputs, targets = next_tokens(token_batch(n, seed=rank, **sizes))
        yield inputs.to(rank_device()), targets.to(rank_device())


def train(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a step of both methods; rank 0 prints the results.

    Those of the fastest step; for local SGD the mean, since only some of its steps communicate.
    """
    ways = {kind: Way(rank, args, kind) for kind in (OURS, THEIRS)}
    steps = {kind: (way.module, way.step) for kind, way in ways.items()}
    seconds = time_interleaved(steps, args.turns, fmean if args.every else min)
    num_tokens = args.batch * min(args.seq, find_model(args.model).max_seq)
    for kind, way in ways.items():
        tell(kind, way, seconds[kind], num_tokens)
    apart = largest_difference(*(way.module.parameters() for way in ways.values()))
    if rank == 0:
        print(f"largest difference of their parameters: {apart:.1e}", flush=True)
    return seconds


def tell(kind: str, way: Way, step_s: float, num_tokens: int) -> None:
    """Print the time of a step, tokens/s, the last loss, and whether the replicas are equal."""
    p, loss = dist.get_world_size(), way.losses[-1]
    dist.all_reduce(loss)
    prints: list[str | None] = [None] * p
    dist.all_gather_object(prints, fingerprint(way.module))
    if dist.get_rank() == 0:
        print(
            f"{kind:>9} on {p} rank{'s' * (p > 1)}: {step_s * 1e3:8.1f} ms a step, "
            f"{p * num_tokens / step_s:8.0f} tokens/s, last loss {loss.item() / p:.3f}; "
            f"replicas are {'equal' if len(set(prints)) == 1 else 'different'}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument(
        "--every", type=int, default=0, help="local SGD: steps between two averages"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences on each rank")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=10, help="timed steps of each method")
    parser.add_argument("--record-to", default="runs/05_data_parallel", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if min(arguments.batch, arguments.seq, arguments.turns) < 1 or arguments.every < 0:
        parser.error("need --batch, --seq and --turns above 0, and --every from 0")
    launch(train, arguments, record_to=arguments.record_to)
