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

from course_lib.core.specs import ModelSpec
from course_lib.data_parallel import NaiveDDP, fingerprint
from course_lib.local_sgd import LocalSGD
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch, span

VOCAB, SEQ = 64, 32


def train(rank: int, options: argparse.Namespace) -> None:
    """Train; rank 0 tells the time of a step, and whether all replicas are equal."""
    torch.manual_seed(rank)  # the first rank's weights win
    hidden = options.hidden
    sizes = {"hidden": hidden, "ffn_hidden": 4 * hidden, "num_heads": 4, "max_seq": SEQ}
    module = GPT(ModelSpec(num_layers=options.layers, vocab=VOCAB, **sizes))
    model = LocalSGD(module, options.every) if options.every else NaiveDDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seconds = []
    for n in range(options.steps):
        start_s = time.perf_counter()
        loss = step(model, optimizer, n, rank, options.batch)
        seconds.append(time.perf_counter() - start_s)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {n + 1}: loss {loss.item() / dist.get_world_size():.3f}", flush=True)
    tell(rank, module, seconds, options.batch)


def step(
    model: NaiveDDP | LocalSGD, optimizer: torch.optim.Optimizer, n: int, rank: int, batch: int
) -> torch.Tensor:
    """One step on this rank's own batch; return its loss."""
    inputs, targets = next_tokens(token_batch(n, batch=batch, seq=SEQ, vocab=VOCAB, seed=rank))
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
    return loss.detach().clone()


def tell(rank: int, module: torch.nn.Module, seconds: list[float], batch: int) -> None:
    """Print the time of a step, tokens a second, and the fingerprints' agreement."""
    prints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(module))
    if rank == 0:
        step_s, p = median(seconds[1:] or seconds), len(prints)
        alike = "equal" if len(set(prints)) == 1 else "different"
        print(
            f"{p} rank{'s' if p > 1 else ''}: {step_s * 1e3:.1f} ms a step, "
            f"{p * batch * SEQ / step_s:.0f} tokens/s; replicas are {alike}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--every", type=int, default=0, help="local SGD: steps between two means")
    parser.add_argument("--record-to", default="runs/05_data_parallel", metavar="FOLDER")
    given = parser.parse_args()
    launch(train, given, record_to=given.record_to)
