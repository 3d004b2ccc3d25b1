"""How fast our ZeRO is, and what a rank holds: `python -m tests.benchmarks.bench_zero`.

A step in fp32 with AdamW, in turns: stages 1 to 3, plain DDP, DDP with PyTorch's
ZeroRedundancyOptimizer, and, where it is installed, DeepSpeed's stages. "ratio" is to
ZeroRedundancyOptimizer. "holds" is what a rank has after a step, before zero_grad, where it is
most: every tensor that lives, each storage once. "formula" is what `course_lib.memory` says of
parameters, gradients and state; our stage 1 holds less, as the step has made shards of the
gradients, and DeepSpeed its default buffers besides.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from course_lib.core.parallelism import Parallelism
from course_lib.core.units import format_bytes, format_seconds
from course_lib.frameworks import alive_bytes, deepspeed_engine
from course_lib.memory import count_params, model_states
from course_lib.models import GPT
from course_lib.zero import ZeRO1, ZeRO2, ZeRO3
from tests.benchmarks.harness import (
    GPT_10M,
    Times,
    gpt_loss,
    median_s,
    on_bare_ranks,
    options,
    print_table,
    ratio,
    slowest,
    take_turns,
    train_step,
)

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
BASE = "torch ZeRO1"
Step = Callable[[], None]


def ours(rank: int, kind: type[ZeRO1]) -> Step:
    """Return a step of one of our stages."""
    engine = kind(GPT(GPT_10M), torch.optim.AdamW, lr=1e-4)

    def step() -> None:
        engine.zero_grad()
        gpt_loss(engine, rank).backward()
        engine.step()

    return step


def behind_ddp(rank: int, sharded: bool) -> Step:
    """Return a step of PyTorch's DDP, with or without its sharded optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(GPT(GPT_10M))
    params = model.parameters()
    optimizer = (
        ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW, lr=1e-4)
        if sharded
        else ADAMW(params)
    )
    return partial(train_step, model, optimizer, partial(gpt_loss, model, rank))


def by_deepspeed(rank: int, stage: int) -> Step:
    """Return a step of DeepSpeed."""
    engine = deepspeed_engine(GPT(GPT_10M), ADAMW, stage=stage)

    def step() -> None:
        engine.step(gpt_loss(engine.model, rank))

    return step


CONTESTANTS: dict[str, tuple[int, Callable[[int], Step]]] = {
    "DDP": (0, partial(behind_ddp, sharded=False)),
    BASE: (1, partial(behind_ddp, sharded=True)),
    "ZeRO1": (1, partial(ours, kind=ZeRO1)),
    "ZeRO2": (2, partial(ours, kind=ZeRO2)),
    "ZeRO3": (3, partial(ours, kind=ZeRO3)),
}
if find_spec("deepspeed"):
    CONTESTANTS |= {f"DeepSpeed {n}": (n, partial(by_deepspeed, stage=n)) for n in (1, 2, 3)}


def turns(rank: int, num_turns: int) -> tuple[Times, dict[str, float]]:
    """Time a step of each; return also the bytes that a rank holds for it."""
    steps, holds = {}, {}
    for name, (_, make) in CONTESTANTS.items():
        before = alive_bytes()
        steps[name] = make(rank)
        for _ in range(2):
            steps[name]()
        holds[name] = slowest(alive_bytes() - before)
    return take_turns(steps, num_turns), holds


def rows(world_size: int, times: Times, holds: dict[str, float]) -> Iterator[list[Any]]:
    """Yield a row for each contestant."""
    for name, (stage, _) in CONTESTANTS.items():
        parallelism = Parallelism(dp=world_size, zero=stage)
        formula = model_states(count_params(GPT_10M), "fp32", parallelism=parallelism)
        sizes = [format_bytes(size) for size in (holds[name], sum(formula.values()))]
        yield [name, format_seconds(median_s(times, name)), ratio(times, name, BASE), *sizes]


def main() -> None:
    """Print a table for each number of ranks."""
    args = options(__doc__)
    if not find_spec("deepspeed"):
        print("DeepSpeed is not installed and left out: pip install deepspeed")
    for p in args.ranks:
        found = rows(p, *on_bare_ranks(turns, p, args.turns))
        print_table(
            f"{p} bare ranks, GPT {GPT_10M.name}", ("", "step", "ratio", "holds", "formula"), found
        )


if __name__ == "__main__":
    main()
