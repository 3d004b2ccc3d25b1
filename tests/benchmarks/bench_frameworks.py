"""What the frameworks cost beside one another: `python -m tests.benchmarks.bench_frameworks`.

Each row is the same model, batch and optimizer under another framework, on the ranks of a notebook.
The step's time is the fastest of all, by the slowest rank. "keeps" is what a rank holds between two
steps, "sends" what one step's collectives carry; both count in bytes for each byte of the
parameters. "loss" and "weights" are the largest differences from one process after all steps, in
float32 with SGD and momentum. A framework that is not installed is one sentence.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from course_lib.core import ModelSpec, find_model
from course_lib.core.units import format_seconds
from course_lib.cost.params import count_params
from course_lib.frameworks import (
    AS_IN_THE_PAPER,
    Engine,
    accelerate_ddp,
    accelerate_deepspeed,
    accelerate_fsdp,
    alive_bytes,
    deepspeed_engine,
    fully_sharded,
)
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.models.gpt import Block
from course_lib.ranks import Ranks, record

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 5
Make = Callable[..., Engine]
Found = dict[str, Any]


def makes() -> list[tuple[str, Make]]:
    """Every framework, with the packages it needs."""
    stages = [(stage, offload) for offload in (False, True) for stage in range(offload, 4)]
    return [
        ("", partial(fully_sharded, unit=Block)),
        ("", partial(fully_sharded, unit=Block, reshard_after_forward=False)),
        *(("deepspeed", partial(deepspeed_engine, stage=s, offload=o)) for s, o in stages),
        *(("deepspeed", partial(in_the_paper, stage=stage)) for stage in (1, 2, 3)),
        ("accelerate", accelerate_ddp),
        ("accelerate", partial(accelerate_fsdp, unit=Block)),
        *(("accelerate", partial(accelerate_deepspeed, stage=stage)) for stage in (1, 2, 3)),
    ]


def in_the_paper(*args: Any, stage: int) -> Engine:
    """DeepSpeed with settings that send what the paper says."""
    engine = deepspeed_engine(*args, stage=stage, **AS_IN_THE_PAPER)
    return replace(engine, name=f"{engine.name}, as in the paper")


def batch_of(spec: ModelSpec, n: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of step n."""
    return next_tokens(token_batch(n, batch=batch, seq=seq, vocab=spec.vocab))


def alone(spec: ModelSpec, batch: int, seq: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process on the whole batch."""
    torch.manual_seed(0)
    model = GPT(spec)
    optimizer, losses = SGD(model.parameters()), []
    for n in range(STEPS):
        inputs, targets = batch_of(spec, n, batch, seq)
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def under(rank: int, make: Make, world_size: int, spec: ModelSpec, batch: int, seq: int) -> Found:
    """One framework's row, as this rank has it."""
    before = alive_bytes()
    torch.manual_seed(0)
    engine = make(GPT(spec), SGD)
    losses, seconds = [], []
    for n in range(STEPS):
        inputs, targets = (t.chunk(world_size)[rank] for t in batch_of(spec, n, batch, seq))
        start_s = time.perf_counter()
        with record() as log:
            losses.append(engine.step(token_loss(engine.model(inputs), targets)))
        seconds.append(time.perf_counter() - start_s)
    keeps_bytes, sent = alive_bytes() - before, defaultdict(int)
    for event in log.events:
        sent[event.kind] += event.num_bytes
    return {"name": engine.name, "losses": losses, "seconds": seconds, "keeps": keeps_bytes,
            "sends": dict(sent), "weights": engine.weights()}  # fmt: skip


def print_row(rows: list[Found], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    """One line from what all ranks found."""
    losses, weights = expected
    params_bytes = 4 * sum(weight.numel() for weight in weights.values())
    step_s = min(max(times) for times in zip(*(row["seconds"] for row in rows), strict=True))
    means = [sum(both) / len(rows) for both in zip(*(r["losses"] for r in rows), strict=True)]
    loss = max(abs(a - b) for a, b in zip(means, losses, strict=True))
    weight = max((row["weights"][name] - weights[name]).abs().max().item()
                 for row in rows for name in weights)  # fmt: skip
    keeps = max(row["keeps"] for row in rows) / params_bytes
    sends = ", ".join(f"{kind} {size / params_bytes:.2f}" for kind, size in rows[0]["sends"].items()
                      if size > params_bytes / 100)  # fmt: skip
    print(f"{rows[0]['name']:33}{format_seconds(step_s):>9}{keeps:8.2f}{loss:10.1e}{weight:9.1e}"
          f"  {sends}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    args = parser.parse_args()
    spec = find_model(args.model)
    expected = alone(spec, args.batch, args.seq)
    print(f"{spec.name}: {count_params(spec):,} parameters, {args.ranks} ranks, "
          f"{args.batch} sequences of {args.seq}")  # fmt: skip
    print(f"{'':33}{'step':>9}{'keeps':>8}{'loss':>10}{'weights':>9}  sends")
    with Ranks(args.ranks) as ranks:
        for package, make in makes():
            if package and not find_spec(package):
                print(f"{package} is not installed here, so a row is left out.")
                continue
            print_row(ranks.run(under, make, args.ranks, spec, args.batch, args.seq), expected)


if __name__ == "__main__":
    main()
