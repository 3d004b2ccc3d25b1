"""How fast our ZeRO is, and what a rank holds: `python -m tests.benchmarks.bench_zero`.

Stages 1 to 3, plain DDP, DDP with PyTorch's ZeroRedundancyOptimizer, and, where it is installed,
DeepSpeed's stages take turns in one run on the same ranks, so that whatever else the machine does
falls on all of them. A turn is one step in fp32 with AdamW, and takes as long as its slowest rank.
`ratio` is the median over the turns of a time by that of ZeroRedundancyOptimizer. `holds` is what
a rank has after a step, before zero_grad, where it is most: every tensor that lives, each storage
once. `formula` is what `course_lib.memory` says of parameters, gradients and state; our stage 1
holds less, as the step has made shards of the gradients, and DeepSpeed its default buffers besides.
"""

import argparse
import gc
import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.core import ModelSpec
from course_lib.core.parallelism import Parallelism
from course_lib.core.units import format_bytes, format_seconds
from course_lib.memory import count_params, model_states
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.zero import ZeRO1, ZeRO2, ZeRO3
from tests.benchmarks.worlds import bare_processes

SPEC = ModelSpec(
    name="10M",
    hidden=320,
    num_layers=4,
    num_heads=8,
    ffn_hidden=1536,
    vocab=8000,
    max_seq=128,
    tied=False,
)
ADAMW: dict[str, float] = {"lr": 1e-4}
OURS = {"ZeRO1": ZeRO1, "ZeRO2": ZeRO2, "ZeRO3": ZeRO3}
BASE = "torch ZeRO1"
STAGE_OF = {"DDP": 0, BASE: 1, **{f"ZeRO{n}": n for n in (1, 2, 3)}}
STAGE_OF |= {f"DeepSpeed {n}": n for n in (1, 2, 3)}
Step = Callable[[], None]


def gpt_loss(model: Any, rank: int) -> torch.Tensor:
    """The loss of this rank's batch."""
    tokens, targets = next_tokens(token_batch(rank, batch=2, seq=64, vocab=SPEC.vocab))
    return token_loss(model(tokens), targets)


def ours(rank: int, stage: type[ZeRO1]) -> Step:
    """A step of one of our stages."""
    engine = stage(GPT(SPEC), torch.optim.AdamW, **ADAMW)

    def step() -> None:
        engine.zero_grad()
        gpt_loss(engine, rank).backward()
        engine.step()

    return step


def behind_ddp(rank: int, sharded: bool) -> Step:
    """A step of PyTorch's DDP, with or without its sharded optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(GPT(SPEC))
    optimizer: torch.optim.Optimizer
    if sharded:
        kind = torch.optim.AdamW
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step() -> None:
        optimizer.zero_grad()
        gpt_loss(model, rank).backward()
        optimizer.step()

    return step


def by_deepspeed(rank: int, stage: int) -> Step:
    """A step of DeepSpeed, without the operators that it would have to compile first."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, dist.get_world_size(), "127.0.0.1", 0)
    os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    model = GPT(SPEC)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step() -> None:
        engine.backward(gpt_loss(engine, rank))
        engine.step()

    return step


def contestants(rank: int) -> dict[str, Callable[[], Step]]:
    """What makes a step of each."""
    found: dict[str, Callable[[], Step]] = {"DDP": partial(behind_ddp, rank, False)}
    found[BASE] = partial(behind_ddp, rank, True)
    found |= {name: partial(ours, rank, stage) for name, stage in OURS.items()}
    if importlib.util.find_spec("deepspeed"):
        found |= {f"DeepSpeed {n}": partial(by_deepspeed, rank, n) for n in (1, 2, 3)}
    return found


def turns(rank: int, num_turns: int) -> dict[str, dict[str, Any]]:
    """Seconds a step by the slowest rank, and the bytes that this rank holds, for each."""
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in contestants(rank).items():
        before = sum(living().values())
        steps[name] = make()
        for _ in range(2):  # the first steps touch fresh memory, and DDP rebuilds its buckets
            steps[name]()
        holds = torch.tensor(sum(living().values()) - before)
        dist.all_reduce(holds, dist.ReduceOp.MAX)
        found[name] = {"seconds": [], "holds": holds.item()}
    for turn in range(num_turns):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start_s = time.perf_counter()
            steps[name]()
            slowest = torch.tensor(time.perf_counter() - start_s)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name]["seconds"].append(slowest.item())
    return found


def living() -> dict[int, int]:
    """Bytes of every tensor's storage."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    storages = [x.untyped_storage() for x in tensors if x.layout == torch.strided]
    return {storage._cdata: storage.nbytes() for storage in storages}


def print_table(world_size: int, found: dict[str, dict[str, Any]]) -> None:
    """A line for each."""
    print(f"{world_size} ranks         step    ratio      holds    formula")
    num_params = count_params(SPEC)
    for name, one in found.items():
        pairs = zip(one["seconds"], found[BASE]["seconds"], strict=True)
        ratio = median(mine / base for mine, base in pairs)
        parallelism = Parallelism(dp=world_size, zero=STAGE_OF[name])
        formula = sum(model_states(num_params, "fp32", parallelism=parallelism).values())
        print(
            f"{name:12} {format_seconds(median(one['seconds'])):>8} {ratio:8.3f} "
            f"{format_bytes(one['holds']):>10} {format_bytes(formula):>10}"
        )


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description="Our ZeRO against PyTorch's and DeepSpeed's.")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    if not importlib.util.find_spec("deepspeed"):
        print("DeepSpeed is not installed and left out: pip install deepspeed")
    for world_size in args.ranks:
        print_table(world_size, bare_processes(turns, world_size, args.turns))


if __name__ == "__main__":
    main()
