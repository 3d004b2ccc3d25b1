"""What tensor parallelism costs: `python -m tests.benchmarks.bench_tensor_parallel`.

Ours and PyTorch's parallelize_module take turns in one run on the same ranks, so that whatever else
the machine does falls on both: the same model, and the same calls (tests/test_tensor_parallel_torch
proves it). A turn is one training step, and takes as long as its slowest rank. The ratio is the
median over the turns of our time by PyTorch's; on a busy machine the one of processor time, by rank
0 in all its threads, says more. Then bytes of parameters on a rank, held and on paper; how many
calls a step makes, and the bytes that a rank sends for them around the ring.
"""

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.core.parallelism import Parallelism
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.params import params_on_rank
from course_lib.cost.traffic import sent_bytes
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.tensor_parallel import finish_gradients, parallel_token_loss, parallelize
from course_lib.tensor_parallel.cost import tensor_traffic
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
    positions="rope",
)
BATCH, SEQ = 2, 128
Turns = dict[str, list[float]]


def turns(rank: int, num_turns: int) -> Turns:
    """Seconds a step for ours and PyTorch's, by the slowest rank, and bytes of the parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    steps, found = {}, Turns()
    for sequence_parallel, name in ((False, "tp"), (True, "sp")):
        for maker in (ours, torchs):
            model, step = maker(mesh, sequence_parallel)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            label = f"{name} {maker.__name__}"
            steps[label] = partial(one_step, model, step, optimizer)
            found[f"{label} bytes"] = [float(sum(local_bytes(p) for p in model.parameters()))]
    for turn in range(num_turns + 2):
        for label in list(steps)[:: 1 if turn % 2 else -1]:
            seconds, cpu_s = timed(steps[label])
            if turn >= 2:  # the first turns touch fresh memory
                found.setdefault(label, []).append(seconds)
                found.setdefault(f"{label} cpu", []).append(cpu_s)
    return found


def timed(step: Any) -> tuple[float, float]:
    """Seconds by the slowest rank, and this rank's processor time."""
    dist.barrier()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    step()
    cpu_s = time.process_time() - cpu_s
    slowest = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item(), cpu_s


def one_step(model: nn.Module, backward: Any, optimizer: torch.optim.Optimizer) -> None:
    """One training step."""
    optimizer.zero_grad()
    backward(model, *next_tokens(token_batch(0, batch=BATCH, seq=SEQ, vocab=SPEC.vocab)))
    optimizer.step()


def seeded() -> GPT:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return GPT(SPEC, flash=False)


def ours(mesh: Any, sequence_parallel: bool) -> tuple[nn.Module, Any]:
    """Our split model, and its forward and backward."""

    def backward(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        parallel_token_loss(model(tokens), targets).backward()
        finish_gradients(model)

    return parallelize(seeded(), mesh, sequence_parallel), backward


def torchs(mesh: Any, sequence_parallel: bool) -> tuple[nn.Module, Any]:
    """PyTorch's, by the plan that sends what ours sends."""
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    from tests.tensor_parallel.test_beside_torch import plan

    def backward(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        with loss_parallel():
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()

    styles = plan(SPEC, sequence_parallel, shared=True)
    return parallelize_module(seeded(), mesh, styles), backward


def local_bytes(param: Any) -> int:
    """Bytes of what this rank holds of a parameter."""
    return (param.to_local() if hasattr(param, "to_local") else param).nbytes


def print_rows(world_size: int, found: Turns) -> None:
    """A line for tensor parallel, one for sequence parallel."""
    for name in ("tp", "sp"):
        ratios = [
            median(
                o / t
                for o, t in zip(found[f"{name} ours{of}"], found[f"{name} torchs{of}"], strict=True)
            )
            for of in ("", " cpu")
        ]
        times = [format_seconds(median(found[f"{name} {who}"])) for who in ("ours", "torchs")]
        held = format_bytes(found[f"{name} ours bytes"][0])
        paper = format_bytes(4 * params_on_rank(SPEC, Parallelism(tp=world_size)))
        calls = tensor_traffic(SPEC, BATCH, SEQ, 4, sequence_parallel=name == "sp")
        print(
            f"{world_size:5} {name:>4} {times[0]:>9} {times[1]:>9} {ratios[0]:7.3f} "
            f"{ratios[1]:10.3f} {held:>10} {paper:>10} {len(calls):6} "
            f"{format_bytes(sent_bytes(calls, world_size)):>10}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Our tensor parallelism against PyTorch's.")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    print(f"bare ranks, GPT {SPEC.name}, batch {BATCH} x {SEQ} tokens, 1 step")
    print(
        "ranks mode      ours     torch   ratio  cpu ratio     params   on paper  calls       sent"
    )
    for world_size in args.ranks:
        print_rows(world_size, bare_processes(turns, world_size, args.turns))


if __name__ == "__main__":
    main()
