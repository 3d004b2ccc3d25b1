"""What tensor parallelism costs: `python -m tests.benchmarks.bench_tensor_parallel`.

A training step of ours and of PyTorch's parallelize_module, in turns: the same model, and the same
calls (tests/tensor_parallel proves it). Then bytes of parameters on a rank, held and on paper; how
many calls a step makes, and the bytes that a rank sends for them around the ring. "sp" is with
sequence parallelism.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.core.parallelism import Parallelism
from course_lib.core.units import format_bytes
from course_lib.cost.params import params_on_rank
from course_lib.cost.traffic import sent_bytes
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.tensor_parallel import finish_gradients, parallel_token_loss, parallelize
from course_lib.tensor_parallel.cost import tensor_traffic
from tests.benchmarks.harness import (
    COMPARED,
    GPT_10M,
    Times,
    compared,
    on_bare_ranks,
    options,
    print_table,
    take_turns,
)

SPEC = replace(GPT_10M, positions="rope")
BATCH, SEQ = 2, 128


def turns(rank: int, num_turns: int) -> tuple[Times, dict[str, int]]:
    """Time a step of ours and PyTorch's; count the bytes of our parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    steps, held = {}, {}
    for name, sequence_parallel in (("tp", False), ("sp", True)):
        for maker in (ours, torchs):
            model, backward = maker(mesh, sequence_parallel)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            steps[f"{name} {maker.__name__}"] = partial(one_step, model, backward, optimizer)
            if maker is ours:
                held[name] = sum(param.nbytes for param in model.parameters())
    return take_turns(steps, num_turns), held


def one_step(model: nn.Module, backward: Any, optimizer: torch.optim.Optimizer) -> None:
    """Take one training step."""
    optimizer.zero_grad()
    backward(model, *next_tokens(token_batch(0, batch=BATCH, seq=SEQ, vocab=SPEC.vocab)))
    optimizer.step()


def seeded() -> GPT:
    """Build the same weights on every rank."""
    torch.manual_seed(0)
    return GPT(SPEC, flash=False)


def ours(mesh: Any, sequence_parallel: bool) -> tuple[nn.Module, Any]:
    """Return our split model, and its forward and backward."""

    def backward(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        parallel_token_loss(model(tokens), targets).backward()
        finish_gradients(model)

    return parallelize(seeded(), mesh, sequence_parallel), backward


def torchs(mesh: Any, sequence_parallel: bool) -> tuple[nn.Module, Any]:
    """Return PyTorch's, by the plan that sends what ours sends."""
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    from tests.tensor_parallel.test_beside_torch import plan

    def backward(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        with loss_parallel():
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()

    styles = plan(SPEC, sequence_parallel, shared=True)
    return parallelize_module(seeded(), mesh, styles), backward


def main() -> None:
    """Print the table."""
    args = options(__doc__)

    def rows() -> Iterator[list[Any]]:
        for p in args.ranks:
            times, held = on_bare_ranks(turns, p, args.turns)
            paper = 4 * params_on_rank(SPEC, Parallelism(tp=p))
            for name in ("tp", "sp"):
                calls = tensor_traffic(SPEC, BATCH, SEQ, 4, sequence_parallel=name == "sp")
                sizes = held[name], paper, sent_bytes(calls, p)
                yield [name, p, *compared(times, f"{name} ours", f"{name} torchs"), len(calls),
                       *map(format_bytes, sizes)]  # fmt: skip

    heads = ("mode", "ranks", *COMPARED, "calls", "params", "on paper", "sent")
    print_table(f"bare ranks, GPT {SPEC.name}, {BATCH} x {SEQ} tokens, 1 step", heads, rows())


if __name__ == "__main__":
    main()
