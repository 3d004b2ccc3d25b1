"""What FSDP costs: `python -m tests.benchmarks.bench_fsdp`.

A training step of ours and of PyTorch's fully_shard, in turns: the same model, units and messages
(tests/fsdp proves it). "held" is the most bytes of tensors that Python holds on a rank when a block
of the model begins or ends its forward, or begins its backward.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from course_lib.core.units import format_bytes
from course_lib.frameworks import alive_bytes
from course_lib.fsdp import FSDP, MixedPrecisionPolicy
from course_lib.models import GPT
from tests.benchmarks.harness import (
    COMPARED,
    GPT_3M,
    compared,
    gpt_loss,
    on_bare_ranks,
    options,
    print_table,
    take_turns,
    train_step,
)

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "kept": {"reshard_after_forward": False},
    "bfloat16": {"mixed_precision": HALF},
    "hybrid": {"mesh": (2, 2)},
}


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


def turns(rank: int, num_turns: int) -> dict[str, Any]:
    """Time a step of both, and count the most bytes, in each way that fits this many ranks."""
    found = {}
    for way, how in WAYS.items():
        if way != "hybrid" or dist.get_world_size() == 4:
            gc.collect()  # hooks and modules hold each other: the last way's tensors go only now
            found[way] = side_by_side(rank, how, num_turns)
    return found


def side_by_side(rank: int, how: dict[str, Any], num_turns: int) -> tuple[Any, list[int]]:
    """Return the times of one way, and the most bytes of ours and of PyTorch's."""
    steps, held = {}, []
    for name, wrap in (("ours", FSDP), ("torch", torchs)):
        before = alive_bytes()  # the other one's
        module = GPT(GPT_3M)
        model = wrap(module, **how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loss = partial(gpt_loss, model, rank, GPT_3M)
        steps[name] = partial(train_step, model, optimizer, loss)
        held.append(most_bytes(module, steps[name]) - before)
    return take_turns(steps, num_turns), held


def most_bytes(module: Any, step: Callable[[], None]) -> int:
    """Return the most bytes of tensors within the third step."""
    step()
    step()
    found: list[int] = []

    def note(*_: Any) -> None:
        found.append(alive_bytes())

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
    return max(found)


def main() -> None:
    """Print the table."""
    args = options(__doc__)

    def rows() -> Iterator[list[Any]]:
        for p in args.ranks:
            for way, (times, held) in on_bare_ranks(turns, p, args.turns).items():
                yield [way, p, *compared(times), *map(format_bytes, held)]

    heads = ("", "ranks", *COMPARED, "ours held", "torch held")
    print_table(f"bare ranks, GPT {GPT_3M.name}, 1 step with AdamW", heads, rows())


if __name__ == "__main__":
    main()
