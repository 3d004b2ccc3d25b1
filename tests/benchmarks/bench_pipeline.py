"""How fast the pipeline is: `python -m tests.benchmarks.bench_pipeline`.

First our engine against torch.distributed.pipelining: the same stages and schedules take turns in
one run on the same ranks, so that whatever else the machine does falls on both. A turn is one step
of forwards and backwards, and takes as long as its slowest rank; the ratio is the median over the
turns of our time by torch's. Once on bare processes, as under torchrun, and once on the ranks of a
notebook, where every message is recorded. And once with stages that only take their time, beside
the simulator and the most micro-batches in flight.

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
from torch import nn

from course_lib.core import Link, ModelSpec
from course_lib.core.units import format_bytes, format_seconds
from course_lib.models import GPT, next_tokens, token_batch, token_loss
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
TIMES = {"forward_s": 0.02, "backward_input_s": 0.02, "backward_weight_s": 0.02}
Turns = dict[str, list[float]]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of every step."""
    return next_tokens(token_batch(0, batch=2 * NUM_MICRO_BATCHES, seq=64, vocab=SPEC.vocab))


def stage_here(placement: list[int]) -> Any:
    """This rank's stage of the model of all tables."""
    from course_lib.pipeline import split_model

    torch.manual_seed(0)
    return split_model(SPEC, dist.get_world_size(), dist.get_rank(), placement=placement)


def pairs(p: int, m: int) -> dict[str, tuple[Any, Any]]:
    """Each schedule, ours and torch's class."""
    from torch.distributed.pipelining import schedules as torchs

    from course_lib import pipeline as ours

    return {
        "gpipe": (ours.gpipe(p, m), torchs.ScheduleGPipe),
        "1f1b": (ours.one_f_one_b(p, m), torchs.Schedule1F1B),
        "interleaved": (ours.interleaved(p, m, 2), torchs.ScheduleInterleaved1F1B),
        "zb-h1": (ours.zero_bubble_h1(p, m), torchs.ScheduleInterleavedZeroBubble),
        "zb-v": (ours.zero_bubble_v(p, m), torchs.ScheduleZBVZeroBubble),
        "dualpipe-v": (ours.dual_pipe_v(p, m), torchs.ScheduleDualPipeV),
    }


def gpt_run(schedule: Any) -> Any:
    """A run of the GPT of all tables."""
    from course_lib.pipeline.actions import placement_of
    from course_lib.pipeline.lab import PipelineRun

    inputs, targets = batch()
    return PipelineRun(
        build=lambda rank, p: stage_here(placement_of(schedule)),
        schedule=schedule,
        inputs=inputs.chunk(NUM_MICRO_BATCHES),
        targets=targets.chunk(NUM_MICRO_BATCHES),
        loss_fn=token_loss,
    )


def emulated_run(schedule: Any) -> Any:
    """A run whose stages sleep, as `TIMES` says."""
    from course_lib.pipeline import PipelineTimes
    from course_lib.pipeline.lab import emulated

    return emulated(schedule, PipelineTimes(**TIMES))


class Copy(nn.Module):
    """A new tensor: torch detaches a stage's output in place, which a view does not allow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Copy it."""
        return x.clone()


def steps(run_of: Any) -> dict[str, Any]:
    """A step of ours and of torch's for each schedule: {"1f1b ours": fn, ...}."""
    from torch.distributed import pipelining

    from course_lib.pipeline import Pipeline
    from course_lib.pipeline.actions import placement_of

    p, rank, m = dist.get_world_size(), dist.get_rank(), NUM_MICRO_BATCHES
    found: dict[str, Any] = {}
    for name, (schedule, torch_schedule) in pairs(p, m).items():
        placement, run = placement_of(schedule), run_of(schedule)
        pipeline, stage = Pipeline(run.build(rank, p), run.loss_fn), run.build(rank, p)
        like = run.inputs[0].clone().requires_grad_() if run.inputs[0].dim() == 1 else None
        theirs = [  # a stage that sleeps cannot be tried out with any numbers: `like` says shapes
            pipelining.PipelineStage(
                *(
                    chunk if like is None else nn.Sequential(chunk, Copy()),
                    depth,
                    len(placement),
                    torch.device("cpu"),
                ),
                input_args=like.detach() if like is not None and depth == 0 else like,
                output_args=like,
            )
            for chunk, depth in zip(stage.chunks, stage.depths, strict=True)
        ]
        single = issubclass(torch_schedule, pipelining.schedules.PipelineScheduleSingle)
        their_schedule = torch_schedule(theirs[0] if single else theirs, m, loss_fn=run.loss_fn)
        args = (torch.cat(run.inputs),) if rank == 0 else ()
        kwargs = {"target": torch.cat(run.targets)} if rank == placement[-1] else {}

        def ours(pipeline: Any = pipeline, run: Any = run) -> None:
            pipeline.stage.zero_grad()
            pipeline.step(run.schedule, run.inputs, run.targets)

        def torchs(stages: Any = theirs, run: Any = their_schedule, a: Any = args, k: Any = kwargs):
            for one in stages:
                one.submod.zero_grad()
            run.step(*a, **k, return_outputs=False)

        found |= {f"{name} ours": ours, f"{name} torch": torchs}
    return found


