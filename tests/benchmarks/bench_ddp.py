"""How fast our DDP is: `python -m tests.benchmarks.bench_ddp`.

A training step of ours and of torch's DDP, in turns. Then bucket sizes on an emulated wire that
takes about half as long as computing: predicted from what one rank computes alone, and measured.
Once with layers that only take their time, and once with the GPT, whose ranks share the processors
with the wire.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from course_lib.core import Link
from course_lib.core.units import format_bytes, format_seconds
from course_lib.ddp import DDP
from course_lib.ddp.cost import best_bucket_bytes, step_s
from course_lib.models import GPT
from tests.benchmarks.harness import (
    COMPARED,
    GPT_10M,
    WORLDS,
    Times,
    compared,
    gpt_loss,
    options,
    print_table,
    take_turns,
    train_step,
)


def turns(rank: int, num_turns: int) -> Times:
    """Time a training step of ours and torch's."""
    steps = {}
    for name, wrap in {"ours": DDP, "torch": nn.parallel.DistributedDataParallel}.items():
        model = wrap(GPT(GPT_10M))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        steps[name] = partial(train_step, model, optimizer, partial(gpt_loss, model, rank))
    return take_turns(steps, num_turns)


def gpt() -> nn.Module:
    """Build the model of all tables."""
    return GPT(GPT_10M)


def print_sweep(title: str, build: Any, loss_of: Any, num_turns: int) -> None:
    """Print predicted and measured steps of two ranks by bucket size, with overlap and without."""
    from course_lib.ddp.lab import measure_cost, measure_steps
    from course_lib.ranks import Ranks

    with Ranks(2) as ranks:
        cost = measure_cost(ranks, build, loss_of, num_turns)
    total, compute_s = sum(cost.grad_bytes), cost.compute_s
    link = Link(name="wire", latency_s=0.01 * compute_s, bytes_per_s=total / (0.4 * compute_s))
    sizes = {best_bucket_bytes(cost, 2, link), max(cost.grad_bytes) // 4, total}
    runs = {
        (size, overlap): {"bucket_bytes": size, "overlap": overlap}
        for size in sorted(sizes)
        for overlap in (True, False)
    }
    with Ranks(2, link=link) as ranks:
        steps = measure_steps(ranks, build, loss_of, runs, num_turns)
        after = measure_cost(ranks, build, loss_of, num_turns)
    ready_s = tuple((a + b) / 2 for a, b in zip(cost.ready_s, after.ready_s, strict=True))
    forward_s = (cost.forward_s + after.forward_s) / 2  # the machine may have got slower meanwhile
    cost = replace(cost, forward_s=forward_s, ready_s=ready_s)

    def rows() -> Iterator[list[Any]]:
        for (size, overlap), step in steps.items():
            predicted_s = step_s(cost, size, 2, link, overlap=overlap)
            times = [format_seconds(seconds) for seconds in (predicted_s, step.step_s)]
            yield [format_bytes(size), overlap, *times, step.step_s / predicted_s]

    title = f"{title}: computes {format_seconds(cost.compute_s)}; emulated {link}"
    print_table(title, ("bucket", "overlap", "predicted", "measured", "ratio"), rows())


def main() -> None:
    """Print all tables."""
    from course_lib.models.emulated import emulated_loss, emulated_model

    args = options(__doc__)
    for title, measure in WORLDS.items():
        rows = ([p, *compared(measure(turns, p, args.turns))] for p in args.ranks)
        print_table(f"{title} ranks, GPT {GPT_10M.name}, 1 step", ("ranks", *COMPARED), rows)
    few = max(1, args.turns // 3)
    print_sweep("layers that sleep", emulated_model, emulated_loss, few)
    print_sweep(f"GPT {GPT_10M.name}", gpt, gpt_loss, few)


if __name__ == "__main__":
    main()
