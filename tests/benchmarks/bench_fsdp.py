"""What FSDP costs: `python -m tests.benchmarks.bench_fsdp`.

Ours and PyTorch's fully_shard take turns in one run on the same ranks, so that whatever else the
machine does falls on both: the same model, units and messages (tests/test_fsdp proves it). A turn
is one training step, and takes as long as its slowest rank. The ratio is the median over the turns
of our time by PyTorch's; on a busy machine the one of processor time, by rank 0 in all its threads,
says more. Then the most bytes of tensors that Python holds on a rank when a block of the model
begins or ends its forward, or begins its backward.
"""

import argparse
import gc
import time
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from course_lib.core import ModelSpec
from course_lib.core.units import format_bytes, format_seconds
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from tests.benchmarks.worlds import bare_processes

SPEC = ModelSpec(
    name="3M",
    hidden=192,
    num_layers=6,
    num_heads=6,
    ffn_hidden=768,
    vocab=1000,
    max_seq=128,
    tied=False,
)
Turns = dict[str, list[float]]


def torchs(
    module: nn.Module,
    mixed_precision: Any = None,
    reshard_after_forward: bool = True,
    mesh: tuple[int, int] | None = None,
) -> nn.Module:
    """PyTorch's, with the same options and units."""
    policy = vars(mixed_precision) if mixed_precision else {}
    options: dict[str, Any] = {"mp_policy": torch_fsdp.MixedPrecisionPolicy(**policy)}
    if mesh:
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for block in module.blocks:
        torch_fsdp.fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    return torch_fsdp.fully_shard(module, **options)


def ways_of(world_size: int) -> dict[str, dict[str, Any]]:
    """The ways that fit this many ranks: a mesh of 2 x 2 needs four."""
    from course_lib.fsdp import (
        MixedPrecisionPolicy,
    )  # not above: spawned processes import this file

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ways: dict[str, dict[str, Any]] = {
        "float32": {},
        "kept": {"reshard_after_forward": False},
        "bfloat16": {"mixed_precision": half},
    }
    return ways | ({"hybrid": {"mesh": (2, 2)}} if world_size == 4 else {})


def turns(rank: int, num_turns: int) -> Turns:
    """Seconds a step, by the slowest rank, processor time, and bytes, for ours and PyTorch's."""
    found: Turns = {}
    for way, options in ways_of(dist.get_world_size()).items():
        gc.collect()  # hooks and modules hold each other: the last way's tensors go only now
        found.update(side_by_side(rank, way, options, num_turns))
    return found


def side_by_side(rank: int, way: str, options: dict[str, Any], num_turns: int) -> Turns:
    """`turns` of one way."""
    from course_lib.fsdp import FSDP

    steps, found = {}, Turns()
    for name, wrap in (("ours", FSDP), ("torch", torchs)):
        before = live_bytes()  # the other one's
        module = GPT(SPEC)
        model = wrap(module, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        steps[f"{way} {name}"] = step = partial(one_step, rank, model, optimizer)
        found[f"{way} {name} bytes"] = [float(most_bytes(module, step) - before)]
    for turn in range(num_turns + 2):
        for label in list(steps)[:: 1 if turn % 2 else -1]:
            seconds, cpu_s = timed(steps[label])
            if turn >= 2:  # the first turns touch fresh memory, and learn the order
                found.setdefault(label, []).append(seconds)
                found.setdefault(f"{label} cpu", []).append(cpu_s)
    return found


def one_step(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One training step."""
    optimizer.zero_grad()
    tokens, targets = next_tokens(token_batch(rank, batch=2, seq=64, vocab=SPEC.vocab))
    token_loss(model(tokens), targets).backward()
    optimizer.step()


def timed(step: Any) -> tuple[float, float]:
    """Seconds by the slowest rank, and this rank's processor time."""
    dist.barrier()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    step()
    cpu_s = time.process_time() - cpu_s
    slowest = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item(), cpu_s


def most_bytes(module: nn.Module, step: Any) -> int:
    """The most bytes of tensors within the third step."""
    step()
    step()
    moments: list[int] = []

    def note(*_: Any) -> None:
        moments.append(live_bytes())

    handles = [
        register(note)
        for block in module.blocks
        for register in (
            block.register_forward_pre_hook,
            block.register_forward_hook,
            block.register_full_backward_pre_hook,
        )
    ]
    step()
    for handle in handles:
        handle.remove()
    return max(moments)


def live_bytes() -> int:
    """Bytes of all storages that a Python object leads to."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def print_rows(world_size: int, found: Turns) -> None:
    """A line for each way: medians, medians of the ratios, and bytes."""
    for way in ways_of(world_size):
        ours, theirs = f"{way} ours", f"{way} torch"
        ratios = [
            median(o / t for o, t in zip(found[ours + of], found[theirs + of], strict=True))
            for of in ("", " cpu")
        ]
        held = " ".join(
            f"{format_bytes(int(found[f'{name} bytes'][0])):>10}" for name in (ours, theirs)
        )
        print(
            f"{world_size:5} {way:>9} {format_seconds(median(found[ours])):>9} "
            f"{format_seconds(median(found[theirs])):>9} {ratios[0]:7.3f} {ratios[1]:10.3f} {held}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Our FSDP against fully_shard.")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    print(f"GPT {SPEC.name}, 1 step with AdamW, bytes at most while blocks compute")
    print("ranks       way      ours     torch   ratio  cpu ratio  ours held torch held")
    for world_size in args.ranks:
        print_rows(world_size, bare_processes(turns, world_size, args.turns))


if __name__ == "__main__":
    main()
