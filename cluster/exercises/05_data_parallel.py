r"""Lesson 05 outside of the notebook: a GPT trained by naive data parallelism, or by local SGD.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 \
    cluster/exercises/05_data_parallel.py

Every rank has a batch of its own, so the work grows with the ranks (weak scaling): run it on 1, 2
and 4 ranks, predict the time of a step each time, and see what the all-reduces take. `--every 8`
averages the parameters every 8 steps in place of the gradients in each. Each rank leaves its run
record in runs/05_data_parallel, or where `--record-to` says.
"""

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist

from course_lib.core import CourseError
from course_lib.core.presets import find_model
from course_lib.data_parallel import NaiveDDP, fingerprint
from course_lib.local_sgd import LocalSGD
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, span
from course_lib.ranks.world import rank_device


def train(rank: int, args: argparse.Namespace) -> None:
    """Train; rank 0 tells the time of a step, and whether all replicas are equal."""
    torch.manual_seed(rank)  # the first rank's weights win
    spec = find_model(args.model)
    module = GPT(spec).to(rank_device())
    model = LocalSGD(module, args.every) if args.every else NaiveDDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = {"batch": args.batch, "seq": min(args.seq, spec.max_seq), "vocab": spec.vocab}
    seconds = []
    for n in range(args.turns):
        tokens = token_batch(n, seed=rank, **sizes)
        start_s = time.perf_counter()
        loss = step(model, optimizer, tokens.to(rank_device()))
        seconds.append(time.perf_counter() - start_s)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {n + 1}: loss {loss.item() / dist.get_world_size():.3f}", flush=True)
    tell(rank, module, seconds, sizes["batch"] * sizes["seq"])


def step(
    model: NaiveDDP | LocalSGD, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    """One step on this rank's own batch; return its loss."""
    inputs, targets = next_tokens(tokens)
    with span("forward", "F"):
        loss = token_loss(model(inputs), targets)
    with span("backward", "B"):
        optimizer.zero_grad()
        loss.backward()
    if isinstance(model, NaiveDDP):
        model.finish()
    with span("optimizer", "U"):
        optimizer.step()
    if isinstance(model, LocalSGD):
        model.step_done()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return loss.detach().clone()


def tell(rank: int, module: torch.nn.Module, seconds: list[float], num_tokens: int) -> None:
    """Print the time of a step, tokens a second, and the fingerprints' agreement."""
    prints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(module))
    if rank == 0:
        step_s, p = median(seconds[1:] or seconds), len(prints)
        alike = "equal" if len(set(prints)) == 1 else "different"
        print(
            f"{p} rank{'s' if p > 1 else ''}: {step_s * 1e3:.1f} ms a step, "
            f"{p * num_tokens / step_s:.0f} tokens/s; replicas are {alike}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-10m ...")
    parser.add_argument("--every", type=int, default=0, help="local SGD: steps between two means")
    parser.add_argument("--batch", type=int, default=1, help="sequences on each rank")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=10, help="steps")
    parser.add_argument("--record-to", default="runs/05_data_parallel", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        find_model(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if min(arguments.batch, arguments.seq, arguments.turns) < 1 or arguments.every < 0:
        parser.error("need --batch, --seq and --turns above 0, and --every from 0")
    launch(train, arguments, record_to=arguments.record_to)
