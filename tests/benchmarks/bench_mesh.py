"""What sharding over tensor parallelism costs: `python -m tests.benchmarks.bench_mesh`.

A training step of `apply_methods` with our FSDP, and of PyTorch's fully_shard over its DTensors, in
turns on dp = 2, tp = 2: the same model, batches and units (tests/mesh proves equal numbers). "time"
is the ratio of the shortest turns, which other processes have disturbed least. Ranks are recorded,
so every message of both is seen; "sent" is what a rank sends in a step, around a ring.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.core.records import Event
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.bandwidth import bus_factor
from course_lib.fsdp import FSDP
from course_lib.mesh import Mesh, RankMesh
from course_lib.mesh.clip import finish_over_axes, held_grads
from course_lib.mesh.model_part import apply_methods
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.ranks import record
from course_lib.tensor_parallel import parallel_token_loss
from tests.benchmarks.harness import (
    GPT_3M,
    on_recorded_ranks,
    options,
    print_table,
    ratio,
    take_turns,
)
from tests.tensor_parallel.test_beside_torch import plan

SPEC = replace(GPT_3M, positions="rope")  # the plan for DTensor splits no learned positions
WAYS = {"plain": False, "sequence-parallel": True}
SENDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Return the batch of this rank's copy of the model: ranks 0 and 1 have the same one."""
    return next_tokens(token_batch(rank // 2, batch=2, seq=64, vocab=SPEC.vocab))


def ours(rank: int, sequence_parallel: bool) -> Callable[[], float]:
    """Return a step of the course's."""
    mesh = RankMesh(Mesh(dp=2, tp=2))
    part = apply_methods(
        seeded(),
        mesh,
        lambda module, group: FSDP(module, group=group),
        sequence_parallel=sequence_parallel,
    )
    model, (tokens, targets) = part.wrapped, batch(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        loss = parallel_token_loss(model(tokens), targets, mesh.group("tp"))
        loss.backward()
        finish_over_axes(part.module, mesh, held_grads(part.module), sums_tied=False)
        optimizer.step()
        return loss.item()

    return step


def torchs(rank: int, sequence_parallel: bool) -> Callable[[], float]:
    """Return a step of PyTorch's."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(seeded(), mesh["tp"], plan(SPEC, sequence_parallel, True))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer, (tokens, targets) = torch.optim.SGD(model.parameters(), lr=0.1), batch(rank)

    def step() -> float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(whole.item())

    return step


def seeded() -> GPT:
    """Return the model, the same on every rank; DTensor takes attention unfused."""
    torch.manual_seed(0)
    return GPT(SPEC, flash=False)


def turns(rank: int, num_turns: int) -> dict[str, Any]:
    """Time both in each way; return times, losses of the first steps, and bytes of the last."""
    found = {}
    for way, sequence_parallel in WAYS.items():
        steps = {"ours": ours(rank, sequence_parallel), "torch": torchs(rank, sequence_parallel)}
        losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
        times, sent = take_turns(steps, num_turns), {}
        for name, step in steps.items():
            with record() as log:
                step()
            sent[name] = sent_bytes(log.events)
        found[way] = times, losses, sent
    return found


def sent_bytes(events: Sequence[Event]) -> float:
    """Return the bytes that this rank sends in the messages of more than one rank."""
    calls = [event for event in events if event.kind in SENDS and len(event.group) > 1]
    return sum(bus_factor(event.kind, len(event.group)) * event.num_bytes for event in calls)


def least_s(times: Any, name: str) -> float:
    """Return the seconds of the shortest turn."""
    return float(min(wall_s for wall_s, _ in times[name]))


def main() -> None:
    """Print the table."""
    args = options(__doc__, ranks=[4])

    def rows() -> Iterator[list[Any]]:
        for way, (times, losses, sent) in on_recorded_ranks(turns, 4, args.turns).items():
            both = [least_s(times, name) for name in ("ours", "torch")]
            apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
            yield [
                way,
                *map(format_seconds, both),
                both[0] / both[1],
                ratio(times, "ours", "torch", clock=1),
                *map(format_bytes, sent.values()),
                f"{apart:.0e}",
            ]

    heads = ("", "ours", "torch", "time", "cpu ratio", "ours sent", "torch sent", "loss apart")
    print_table(f"recorded ranks, dp=2 tp=2, GPT {SPEC.name}, 1 step with SGD", heads, rows())


if __name__ == "__main__":
    main()
