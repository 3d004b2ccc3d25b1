"""How fast the pipeline is: `python -m tests.benchmarks.bench_pipeline`.

First our engine against torch.distributed.pipelining: the same stages and schedules take turns in
one run on the same ranks, so that whatever else the machine does falls on both. A turn is one step
of forwards and backwards, and takes as long as its slowest rank; the ratio is the median over the
turns of our time by torch's. Once on bare processes, as under torchrun, and once on the ranks of a
notebook, where every message is recorded.

Then what the two halves of backward cost against the whole one, how long the simulator takes, and
the bubble by formula, by simulation and as measured with stages that only take their time. Last,
few and many micro-batches on a slow wire.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from course_lib.core import Link, ModelSpec
from course_lib.core.units import format_bytes, format_seconds
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline import (
    PipelineTimes,
    cost,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
)
from course_lib.pipeline.cost import BatchCost, step_parts
from course_lib.pipeline.split_backward import SplitBackward
from tests.benchmarks.worlds import bare_processes, recorded_ranks

SPEC = ModelSpec(
    name="6M",
    hidden=256,
    num_layers=6,
    num_heads=8,
    ffn_hidden=1024,
    vocab=2000,
    max_seq=64,
    tied=False,
)
NUM_MICRO_BATCHES = 8
Turns = dict[str, list[float]]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of every step."""
    return next_tokens(token_batch(0, batch=2 * NUM_MICRO_BATCHES, seq=64, vocab=SPEC.vocab))


def stage_here(num_model_chunks: int = 1) -> Any:
    """This rank's stage of the model of all tables."""
    from course_lib.pipeline import split_model

    torch.manual_seed(0)
    return split_model(
        SPEC, dist.get_world_size(), dist.get_rank(), num_model_chunks=num_model_chunks
    )


def steps() -> dict[str, Any]:
    """A step of ours and of torch's for each schedule: {"1f1b ours": fn, ...}."""
    from torch.distributed import pipelining

    from course_lib.pipeline import Pipeline

    p, rank, m = dist.get_world_size(), dist.get_rank(), NUM_MICRO_BATCHES
    kinds = {
        "gpipe": (gpipe(p, m), pipelining.ScheduleGPipe, 1),
        "1f1b": (one_f_one_b(p, m), pipelining.Schedule1F1B, 1),
        "interleaved": (interleaved(p, m, 2), pipelining.ScheduleInterleaved1F1B, 2),
    }
    inputs, targets = batch()
    found: dict[str, Any] = {}
    for name, (schedule, torch_schedule, v) in kinds.items():
        stage = stage_here(v)
        pipeline = Pipeline(stage, token_loss)
        theirs = [
            pipelining.PipelineStage(chunk, n * p + rank, p * v, torch.device("cpu"))
            for n, chunk in enumerate(stage_here(v).chunks)
        ]
        their_schedule = torch_schedule(theirs if v > 1 else theirs[0], m, loss_fn=token_loss)
        args = (inputs,) if rank == 0 else ()
        kwargs = {"target": targets} if rank == p - 1 else {}

        def ours(pipeline: Any = pipeline, schedule: Any = schedule) -> None:
            pipeline.stage.zero_grad()
            pipeline.step(schedule, inputs.chunk(m), targets.chunk(m))

        def torchs(stages: Any = theirs, run: Any = their_schedule, a: Any = args, k: Any = kwargs):
            for one in stages:
                one.submod.zero_grad()
            run.step(*a, **k, return_outputs=False)

        found |= {f"{name} ours": ours, f"{name} torch": torchs}
    return found


def turns(rank: int, num_turns: int) -> Turns:
    """Seconds of a step by the slowest rank, and this rank's processor time."""
    todo = steps()
    seconds: Turns = {key: [] for name in todo for key in (name, f"{name} cpu")}
    for turn in range(num_turns + 2):
        for name in list(todo)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start_s, cpu_s = time.perf_counter(), time.process_time()
            todo[name]()
            cpu_s = time.process_time() - cpu_s
            slowest = torch.tensor(time.perf_counter() - start_s)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 2:  # the first turns agree on shapes
                seconds[name].append(slowest.item())
                seconds[f"{name} cpu"].append(cpu_s)
    return seconds


def print_engines(title: str, measure: Any, sizes: list[int], num_turns: int) -> None:
    """One line for each number of ranks and schedule."""
    print(f"{title} ranks, GPT {SPEC.name}, {NUM_MICRO_BATCHES} micro-batches, 1 step")
    print("ranks schedule         ours     torch   ratio  cpu ratio")
    for world_size in sizes:
        seconds = measure(turns, world_size, num_turns)
        for name in ("gpipe", "1f1b", "interleaved"):
            ours, theirs = (median(seconds[f"{name} {who}"]) for who in ("ours", "torch"))
            ratio, cpu_ratio = (
                median(
                    o / t
                    for o, t in zip(
                        seconds[f"{name} ours{of}"], seconds[f"{name} torch{of}"], strict=True
                    )
                )
                for of in ("", " cpu")
            )
            print(
                f"{world_size:5} {name:12} {format_seconds(ours):>8} {format_seconds(theirs):>9} "
                f"{ratio:7.3f} {cpu_ratio:10.3f}"
            )


