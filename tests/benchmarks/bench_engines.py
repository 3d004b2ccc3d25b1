"""Every engine on one model, in one table: `python -m tests.benchmarks.bench_engines`.

A model on the same batches under every strategy of the training command: ours, PyTorch's,
Accelerate's, Lightning's, DeepSpeed's, Megatron-Core's; those that are installed. The default model
takes about a minute on two quiet cores, and gives the table of docs/engines.md: float32, SGD with
momentum. The models of the FSDP study (`--models gpt2-char bert-dialogues --ranks 1 2`) take 8
minutes; its own seconds stand below: compare ratios, not seconds, as sequences and steps are few.

loss       the largest difference from one process in any step, relative
step       the median without the first, by the slowest rank; a CPU's, with gloo
epoch      that, times as many steps as the data has
calls      collectives and messages of rank 0 in the last step
sent       what these calls carry over the links, by rank 0
held       what a rank holds when backward has ended, the most of all ranks; parameters, gradients,
           optimizer state, or all tensors where a framework does not tell kinds
peak       what its process has grown by since there was no model
"""

import argparse
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from statistics import median
from typing import Any

from course_lib.core.presets import ENCODERS, MODELS, find_model
from course_lib.core.records import COMMUNICATION_KINDS, RunRecord
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.params import count_params
from course_lib.cost.traffic import sent_bytes
from course_lib.frameworks import missing
from course_lib.frameworks.engine import PACKAGES
from course_lib.fsdp.beside_frameworks import STUDY
from course_lib.ranks import Ranks
from course_lib.train.config import TrainConfig
from course_lib.train.strategies import STRATEGIES
from course_lib.train.trainer import train

HEADS = ("engine", "p", "loss", "step", "epoch", "calls", "sent", "held", "peak")
PUBLISHED = {"gpt2-char": "GPT-2", "bert-dialogues": "BERT"}
SPLIT: dict[str, dict[str, Any]] = {
    f"{engine}{split}": {**options, **more}
    for split, options, of_megatron in (
        ("tp=2", {"tp": 2}, {}),
        ("pp=2, 1F1B", {"pp": 2}, {}),
        ("pp=2, interleaved", {"pp": 2, "schedule": "interleaved"}, {"model_chunks": 2}),
    )
    for engine, more in (("", {}), ("megatron, ", {"strategy": "megatron", **of_megatron}))
}


def ways(p: int, study: bool) -> dict[str, dict[str, Any]]:
    """Return options of the runs by name; without the engines that are not installed."""
    names = [name for name in STRATEGIES if name not in ("single", "megatron")]
    found: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in names}
    if p == 2 and not study:
        found |= {"megatron, dp=2": {"strategy": "megatron"}, **SPLIT}
    return {name: options for name, options in found.items() if not _missing(name)}


def _missing(name: str) -> str | None:
    first = name.split("-")[0].split(",")[0]
    module = next((one for one in PACKAGES if one.startswith(first)), None)
    return missing(module) if module else None


def row(name: str, records: list[RunRecord], expected: list[float]) -> list[str]:
    """Return one run as a row of the table."""
    run, steps = records[0].run, records[0].steps
    losses = [step["loss"] for step in steps]
    off = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    step_s = max(
        median(step["end_s"] - step["start_s"] for step in record.steps[1:]) for record in records
    )
    calls = [
        event
        for event in records[0].events
        if event.kind in COMMUNICATION_KINDS
        and len(event.group) > 1
        and event.start_s >= steps[-1]["start_s"]
    ]
    memory = [record.run["memory"] for record in records]
    kinds = [kind for kind in ("params", "grads", "optim_state", "tensors") if kind in memory[0]]
    held = [format_bytes(max(one[kind] for one in memory)) for kind in kinds]
    return [
        *(name, str(len(records)), f"{off:.0e}", format_seconds(step_s)),
        *(format_seconds(step_s * run["steps_an_epoch"]), str(len(calls))),
        format_bytes(round(sum(sent_bytes([call], len(call.group)) for call in calls))),
        *(" + ".join(held), format_bytes(max(one["peak"] for one in memory))),
    ]


def rows(config: TrainConfig, sizes: list[int], study: bool) -> Iterator[list[str]]:
    """Run and yield one row after the other; each has ranks of its own."""
    expected: list[float] = []
    runs = [("one process", 1, {})]
    runs += [(name, p, how) for p in sizes for name, how in ways(p, study).items()]
    for name, p, how in runs:
        with Ranks(p) as ranks, redirect_stdout(None):
            records = ranks.run(train, replace(config, **how))
        expected = expected or [step["loss"] for step in records[0].steps]
        yield row(name, records, expected)


def config_of(name: str, steps: int) -> TrainConfig:
    """Return how a model is trained; the study's own settings for its models."""
    common: dict[str, Any] = {"steps": steps, "global_batch": 8, "seq": 32, "every": 0}
    if name in PUBLISHED:
        masked = name in ENCODERS
        model = (ENCODERS if masked else MODELS)[name]
        data = "dialogues" if masked else "shakespeare"
        return TrainConfig(model=model, masked=masked, data=data, **common)
    model = replace(find_model(name), num_layers=4)
    sgd: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "bucket_mib": 1}
    return TrainConfig(model=model, **sgd, **common)


def main() -> None:
    """Print a Markdown table for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["small"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    args = parser.parse_args()
    for name in args.models:
        config = config_of(name, args.steps)
        print(f"{count_params(config.model):,} parameters, {args.steps} steps of 8 sequences\n")
        print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
        for cells in rows(config, args.ranks, name in PUBLISHED):
            print(f"| {' | '.join(cells)} |", flush=True)
        if name in PUBLISHED:
            millions, one_s, two_s = STUDY[PUBLISHED[name]]
            print(f"published, {millions} M on GPUs: {one_s} s an epoch on one, {two_s} s on two")


if __name__ == "__main__":
    main()
