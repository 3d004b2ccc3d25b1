"""How fast our DDP is: `python -m tests.benchmarks.bench_ddp`.

A training step of ours and of torch's DDP, in turns. Lesson 06 measures bucket sizes.
"""

from functools import partial

import torch
from torch import nn

from course_lib.ddp import DDP
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


def main() -> None:
    """Print both tables."""
    args = options(__doc__)
    for title, measure in WORLDS.items():
        rows = ([p, *compared(measure(turns, p, args.turns))] for p in args.ranks)
        print_table(f"{title} ranks, GPT {GPT_10M.name}, 1 step", ("ranks", *COMPARED), rows)


if __name__ == "__main__":
    main()