def print_halves(num_turns: int) -> None:
    """Seconds and held bytes of one backward, and of its two halves."""
    torch.manual_seed(0)
    model, (inputs, _) = GPT(SPEC), batch()
    tokens = inputs[:4]

    def whole() -> list[float]:
        out = model(tokens)
        start_s = time.perf_counter()
        out.backward(torch.ones_like(out))
        return [time.perf_counter() - start_s]

    def halves() -> list[float]:
        with SplitBackward(model) as watched:
            out = model(tokens)
        start_s = time.perf_counter()
        watched.backward_input(out, torch.ones_like(out))
        middle_s = time.perf_counter()
        watched.backward_weight()
        return [middle_s - start_s, time.perf_counter() - middle_s]

    found: dict[Any, list[list[float]]] = {whole: [], halves: []}
    for _ in range(num_turns + 1):
        for way in found:
            model.zero_grad()
            found[way].append(way())
    (b_s,), (i_s, w_s) = (map(median, zip(*found[way][1:], strict=True)) for way in found)
    sizes = [activation_ledger(way, given=model.parameters()).peak_bytes() for way in found]
    print(
        f"backward {format_seconds(b_s)}, holding {format_bytes(sizes[0])}; halves "
        f"{format_seconds(i_s)} + {format_seconds(w_s)}, ratio {(i_s + w_s) / b_s:.3f}, "
        f"holding {format_bytes(sizes[1])}"
    )


def print_bubbles(num_turns: int) -> None:
    """Bubble as a part of the step: formula, simulation, real ranks."""
    from course_lib.pipeline.lab import emulated, measure
    from course_lib.ranks import Ranks

    p, m = 4, 8
    times = PipelineTimes(forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02)
    busy_s = m * 0.06
    zb_s = cost.zero_bubble_h1_bubble_s(p, m, 0.02, 0.02, 0.02)
    schedules = {
        "naive": (naive(p, m), (p - 1) / p),
        "gpipe": (gpipe(p, m), cost.bubble_fraction(p, m)),
        "1f1b": (one_f_one_b(p, m), cost.bubble_fraction(p, m)),
        "interleaved": (interleaved(p, m, 2), cost.bubble_fraction(p, m, 2)),
        "zb-h1": (zero_bubble_h1(p, m), zb_s / (busy_s + zb_s)),
    }
    with Ranks(p) as ranks:
        runs = {name: emulated(schedule, times) for name, (schedule, _) in schedules.items()}
        measured = measure(ranks, runs, num_turns)
    print(f"{p} ranks, {m} micro-batches, emulated stages: bubble, and the step")
    print("schedule     formula  simulated  measured   simulated  measured")
    for name, (schedule, formula) in schedules.items():
        played, step = simulate(schedule, times), measured[name]
        print(
            f"{name:12} {formula:7.3f} {played.bubble_fraction:10.3f} "
            f"{step.bubble_fraction:9.3f} {format_seconds(played.step_s):>11} "
            f"{format_seconds(step.step_s):>9}"
        )


def print_micro_batches(num_turns: int) -> None:
    """A slow wire: m = p against m = 4p."""
    from course_lib.pipeline.lab import emulated, measure
    from course_lib.ranks import Ranks

    p, link = 4, Link(name="slow", latency_s=0.01, bytes_per_s=1e9)
    cost = BatchCost(forward_s=0.04, backward_s=0.08)
    with Ranks(p, link=link) as ranks:
        runs = {m: emulated(one_f_one_b(p, m), cost.times(m, link)) for m in (4, 8, 16)}
        measured = measure(ranks, runs, num_turns)
    print(f"{p} ranks, 1F1B, 120 ms of compute a rank, emulated {link}")
    for m, step in measured.items():
        simulated_s = step_parts(p, m, cost, link).step_s
        print(f"m = {m:2}: {format_seconds(simulated_s)} simulated, {format_seconds(step.step_s)}")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="Our pipeline engine against torch's, bubbles.")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    few = max(1, args.turns // 3)
    print_engines("bare", bare_processes, args.ranks, args.turns)
    print_engines("recorded", recorded_ranks, args.ranks, args.turns)
    print_halves(args.turns)
    start_s = time.perf_counter()
    simulate(interleaved(64, 512, 4))
    print(
        f"simulated 64 stages, 512 micro-batches: {format_seconds(time.perf_counter() - start_s)}"
    )
    print_bubbles(few)
    print_micro_batches(few)


if __name__ == "__main__":
    main()