def turns(rank: int, num_turns: int, run_of: Any = gpt_run) -> Turns:
    """Seconds of a step by the slowest rank, and this rank's processor time."""
    todo = steps(run_of)
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
        for name in pairs(world_size, NUM_MICRO_BATCHES):
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


def emulated_turns(rank: int, num_turns: int) -> Turns:
    """The same with stages that only take their time."""
    return turns(rank, num_turns, emulated_run)


def print_emulated(sizes: list[int], num_turns: int) -> None:
    """One line for each number of ranks and schedule: simulated, ours, torch's, and in flight."""
    from course_lib.pipeline import PipelineTimes, simulate
    from course_lib.pipeline.actions import num_model_chunks_of

    print("bare ranks, stages that sleep: F = I = W = 20 ms a rank")
    print("ranks schedule     simulated     ours    torch   in flight, by rank (micro-batches)")
    for world_size in sizes:
        seconds = bare_processes(emulated_turns, world_size, num_turns)
        for name, (schedule, _) in pairs(world_size, NUM_MICRO_BATCHES).items():
            step = simulate(schedule, PipelineTimes(**TIMES))
            held = [peak / num_model_chunks_of(schedule) for peak in step.peak_in_flight()]
            times = (step.step_s, *(median(seconds[f"{name} {who}"]) for who in ("ours", "torch")))
            shown = " ".join(f"{format_seconds(time_s):>8}" for time_s in times)
            print(f"{world_size:5} {name:12}  {shown}   {', '.join(f'{n:g}' for n in held)}")


def print_halves(num_turns: int) -> None:
    """Seconds and held bytes of one backward, and of its two halves."""
    from course_lib.memory.saved_tensors import activation_ledger
    from course_lib.pipeline.split_backward import SplitBackward

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
    from course_lib.pipeline import PipelineTimes, cost, naive, simulate
    from course_lib.pipeline.lab import emulated, measure
    from course_lib.ranks import Ranks

    p, m = 4, NUM_MICRO_BATCHES
    times = PipelineTimes(**TIMES)
    busy_s = m * 0.06
    zb_s = cost.zero_bubble_h1_bubble_s(p, m, 0.02, 0.02, 0.02)
    formulas = {
        "gpipe": cost.bubble_fraction(p, m),
        "1f1b": cost.bubble_fraction(p, m),
        "interleaved": cost.bubble_fraction(p, m, 2),
        "zb-h1": zb_s / (busy_s + zb_s),
        "zb-v": zb_s / (2 * busy_s + zb_s),
        "dualpipe-v": zb_s / (2 * busy_s + zb_s),
    }
    schedules = {name: (one, formulas[name]) for name, (one, _) in pairs(p, m).items()}
    schedules["naive"] = (naive(p, m), (p - 1) / p)
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
    from course_lib.pipeline import one_f_one_b
    from course_lib.pipeline.cost import BatchCost, step_parts
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
    from course_lib.pipeline import interleaved, simulate

    parser = argparse.ArgumentParser(description="Our pipeline engine against torch's, bubbles.")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    few = max(1, args.turns // 3)
    print_engines("bare", bare_processes, args.ranks, args.turns)
    print_engines("recorded", recorded_ranks, args.ranks, args.turns)
    print_emulated(args.ranks, args.turns)
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
