"""How fast the pipeline is: `python -m tests.benchmarks.bench_pipeline`.

First our engine against torch.distributed.pipelining, in turns: forwards and backwards of the same
stages by the same schedules. Once more with stages that only take their time, beside the simulator
and the most micro-batches in flight.

Then what the two halves of backward cost against the whole one.
"""

import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torchs

from course_lib import pipeline as ours
from course_lib.core import ModelSpec
from course_lib.core.units import format_bytes, format_seconds
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline import Pipeline, PipelineTimes, simulate, split_model
from course_lib.pipeline.actions import num_model_chunks_of, placement_of
from tests.benchmarks.harness import (
    COMPARED,
    WORLDS,
    Times,
    compared,
    median_s,
    on_bare_ranks,
    options,
    print_table,
    take_turns,
)

SPEC = ModelSpec(
    name="6M", hidden=256, num_layers=6, num_heads=8, ffn_hidden=1024, vocab=2000, max_seq=64,
    tied=False,
)  # fmt: skip
M = 8  # micro-batches
TIMES = PipelineTimes(forward_s=0.02, backward_input_s=0.02, backward_weight_s=0.02)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of every step."""
    return next_tokens(token_batch(0, batch=2 * M, seq=64, vocab=SPEC.vocab))


def pairs(p: int) -> dict[str, tuple[Any, Any]]:
    """Return each schedule, ours and torch's class."""
    return {
        "gpipe": (ours.gpipe(p, M), torchs.ScheduleGPipe),
        "1f1b": (ours.one_f_one_b(p, M), torchs.Schedule1F1B),
        "interleaved": (ours.interleaved(p, M, 2), torchs.ScheduleInterleaved1F1B),
        "zb-h1": (ours.zero_bubble_h1(p, M), torchs.ScheduleInterleavedZeroBubble),
        "zb-v": (ours.zero_bubble_v(p, M), torchs.ScheduleZBVZeroBubble),
        "dualpipe-v": (ours.dual_pipe_v(p, M), torchs.ScheduleDualPipeV),
    }


def seeded_stage(rank: int, p: int, schedule: Any) -> Any:
    """Return a rank's stage of the model of all tables."""
    torch.manual_seed(0)
    return split_model(SPEC, p, rank, placement=placement_of(schedule))


def gpt_run(schedule: Any) -> Any:
    """Return a run of the GPT of all tables."""
    from course_lib.pipeline.lab import PipelineRun

    inputs, targets = (tensor.chunk(M) for tensor in batch())
    build = partial(seeded_stage, schedule=schedule)
    return PipelineRun(
        build=build, schedule=schedule, inputs=inputs, targets=targets, loss_fn=token_loss
    )


def emulated_run(schedule: Any) -> Any:
    """Return a run whose stages sleep, as `TIMES` says."""
    from course_lib.pipeline.lab import emulated

    return emulated(schedule, TIMES)


class Copy(nn.Module):
    """A new tensor: torch detaches a stage's output in place, which a view does not allow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Copy it."""
        return x.clone()


def our_step(run: Any, rank: int, p: int) -> Any:
    """Return a step of ours."""
    pipeline = Pipeline(run.build(rank, p), run.loss_fn)

    def step() -> None:
        pipeline.stage.zero_grad()
        pipeline.step(run.schedule, run.inputs, run.targets)

    return step


def torchs_step(run: Any, rank: int, p: int, kind: Any) -> Any:
    """Return a step of torch's."""
    placement, stage = placement_of(run.schedule), run.build(rank, p)
    # A stage that sleeps cannot be tried out with any numbers: `like` says shapes.
    like = run.inputs[0].clone().requires_grad_() if run.inputs[0].dim() == 1 else None
    stages = [
        pipelining.PipelineStage(
            chunk if like is None else nn.Sequential(chunk, Copy()),
            depth,
            len(placement),
            torch.device("cpu"),
            input_args=like.detach() if like is not None and depth == 0 else like,
            output_args=like,
        )
        for chunk, depth in zip(stage.chunks, stage.depths, strict=True)
    ]
    single = issubclass(kind, torchs.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, M, loss_fn=run.loss_fn)
    inputs = (torch.cat(run.inputs),) if rank == 0 else ()
    targets = {"target": torch.cat(run.targets)} if rank == placement[-1] else {}

    def step() -> None:
        for one in stages:
            one.submod.zero_grad()
        schedule.step(*inputs, **targets, return_outputs=False)

    return step


def turns(rank: int, num_turns: int, run_of: Any = gpt_run) -> Times:
    """Time a step of ours and of torch's for each schedule."""
    p, steps = dist.get_world_size(), {}
    for name, (schedule, kind) in pairs(p).items():
        run = run_of(schedule)
        steps[f"{name} ours"] = our_step(run, rank, p)
        steps[f"{name} torch"] = torchs_step(run, rank, p, kind)
    return take_turns(steps, num_turns)


def engine_rows(measure: Any, sizes: list[int], num_turns: int) -> Iterator[list[Any]]:
    """Yield a row for each schedule and number of ranks."""
    for p in sizes:
        times = measure(turns, p, num_turns)
        for name in pairs(p):
            yield [name, p, *compared(times, f"{name} ours", f"{name} torch")]


def emulated_rows(sizes: list[int], num_turns: int) -> Iterator[list[Any]]:
    """Yield a row for each schedule: simulated, ours, torch's, and in flight."""
    for p in sizes:
        times = on_bare_ranks(partial(turns, run_of=emulated_run), p, num_turns)
        for name, (schedule, _) in pairs(p).items():
            step, chunks = simulate(schedule, TIMES), num_model_chunks_of(schedule)
            measured = (median_s(times, f"{name} {who}") for who in ("ours", "torch"))
            held = ", ".join(f"{peak / chunks:g}" for peak in step.peak_in_flight())
            yield [name, p, *map(format_seconds, (step.step_s, *measured)), held]


def print_halves(num_turns: int) -> None:
    """Print seconds and held bytes of one backward, and of its two halves."""
    from course_lib.memory.saved_tensors import activation_ledger
    from course_lib.pipeline.split_backward import SplitBackward

    torch.manual_seed(0)
    model, tokens = GPT(SPEC), batch()[0][:4]

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
        f"holding {format_bytes(sizes[1])}\n"
    )


def main() -> None:
    """Print all tables."""
    args = options(__doc__)
    for title, measure in WORLDS.items():
        title = f"{title} ranks, GPT {SPEC.name}, {M} micro-batches, 1 step"
        rows = engine_rows(measure, args.ranks, args.turns)
        print_table(title, ("schedule", "ranks", *COMPARED), rows)
    heads = ("schedule", "ranks", "simulated", "ours", "torch", "in flight, by rank")
    title = "bare ranks, stages that sleep: F = I = W = 20 ms a rank"
    print_table(title, heads, emulated_rows(args.ranks, args.turns))
    print_halves(args.turns)


if __name__ == "__main__":
    main()
